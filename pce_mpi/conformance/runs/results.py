"""Take the results of a candidate apart; say what to declare where they are others than its offer says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pce_mpi.arrays import as_array, is_floating
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import Gradient
from pce_mpi.conformance.problems.problem import Problem
from pce_mpi.conformance.text import meant

_TWO = (
    'where they are log-probabilities and entropies, write a function for each: @offers(kind="log_prob") for one that '
    'returns the first, @offers(kind="entropy"), without targets, for one that returns the second'
)


class BadResult(Exception):
    """A candidate returned something that is no loss, or no gradient."""


def results_of(
    returned: Any, offer: Offer, problem: Problem, given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], Callable[[Any], Any] | None]:
    """Return the loss, gradients by name, and the backward function, as far as they are due, or raise `BadResult`."""
    form, names = _form(returned, problem, given), ", ".join(problem.gradients)
    count = len(problem.gradients)
    due = {Gradient.NONE: "the loss alone", Gradient.VALUE: f"(loss, {names})"}.get(offer.gradient, "(loss, backward)")
    if form is not None and form is not offer.gradient:
        raise BadResult(f"{due} is due, got {described(returned)}; {meant(gradient=form.value)}")
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if pair and form is None and None is not _shape(returned[0]) == _shape(returned[1]):
        raise BadResult(f"{due} is due, got {described(returned)} of one shape; {_TWO}")
    gradients, backward = dict[str, Any](), None
    if offer.gradient is Gradient.NONE:
        loss = array_of(returned, "the loss")
    elif offer.gradient is Gradient.VALUE and isinstance(returned, tuple | list) and len(returned) == 1 + count:
        loss = array_of(returned[0], "the loss")
        gradients = gradients_of(returned[1] if count == 1 else returned[1:], problem, given)
    elif not pair or offer.gradient is Gradient.VALUE:
        raise BadResult(f"{due} is due, got {described(returned)}")
    elif callable(returned[1]):
        loss, backward = array_of(returned[0], "the loss"), returned[1]
    else:
        raise BadResult(f"{due} is due, where backward can be called, got {described(returned[1])}")
    if len(problem.kind.reductions) > 1 == len(offer.reductions):
        _check_reduction(problem, tuple(loss.shape))
    return loss, gradients, backward


def gradients_of(returned: Any, problem: Problem, given: Mapping[str, Any]) -> dict[str, Any]:
    """Take apart the gradients, in the order of `Problem.gradients`; raise `BadResult` if they are not what is due."""
    names = problem.gradients
    if len(names) == 1:
        return {names[0]: array_of(returned, "the gradient")}
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise BadResult(f"({', '.join(names)}) is due, got {described(returned)}")
    gradients = {name: array_of(each, name) for name, each in zip(names, returned, strict=True)}
    for name, each in gradients.items():
        shape, due = tuple(each.shape), tuple(given[name[1:]].shape)
        if shape != due:
            raise BadResult(f"{name} has shape {shape}, where that of {name[1:]} is due, {due}")
    return gradients


def array_of(value: Any, what: str) -> Any:
    """Return a result as a NumPy or CuPy array of floating-point numbers on the same memory."""
    if hasattr(value, "detach"):
        value = value.detach()  # a tensor with a graph does not export its numbers
    if isinstance(value, tuple | list) or value is None:
        raise BadResult(f"{what} is due as an array, got {described(value)}")
    try:
        array = as_array(value, what)
    except TypeError as error:
        raise BadResult(str(error)) from error
    if not is_floating(array.dtype):
        raise BadResult(f"{what} has dtype {array.dtype}, which is no floating-point one")
    return array


def described(value: Any) -> str:
    """Name the type of a result, and the types in a tuple."""
    if isinstance(value, tuple | list):
        types = ", ".join(type(each).__name__ for each in value[:4]) + ", ..." * (len(value) > 4)
        return f"a {type(value).__name__} of {len(value)}: {types}"
    return type(value).__name__


def _form(returned: Any, problem: Problem, given: Mapping[str, Any]) -> Gradient | None:
    """Return what an offer has to say for these results; None if nothing does."""
    if not isinstance(returned, tuple | list):
        return Gradient.NONE if isinstance(returned, int | float) or _shape(returned) is not None else None
    if len(returned) == 2 and callable(returned[1]):
        return Gradient.BACKWARD
    if len(returned) != 1 + len(problem.gradients):
        return None
    if problem.operands is not None:
        return Gradient.VALUE
    loss, second = map(_shape, returned)
    recorded = getattr(returned[1], "requires_grad", False)  # by autograd, as logits are
    return Gradient.VALUE if loss != second == _shape(given[problem.kind.arrays[0]]) and not recorded else None


def _shape(array: Any) -> tuple[int, ...] | None:
    return tuple(array.shape) if hasattr(array, "shape") else None


def _check_reduction(problem: Problem, shape: tuple[int, ...]) -> None:
    """Raise `BadResult` for the losses of another reduction than the only one that is offered."""
    due = f"for reduction {problem.reduction!r} a loss of shape {problem.loss_shape} is due, got {shape}"
    if problem.reduction != "none" and shape == problem.rows_shape != ():
        raise BadResult(f'{due}; where one loss per row is meant, declare it: @offers(reductions=("none",))')
    if problem.reduction == "none" and problem.rows_shape != () == shape:
        raise BadResult(f'{due}; where a mean is meant, declare it: @offers(reductions=("mean",)); a sum: ("sum",)')
