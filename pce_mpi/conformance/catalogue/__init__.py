"""The catalogue of all cases, family by family; what each one catches stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pce_mpi.conformance.cases import Case
from pce_mpi.conformance.catalogue import calls, layouts, numbers, options, special_values, targets
from pce_mpi.conformance.offers import DTYPES, Offer, offer_of

__all__ = ["cases", "catalogue"]

_FAMILIES = (numbers, special_values, layouts, targets, options, calls)


def catalogue(offer: Offer | None = None, dtypes: Iterable[str] | None = None) -> list[Case]:
    """Every case, also those that `offer` does not cover.

    Cases that are about something else than numbers come in one dtype only: the first of float32, float64, bfloat16
    and float16 that `offer` has, and `dtypes`. No case is in a dtype that `dtypes` does not have.
    """
    wanted = tuple(DTYPES if dtypes is None else dtypes)
    for dtype in wanted:
        if dtype not in DTYPES:
            raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    offered = DTYPES if offer is None else offer.dtypes
    main = next((dtype for dtype in DTYPES if dtype in offered and dtype in wanted), wanted[0])
    return [case for module in _FAMILIES for case in module.families(main) if case.dtype in wanted]


def cases(
    offer: Offer | Callable[..., Any] | None = None,
    *,
    pattern: str | Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
) -> list[Case]:
    """The cases, for `pytest.mark.parametrize("case", cases(candidate), ids=str)`.

    `offer`: a candidate, or an `Offer`: only cases that it offers. `pattern`: a name or a family or a shell pattern of
    names, or several. `dtypes`: only cases with logits of these. Raises `ValueError` for a pattern that no case fits.

    >>> [case.name for case in cases(pattern="zero-rows/*")]
    ['zero-rows/mean', 'zero-rows/sum', 'zero-rows/none']
    """
    offered = offer if offer is None or isinstance(offer, Offer) else offer_of(offer)
    found = catalogue(offered, dtypes)
    if pattern is not None:
        found = _matching(found, [pattern] if isinstance(pattern, str) else list(pattern))
    return [case for case in found if offered is None or offered.missing(case.needs, case.dtype) is None]


def _matching(found: list[Case], patterns: list[str]) -> list[Case]:
    for pattern in patterns:
        if not any(case.fits(pattern) for case in found):
            families = ", ".join(dict.fromkeys(case.family for case in found))
            raise ValueError(f"no case is called {pattern!r}; families: {families}")
    return [case for case in found if any(map(case.fits, patterns))]
