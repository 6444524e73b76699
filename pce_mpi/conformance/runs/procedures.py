"""The procedures that call a candidate, once, twice, two calls at once; its results; and checks beside its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import as_array, is_floating, library_named, shares_memory, to_host
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.candidates.torch_tensors import tensor_of
from pce_mpi.conformance.judging.comparing import difference
from pce_mpi.conformance.judging.judge import Answer, answered
from pce_mpi.conformance.judging.outcomes import Finding
from pce_mpi.conformance.problems.cases import Gradient, grid
from pce_mpi.conformance.problems.kinds.placement import MOVES, moved
from pce_mpi.conformance.problems.kinds.step import TrainingStep
from pce_mpi.conformance.problems.problem import Array, Problem, stored
from pce_mpi.conformance.text import error_text, meant

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Trial:
    """One rank's part of a case.

    `problem(0)` is the case's, `problem(1)` another of the same kind, for procedures that need two. `answers` are to be
    judged, each with the number of its problem and a name; `on_one_rank` has the answers to compare their bits with, by
    that number; `findings` are faults that the procedure has seen. Only where it `watches_logits`, a call that
    overwrites them or returns their memory is one: it would be so in every case.
    """

    candidate: Callable[..., Any]
    offer: Offer
    comm: MPI.Intracomm | None
    problem: Callable[[int], Problem]
    watches_logits: bool = True
    answers: list[tuple[int, str, Answer]] = field(default_factory=list)
    on_one_rank: dict[int, Answer] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def call(self, which: int = 0, *, backward: bool = True) -> _Call:
        """Call the candidate, and the backward function that it returns, with one of the problems."""
        call = _Call(self, self.problem(which))
        call.run(self.comm)
        if backward:
            call.backward()
        return call

    def call_on_one_rank(self) -> None:
        """Call the candidate with all classes, alone on each rank: one that sends to others does not hang."""
        from mpi4py import MPI

        alone = MPI.COMM_SELF.Dup()
        try:
            for which in dict.fromkeys(which for which, _, _ in self.answers):
                problem = self.problem(which)
                call = _Call(self, replace(problem, splits=(0, problem.classes)), alone.rank)
                call.run(alone)
                call.backward()
                self.on_one_rank[which] = call.answer()
        except Exception as error:
            text = f"raised on one rank, with all classes, where several ranks returned: {error_text(error)}"
            self.findings.append(Finding("other bits", text))
        finally:
            alone.Free()

    def judge(self, answer: Answer, which: int = 0, name: str = "") -> None:
        """Leave `answer` to the judge; `name` says which of several it is."""
        self.answers.append((which, name, answer))

    def find(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, self.problem(0).kind.of_results(text)))


class _Call:
    """A call of the candidate: its arguments and results."""

    def __init__(self, trial: Trial, problem: Problem, rank: int | None = None) -> None:
        self._trial, self._offer, self._problem = trial, trial.offer, problem
        self._watched: dict[str, _Watched] = {}
        if rank is None:
            rank = 0 if trial.comm is None else trial.comm.rank
        shard = problem.shard(rank)
        options = dict(shard.options)
        if len(self._offer.reductions) < 2:
            del options["reduction"]
        if not self._offer.any_axis or options["axis"] in (-1, problem.logits.ndim - 1):
            del options["axis"]
        if "ignore_index" not in self._offer.options:
            options.pop("ignore_index", None)
        for name in {"weight", "bias"} & options.keys():
            options[name] = self._hand(name, options[name])
        if "support" in options:
            options["support"] = tuple(
                map(self._hand, ("the support's ids", "the support's offsets"), options["support"])
            )
        self._arrays = {name: self._hand(name, array) for name, array in shard.arrays.items()}
        facts = {"class_start": shard.class_start, "num_classes": shard.num_classes, "splits": problem.splits}
        self._options = {name: fact for name, fact in facts.items() if name in problem.kind.facts} | options
        self.loss: Any = None
        self.gradients: Mapping[str, Any] = {}
        self._backward: Callable[[Any], Any] | None = None

    def _hand(self, name: str, array: Array) -> Any:
        handed = _as_library(array, self._offer.arrays)
        if self._problem.copies == 1:  # else there is no memory for a copy of it
            self._watched[name] = _Watched(array, handed)
        return handed

    def run(self, comm: MPI.Intracomm | None, **more: Any) -> None:
        returned = self._trial.candidate(*self._arrays.values(), comm=comm, **self._options, **more)
        self.loss, self.gradients, self._backward = results_of(returned, self._offer, self._problem, self._given)

    @property
    def _given(self) -> dict[str, Any]:
        return self._options | self._arrays

    def backward(self, dloss: Array | None = None) -> None:
        """Call the backward function, if there is one, with the upstream gradient of the problem unless given."""
        if self._backward is None:
            return
        problem = self._problem
        if dloss is None:
            dloss = np.ones(problem.loss_shape) if problem.dloss is None else problem.dloss
        dloss = dloss.astype(to_host(self.loss).dtype)
        if dloss.size == self.loss.size and problem.copies == 1:
            dloss = dloss.reshape(self.loss.shape)
        dloss = stored(problem.repeated(dloss), problem.dloss_memory)
        returned = self._backward(self._hand("the upstream gradient", dloss))
        self.gradients = gradients_of(returned, problem, self._given)

    def answer(self) -> Answer:
        """Return copies of the results so far."""
        gradients = {name: to_host(each).copy() for name, each in self.gradients.items()}
        return answered(self._problem, to_host(self.loss).copy(), gradients)

    def compare(self, saved: Answer) -> None:
        """Report results that another call has changed since they were saved."""
        for what, _, _ in _differing(saved, self.answer()):
            self._trial.find("overwritten", f"a second call changed the {what} that the first one had returned")

    def check(self) -> None:
        """Report arguments that have changed, and results that share memory with another array."""
        results = {"the gradient" if name == "dlogits" else name: each for name, each in self.gradients.items()}
        free = set() if self._trial.watches_logits and not self._offer.overwrites_logits else {"logits", "array"}
        for name, watched in self._watched.items():
            declared = f"; {meant(overwrites_logits=True)}" * (name in ("logits", "array"))
            if name not in free and watched.changed():
                were = "were" if name[-1] == "s" else "was"
                self._trial.find("inputs modified", f"{name} {were} modified{declared}")
            if watched.changed_beside():
                self._trial.find("inputs modified", f"memory between or beside the elements of {name} was modified")
            for result, array in {"the loss": self.loss, **results}.items():
                if name not in free and shares_memory(array, watched.handed):
                    self._trial.find("aliasing", f"{result} shares memory with {name}{declared}")
        for result, array in results.items():
            if shares_memory(self.loss, array):
                self._trial.find("aliasing", f"the loss shares memory with {result}")


class _Watched:
    """An argument of the candidate, and its bytes before the call, those between its elements included."""

    def __init__(self, array: Array, handed: Any) -> None:
        self.handed = as_array(handed, "input")
        self._whole = array.base if isinstance(self.handed, np.ndarray) else None
        self._view = array
        self._before = to_host(self.handed).tobytes()
        self._beside = self._others()

    def changed(self) -> bool:
        """Return True if any element differs now."""
        return to_host(self.handed).tobytes() != self._before

    def changed_beside(self) -> bool:
        """Return True if any byte between or beside the elements differs now."""
        return self._others() != self._beside

    def _others(self) -> bytes:
        """Return the bytes of the array that this one is a view of, with 0 in the place of its elements."""
        if self._whole is None:
            return b""
        copy = self._whole.copy(order="K")
        start = self._view.__array_interface__["data"][0] - self._whole.__array_interface__["data"][0]
        np.ndarray(self._view.shape, self._view.dtype, copy, start, self._view.strides)[...] = 0
        return copy.tobytes()


def _as_library(array: Array, library: str) -> Any:
    """Return `array` as an array of that library: on the same memory, or on the GPU."""
    return tensor_of(array) if library == "torch" else library_named(library).asarray(array)


def _plain(trial: Trial) -> None:
    call = trial.call()
    trial.judge(call.answer())
    call.check()


def _backward_twice(trial: Trial) -> None:
    call = trial.call()
    first, before = call.gradients, call.answer()
    call.backward()
    kept = answered(trial.problem(0), before.loss, {name: to_host(each) for name, each in first.items()})
    if any(_differing(before, kept)):
        trial.find("overwritten", "the second backward pass changed the gradient that the first one had returned")
    trial.judge(before, name="first backward pass")
    trial.judge(call.answer(), name="second backward pass")
    call.check()


def _two(trial: Trial, *, at_once: bool) -> None:
    """Make two calls, the second one before the backward pass of the first one or after it."""
    first = trial.call(0, backward=not at_once)
    before = first.answer()
    second = trial.call(1, backward=not at_once)
    first.compare(before)
    for which, nth, call, answer in ((0, "first", first, before), (1, "second", second, second.answer())):
        if at_once:
            call.backward()
            answer = call.answer()
        trial.judge(answer, which, f"{nth} of two losses")
        call.check()


def _run_twice(trial: Trial) -> None:
    first, second = (trial.call().answer() for _ in range(2))
    for what, a, b in _differing(first, second):
        trial.find("not deterministic", f"two calls with the same arguments gave another {what}{difference(a, b)}")
    trial.judge(first)


def _rows_sharded(trial: Trial) -> None:
    """Call the candidate on a grid of ranks; bring the rows of a shard together for the judge."""
    if trial.comm is None:
        _plain(trial)
        return
    rows_apart, shards = grid(trial.comm.size)
    whole, rank = trial.problem(0), trial.comm.rank
    over_classes: Any = trial.comm.Split(rank // shards)
    over_rows: Any = trial.comm.Split(rank % shards)
    start, stop = (whole.rows * each // rows_apart for each in (over_rows.rank, over_rows.rank + 1))
    mine = replace(
        whole, logits=whole.logits[start:stop], targets=whole.targets[start:stop], splits=whole.splits[: shards + 1]
    )
    call = _Call(trial, mine, over_classes.rank)
    call.run(over_classes, batch_comm=over_rows)
    call.backward()
    answer = call.answer()
    gradient = answer.dlogits
    if gradient is not None:
        gradient = np.concatenate(over_rows.allgather(gradient))
        if rank >= shards:  # these ranks have no shard of their own for the judge
            gradient = gradient[:, :0]
    trial.judge(Answer(answer.loss, gradient))
    over_classes.Free()
    over_rows.Free()


def _several_targets(trial: Trial) -> None:
    """Judge each of three targets a row by itself; the problems have the same logits."""
    problems = [trial.problem(which) for which in range(3)]
    call = _Call(trial, replace(problems[0], targets=np.stack([each.targets for each in problems], axis=-1)))
    call.run(trial.comm)
    shape = (*problems[0].rows_shape, len(problems))
    if call.loss.shape != shape:
        trial.find("shape", f"loss has shape {tuple(call.loss.shape)}, where that of the targets is due, {shape}")
        return
    for which in range(len(problems)):
        call.backward(np.broadcast_to(np.arange(len(problems)) == which, shape).astype(np.float64))
        each = call.answer()
        trial.judge(Answer(each.loss[..., which], each.dlogits), which, f"target {which + 1} of {len(problems)}")
    call.check()


def _copies(trial: Trial) -> None:
    """Judge the least and the greatest number that the copies of each row gave."""
    call, problem = trial.call(), trial.problem(0)
    given = call.loss, *call.gradients.values()
    loss, *gradient = (to_host(each).reshape(problem.copies, -1, *each.shape[1:]) for each in given)
    for name, one in (("the least of all copies", np.min), ("the greatest of all copies", np.max)):
        trial.judge(Answer(one(loss, axis=0), *(one(each, axis=0) for each in gradient)), name=name)


def _step(trial: Trial) -> None:
    """Call the candidate for each micro-batch of this rank, as a trainer does, and judge what its tokens count."""
    step, rank = trial.problem(0), 0 if trial.comm is None else trial.comm.rank
    assert isinstance(step, TrainingStep)
    parts = step.micro_batches(rank)
    gradients: list[Array] = []
    losses = np.zeros(len(parts))
    for number, part in enumerate(parts):
        call = _Call(trial, part, 0)
        targets = [_as_library(each.targets.copy(), trial.offer.arrays) for each in parts]
        call.run(trial.comm, context_ranks=step.context_ranks, micro_batches=targets)
        call.backward()
        call.check()
        answer = call.answer()
        assert answer.dlogits is not None
        if answer.dlogits.size != part.logits.size:
            raise BadResult(f"gradient has shape {answer.dlogits.shape}, where {part.logits.shape} is due")
        if answer.loss.size != 1:
            raise BadResult(f"loss has shape {answer.loss.shape}, where one number is due")
        if np.isnan(answer.loss.astype(np.float64)).any():
            where = "no token of it is valid" * (not part.valid.any()) or "some of its tokens are valid"
            trial.find("loss", f"the loss of micro-batch {number} is nan, where {where}")
        gradients.append(answer.dlogits)
        losses[number] = answer.loss.astype(np.float64).reshape(())
    trial.judge(Answer(step.weights(rank, gradients).astype(step.dtype), products={"losses": losses}))


def _placement(trial: Trial) -> None:
    """Call the candidate once, and judge its numbers; what a move gives is compared by its bits, here."""
    if trial.offer.computes not in MOVES:
        _plain(trial)
        return
    call, rank = trial.call(backward=False), 0 if trial.comm is None else trial.comm.rank
    upstream, moves = moved(trial.problem(0), rank, ones=trial.offer.gradient is Gradient.VALUE)
    call.backward(upstream)
    answer = call.answer()
    for got, move in zip((answer.loss, answer.dlogits), moves, strict=True):
        if got is not None and (text := move.wrong(got)):
            trial.find(move.name, text)
    call.check()


PROCEDURES: dict[str, Callable[[Trial], None]] = {
    "plain": _plain,
    "backward-twice": _backward_twice,
    "two-at-once": partial(_two, at_once=True),
    "one-after-the-other": partial(_two, at_once=False),
    "run-twice": _run_twice,
    "rows-sharded": _rows_sharded,
    "copies": _copies,
    "several-targets": _several_targets,
    "step": _step,
    "placement": _placement,
}


def _differing(first: Answer, second: Answer) -> Iterator[tuple[str, Array, Array]]:
    """Yield the results, by name, whose bits are not the same in both."""
    before, after = ({"loss": each.loss, "gradient": each.dlogits, **each.products} for each in (first, second))
    for what, a in before.items():
        b = after[what]
        if a is not None and b is not None and (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes()):
            yield what, a, b


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
    if offer.kind == "loss" and pair and form is None and None is not _shape(returned[0]) == _shape(returned[1]):
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
