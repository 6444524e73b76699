"""This package's own loss on arrays, as candidates: they must pass everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pce_mpi.conformance.candidates.offers import EVERYTHING
from pce_mpi.conformance.problems.cases import Gradient
from pce_mpi.loss import (
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)


class ForwardAndBackward:
    """`softmax_cross_entropy_forward`, then `softmax_cross_entropy_backward` with the kit's upstream gradient."""

    offer = EVERYTHING

    def __call__(self, logits: Any, targets: Any, **options: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the loss and its backward pass."""
        loss, residuals = softmax_cross_entropy_forward(logits, targets, **options)
        return loss, lambda dloss: softmax_cross_entropy_backward(dloss, residuals)


class ValueAndGrad:
    """`softmax_cross_entropy_value_and_grad`."""

    offer = replace(EVERYTHING, gradient=Gradient.VALUE)

    def __call__(self, logits: Any, targets: Any, **options: Any) -> tuple[Any, Any]:
        """Return the loss and its gradient."""
        return softmax_cross_entropy_value_and_grad(logits, targets, **options)
