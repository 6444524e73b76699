"""Take the results of a candidate apart; say what to declare where they are others than its offer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pce_mpi.arrays import as_array
from pce_mpi.conformance.offers import Offer
from pce_mpi.conformance.problems import Problem
from pce_mpi.conformance.terms import Gradient

_DUE = {
    Gradient.NONE: "the loss alone",
    Gradient.VALUE: "(loss, dlogits)",
    Gradient.BACKWARD: "(loss, backward)",
}
_MEANT = "where that is meant, declare it: "
_TWO = (
    'where they are log-probabilities and entropies, write a function for each: @offers(kind="log_prob") for one that '
    'returns the first, @offers(kind="entropy"), without targets, for one that returns the second'
)


class BadResult(Exception):
    """A candidate returned something that is no loss, or no gradient."""


class Results(NamedTuple):
    """The loss, and beside it what the offer says: nothing, the gradient, or a function that returns it."""

    loss: Any
    gradient: Any = None
    backward: Callable[[Any], Any] | None = None


def results_of(returned: Any, offer: Offer, problem: Problem, logits: Any) -> Results:
    """Take apart what a candidate returned for a shard of the logits; raise `BadResult` if it is not what is due."""
    form, due = _form(returned, logits), _DUE[offer.gradient]
    if form is not None and form is not offer.gradient:
        raise BadResult(f'{due} is due, got {described(returned)}; {_MEANT}@offers(gradient="{form}")')
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if pair and form is None and None is not _shape(returned[0]) == _shape(returned[1]):
        raise BadResult(f"{due} is due, got {described(returned)} of one shape; {_TWO}")
    if offer.gradient is Gradient.NONE:
        results = Results(array_of(returned, "the loss"))
    elif not pair:
        raise BadResult(f"{due} is due, got {described(returned)}")
    elif offer.gradient is Gradient.VALUE:
        results = Results(array_of(returned[0], "the loss"), gradient=array_of(returned[1], "the gradient"))
    elif callable(returned[1]):
        results = Results(array_of(returned[0], "the loss"), backward=returned[1])
    else:
        raise BadResult(f"{due} is due, where backward can be called, got {described(returned[1])}")
    if len(problem.kind.reductions) > 1 == len(offer.reductions):
        _check_reduction(problem, tuple(results.loss.shape))
    return results


def array_of(value: Any, what: str) -> Any:
    """Return a result as a NumPy or CuPy array on the same memory."""
    if hasattr(value, "detach"):
        value = value.detach()  # a tensor with a graph does not export its numbers
    if not isinstance(value, tuple | list) and value is not None:
        try:
            return as_array(value, what)
        except TypeError as error:
            raise BadResult(str(error)) from error
    raise BadResult(f"{what} is due as an array, got {described(value)}")


def described(value: Any) -> str:
    """Name the type of a result, and the types in a tuple."""
    if isinstance(value, tuple | list):
        types = ", ".join(type(each).__name__ for each in value[:4]) + ", ..." * (len(value) > 4)
        return f"a {type(value).__name__} of {len(value)}: {types}"
    return type(value).__name__


def _form(returned: Any, logits: Any) -> Gradient | None:
    """Return what an offer has to say for these results; None if nothing does."""
    if not isinstance(returned, tuple | list):
        return Gradient.NONE if isinstance(returned, int | float) or _shape(returned) is not None else None
    if len(returned) != 2:
        return None
    if callable(returned[1]):
        return Gradient.BACKWARD
    loss, second = map(_shape, returned)
    recorded = getattr(returned[1], "requires_grad", False)  # by autograd, as logits are
    return Gradient.VALUE if loss != second == _shape(logits) and not recorded else None


def _shape(array: Any) -> tuple[int, ...] | None:
    return tuple(array.shape) if hasattr(array, "shape") else None


def _check_reduction(problem: Problem, shape: tuple[int, ...]) -> None:
    """Raise `BadResult` for the losses of another reduction than the only one that is offered."""
    due = f"for reduction {problem.reduction!r} a loss of shape {problem.loss_shape} is due, got {shape}"
    if problem.reduction != "none" and shape == problem.rows_shape != ():
        raise BadResult(f'{due}; where one loss per row is meant, declare it: @offers(reductions=("none",))')
    if problem.reduction == "none" and problem.rows_shape != () == shape:
        raise BadResult(f'{due}; where a mean is meant, declare it: @offers(reductions=("mean",)); a sum: ("sum",)')
