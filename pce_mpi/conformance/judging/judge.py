"""Judge the answers of all ranks, by the rules of `judging`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import math
from typing import NamedTuple

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.conformance.judging.comparing import Gradients, Losses, Product, Tolerance, of_products, other_bits
from pce_mpi.conformance.judging.diagnosis import explain
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Finding, together
from pce_mpi.conformance.problems.problem import Array, Problem


@dataclass(frozen=True)
class Answer:
    """The results of one rank, as NumPy arrays; no `dlogits` if only the loss was requested.

    `products` are the gradients of the factors of logits, by name.
    """

    loss: Array
    dlogits: Array | None = None
    products: Mapping[str, Array] = field(default_factory=dict)


def answered(problem: Problem, loss: Array, gradients: Mapping[str, Array]) -> Answer:
    """Return the answer that has these gradients by name; dw has the gradient of logits that are w."""
    if problem.operands is None:
        return Answer(loss, gradients.get("dlogits"))
    if not gradients or not problem.operands.with_identity:
        return Answer(loss, products=gradients)
    dw = gradients["dw"]
    return Answer(loss, dw[::-1].reshape(*problem.rows_shape, dw.shape[-1]), {"dhidden": gradients["dhidden"]})


class Judgement(NamedTuple):
    """The verdict on an answer: its numbers are right if there are no findings; `picture` shows a wrong gradient.

    `form` has the faults of shape and dtype in spite of which the numbers could be judged.
    """

    findings: list[Finding]
    accuracies: list[Accuracy]
    picture: ErrorMap | None
    form: list[Finding]


def judge(
    problem: Problem, answers: Sequence[Answer], tolerance: Tolerance, on_one_rank: Answer | None = None
) -> Judgement:
    """Compare the answers of all ranks with the exact ones, and their bits with those of the answer on one rank."""
    comparable, fatal, form = _comparable(problem, answers)
    if fatal:
        return Judgement(fatal, [], None, form)
    losses = Losses.of(problem, [answer.loss for answer in comparable], tolerance)
    shards = [answer.dlogits for answer in comparable if answer.dlogits is not None]
    gradients = Gradients(problem, shards, tolerance) if shards else None
    products = of_products(problem, [answer.products for answer in comparable], tolerance)
    differing, wrong = losses.differing(), losses.findings() + (gradients.findings() if gradients else [])
    of_factors = [finding for product in products for finding in product.findings()]
    if not wrong and (text := problem.kind.beside(problem, comparable)):
        wrong = [Finding("loss", text)]
    elif wrong or of_factors:
        first = (differing * bool(losses.wrong.any()) + wrong + of_factors)[0]
        _explain(first, problem, losses, gradients, products)
    for finding in differing:
        words = f"{':' * bool(wrong)} {finding.text}" if finding.cause else f" ({finding.text})"
        finding.text = f"the ranks' {problem.kind.plural} differ{words}"
    bits: list[Finding] = []
    if on_one_rank is not None:  # of the answers as they are: another dtype has other bits
        shards = [answer.dlogits for answer in answers if answer.dlogits is not None]
        bits = other_bits(problem, [each.loss for each in answers], shards, on_one_rank.loss, on_one_rank.dlogits)
    return Judgement(
        findings=differing + wrong + of_factors + bits,
        accuracies=[accuracy for each in (losses, gradients, *products) if each for accuracy in each.accuracies()],
        picture=gradients.picture() if gradients and gradients.wrong.any() else None,
        form=form,
    )


def _explain(
    finding: Finding, problem: Problem, losses: Losses, gradients: Gradients | None, products: list[Product]
) -> None:
    """Put what explains the answer before the text of a finding."""
    if problem.gathered:  # a gradient on each rank, which no model of a fault has
        gradients = None
    if problem.operands is None or problem.operands.with_identity:
        products = []
    faults = explain(
        problem, losses.losses, gradients and gradients.array, losses.wrong, gradients and gradients.wrong, products
    )
    if faults:
        finding.faults = [fault.of(problem.kind) for fault in faults]
        cause = "; ".join(fault.said for fault in finding.faults)
        finding.text = f"{cause} ({finding.text})" if cause else finding.text


def _comparable(problem: Problem, answers: Sequence[Answer]) -> tuple[list[Answer], list[Finding], list[Finding]]:
    """Return the answers in the shapes and dtypes that are due, the faults that prevent it, and those that do not."""
    fatal: list[list[Finding]] = [[] for _ in answers]
    form: list[list[Finding]] = [[] for _ in answers]
    comparable = []
    for rank, answer in enumerate(answers):
        shard = problem.part(problem.logits, rank).shape
        results = {"loss": answer.loss, "gradient": answer.dlogits}
        for which, shape in (("loss", problem.loss_shape), ("gradient", shard)):
            got, what = results[which], which if which == "gradient" else problem.kind.noun
            if got is None:
                continue
            if got.shape != shape:
                right = f"{shape} is due" + f", the shape of this rank's {problem.kind.arrays[0]}" * (
                    which == "gradient"
                )
                kept = form if got.size == math.prod(shape) else fatal
                kept[rank].append(Finding("shape", f"{what} has shape {got.shape}, where {right}"))
            if not is_floating(got.dtype):
                fatal[rank].append(Finding("dtype", f"{what} has dtype {got.dtype}, which is no floating-point one"))
            elif which == "gradient" and got.dtype != problem.dtype:
                text = f"gradient has dtype {got.dtype}, where that of the logits is due, {problem.dtype}"
                form[rank].append(Finding("dtype", problem.kind.worded(text)))
            if not any(fatal):
                with np.errstate(over="ignore"):
                    results[which] = got.reshape(shape).astype(problem.dtype if which == "gradient" else got.dtype)
        comparable.append(Answer(results["loss"], results["gradient"], answer.products))  # type: ignore[arg-type]  # a loss is never None
    return comparable, together(fatal), together(form)
