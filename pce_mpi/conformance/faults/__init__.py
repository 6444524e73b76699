"""Faults seen in losses of this kind, and the answer that each of them gives."""

from __future__ import annotations

from collections.abc import Iterator

from pce_mpi.conformance.faults.answer import Answer, Computed, Given
from pce_mpi.conformance.faults.memory import memory_order
from pce_mpi.conformance.faults.numbers import roundings, special_values
from pce_mpi.conformance.faults.options import other_options, smoothing
from pce_mpi.conformance.faults.rows import counted_rows, probabilities, upstream
from pce_mpi.conformance.faults.sharding import reductions, target_owners
from pce_mpi.conformance.textbook import Textbook

# The special before the general: the first fault that fits an answer is reported.
_FAMILIES = (
    special_values,
    smoothing,
    other_options,
    target_owners,
    reductions,
    counted_rows,
    probabilities,
    upstream,
    roundings,
    memory_order,
)


def answers(b: Textbook) -> Iterator[tuple[str, Answer]]:
    """Yield every known fault that could show in this problem: a text, and the answer that it gives."""
    for family in _FAMILIES:
        for text, made in family(b):
            if isinstance(made, Given):
                yield text, made
            else:
                yield text, Computed(made if isinstance(made, tuple) else (made,))
