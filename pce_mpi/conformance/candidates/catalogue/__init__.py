"""The catalogue of all cases, family by family, each with the fault that it catches."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pce_mpi.conformance.candidates.catalogue import calls, numbers, shapes, targets
from pce_mpi.conformance.candidates.fitting import unmet_need
from pce_mpi.conformance.candidates.offers import Offer, offer_of
from pce_mpi.conformance.problems.cases import DTYPES, Case, fits
from pce_mpi.conformance.problems.kinds import KINDS

_FAMILIES = (numbers.CASES, numbers.SPECIAL, shapes.CASES, targets.CASES, calls.CASES)


def catalogue(offer: Offer | None = None, dtypes: Iterable[str] | None = None, *, large: bool = False) -> list[Case]:
    """Return every case of a loss or of the kind of `offer`, covered by it or not; with `large`, also large ones.

    Cases that are not about numbers come in one dtype only: the first of float32, float64, bfloat16 and float16 that is
    in `offer` and in `dtypes`.
    """
    wanted = tuple(DTYPES if dtypes is None else dtypes)
    for dtype in wanted:
        if dtype not in DTYPES:
            raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    offered = DTYPES if offer is None else offer.dtypes
    usable = [dtype for dtype in DTYPES if dtype in offered and dtype in wanted] or wanted[:1]
    kind = KINDS["loss" if offer is None else offer.kind]
    every = [case for family in _FAMILIES if kind.shared_cases for case in family.of(usable[0])]
    every += () if kind.cases is None else kind.cases.of(usable[0])
    if large and kind.shared_cases:
        every += shapes.LARGE.of(usable[-1])
    fitting = [
        case
        for case in dict.fromkeys(every)
        if case.dtype in wanted and not any(fits(case.name, each) for each in kind.without)
    ]
    return [replace(case, catches=kind.said(case.family, case.catches)) for case in fitting]


def cases_of_all_kinds(dtypes: Iterable[str] | None = None, *, large: bool = False) -> list[Case]:
    """Return the catalogue of a loss, and the cases that other kinds alone have; two of one name differ in words."""
    of_kinds = (catalogue(Offer(kind=kind, dtypes=DTYPES), dtypes) for kind in KINDS)
    shared = catalogue(None, dtypes, large=large)
    names = {case.name for case in shared}
    own = {(case.name, case.catches): case for cases in of_kinds for case in cases if case.name not in names}
    return [*shared, *own.values()]


def cases(
    offer: Offer | Callable[..., Any] | None = None,
    *,
    pattern: str | Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
) -> list[Case]:
    """Return the cases of the catalogue, for `pytest.mark.parametrize("case", cases(candidate), ids=str)`.

    Parameters
    ----------
    offer : Offer or callable, optional
        A candidate, or what one offers: only cases that it offers.
    pattern : str or iterable of str, optional
        Only cases with this name, of this family, or whose names fit this shell pattern.
    dtypes : iterable of str, optional
        Only cases with logits of these dtypes.

    Returns
    -------
    list of Case
        The selected cases, in the order of the catalogue.

    Raises
    ------
    ValueError
        No case fits a pattern, or a dtype is not one of the kit's.

    Examples
    --------
    >>> [case.name for case in cases(pattern="zero-rows/*")]
    ['zero-rows/mean', 'zero-rows/sum', 'zero-rows/none']
    """
    offered = offer if offer is None or isinstance(offer, Offer) else offer_of(offer)
    selected = catalogue(offered, dtypes)
    if pattern is not None:
        patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        for each in patterns:
            if not any(fits(case.name, each) for case in selected):
                families = ", ".join(dict.fromkeys(case.family for case in selected))
                raise ValueError(f"no case is called {each!r}; families: {families}")
        selected = [case for case in selected if any(fits(case.name, each) for each in patterns)]
    return [case for case in selected if offered is None or unmet_need(offered, case.needs, case.dtype) is None]
