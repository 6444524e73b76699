"""The demands of a case on a candidate, and the first that an offer does not meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.offers import Gradient, Offer, Shards


@dataclass(frozen=True)
class Needs:
    """The demands of a case on a candidate, in the fields of `Offer`.

    `reductions`: any of them will do, and the first that is offered is used. `shards`: how uneven they have to be.
    """

    options: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ("mean", "none", "sum")
    probabilities: bool = False
    dims: int = 2
    any_axis: bool = False
    shards: Shards = "equal"
    gradient: Gradient = Gradient.NONE
    strided: bool = False
    keeps_logits: bool = False
    deterministic: bool = False
    empty: bool = False
    any_ignore_index: bool = False
    unnormalized: bool = False
    checks_targets: bool = False
    num_classes: bool = False
    targets: bool = False
    batch_comm: bool = False
    same_bits: bool = False


def dims_for(offer: Offer, needs: Needs) -> int | None:
    """Return the dims of the logits in a case: 3 where the case has 2, and these are not offered; None if none are."""
    if needs.dims in offer.dims:
        return needs.dims
    return 3 if needs.dims == 2 and 3 in offer.dims and not needs.any_axis else None


# The needs of cases that an offer meets or does not, in words.
_FLAGS = {
    "probabilities": "probability targets",
    "any_axis": "a class axis that is not the last",
    "strided": "logits that are not contiguous",
    "deterministic": "the same bits in every run",
    "empty": "zero rows",
    "checks_targets": "the refusal of targets that are no class",
    "num_classes": "num_classes",
    "batch_comm": "rows that are sharded",
    "same_bits": "the same bits on every number of ranks",
}


def unmet_need(offer: Offer, needs: Needs, dtype: str) -> str | None:
    """Return the first need of a case that an offer lacks, in a few words; None if there is none."""

    def beyond(name: str, known: Iterable[str]) -> bool:
        order = list(known)
        return order.index(getattr(needs, name)) > order.index(getattr(offer, name))

    options = offer.options if offer.ignore_index is None else (*offer.options, "ignore_index")
    lacks = {
        dtype: dtype not in offer.dtypes,
        f"{dtype}, which needs ml_dtypes: pip install 'pce_mpi[bf16]'": not _known(dtype),
        **{option: option not in options for option in needs.options},
        "any ignore_index": needs.any_ignore_index and "ignore_index" not in offer.options,
        "reduction " + " or ".join(needs.reductions): not set(needs.reductions) & set(offer.reductions),
        f"{needs.dims}-D logits": dims_for(offer, needs) is None,
        "probabilities that do not sum to 1": needs.unnormalized and offer.normalized,
        "shards of any length" if needs.shards == "any" else "uneven shards": beyond("shards", get_args(Shards)),
        "a gradient" if needs.gradient == Gradient.VALUE else "an upstream gradient": beyond("gradient", Gradient),
        "logits left as they are": needs.keeps_logits and offer.overwrites_logits,
        "targets": (needs.targets or needs.checks_targets) and offer.kind == "entropy",
        **{what: getattr(needs, name) and not getattr(offer, name) for name, what in _FLAGS.items()},
    }
    return next((what for what, lacking in lacks.items() if lacking), None)


def _known(dtype: str) -> bool:
    try:
        dtype_named(dtype)
    except TypeError:
        return False
    return True
