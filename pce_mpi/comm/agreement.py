"""Agreement: every rank makes the same call and all checks passed, or every rank raises the same error.

Every function is collective over its `comm`, an mpi4py intracommunicator, and works on the private duplicate of it that
`communicators.py` keeps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
import zlib

import numpy as np

from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.errors import (
    CollectiveError,
    CollectiveTimeout,
    agreed,
    error_of,
    kind_of,
    named,
    text_by_rank,
    text_of,
)
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.comm.tracing import Purpose, cause
from pce_mpi.hints import HINTS, hinted

if TYPE_CHECKING:
    from mpi4py import MPI

#: the number of whole numbers that an operation may add to the header of its agreement
FACTS = 6
# A rank adds this to the checksum of its call, which is smaller, if its own checks failed, and before that the number
# of the call over a mesh times the other.
_FAILED, _CALL = 1 << 32, 1 << 33
# A header has room for so much of that number.
_NUMBERS = (1 << 29) - 1


class local_checks:
    """A block that keeps the error that it raises, which the next agreement tells to the other ranks.

    `CollectiveTimeout` is not kept, nor an error of another rank: a closed communicator can tell nobody.

    >>> with local_checks() as checks:
    ...     raise ValueError("this rank alone finds a fault")
    >>> checks.error
    ValueError('this rank alone finds a fault')
    """

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CollectiveTimeout) or "origin" in vars(error):
            return False
        self.error = error
        return True


@dataclass(frozen=True, eq=False)
class Signature:
    """An operation and all that must be the same on every rank, by name."""

    operation: str
    arguments: Mapping[str, Hashable]

    @cached_property
    def checksum(self) -> int:
        """A number that is equal on all ranks that make the same call."""
        return zlib.crc32(repr((self.operation, tuple(self.arguments.items()))).encode())


def agree(
    comm: MPI.Intracomm, operation: str, arguments: Mapping[str, Hashable], facts: Sequence[int] = (), **more: Any
) -> list[tuple[int, ...]]:
    """Make sure that every rank of `comm` makes the same call, as `agree_on_call` does."""
    call = signature_of(operation, tuple(arguments.items()), tuple(map(type, arguments.values())))
    return agree_on_call(comm, call, facts, **more)


@lru_cache(maxsize=1024)
def signature_of(operation: str, arguments: tuple[tuple[str, Hashable], ...], types: tuple[type, ...]) -> Signature:
    """Return the call, cached, as programs repeat few calls; `types` tells 1 from True, which are equal as keys."""
    return Signature(operation, dict(arguments))


def agree_on_call(
    comm: MPI.Intracomm,
    call: Signature,
    facts: Sequence[int] = (),
    *,
    error: Exception | None = None,
    over: str = "comm",
    ranks_named: bool = False,
) -> list[tuple[int, ...]]:
    """Make sure that every rank of `comm` makes the same call and that all of its checks passed.

    Collective over `comm`: one Allgather of 56 bytes. `facts` are up to 6 whole numbers to tell to the other ranks, and
    `error` is the error of this rank's own checks. With `ranks_named` the error's text names its ranks already, from an
    agreement over another communicator.

    Returns each fact of every rank, in rank order. If ranks have errors, every rank raises the error of the lowest of
    them, a builtin exception whose text names the ranks. If calls differ, every rank raises `CollectiveError`, whose
    text has the call of each rank. The communicator stays usable; its method `refused`, which communicators of a mesh
    have, is called before either error.
    """
    operation, checksum = call.operation, call.checksum
    channel = channel_of(comm, operation)
    if (peers := channel.peers) is not None:
        checksum += (peers.number & _NUMBERS) * _CALL
    call_or_failure = checksum if error is None else checksum + _FAILED
    header = np.array((call_or_failure, *facts, *(0,) * (FACTS - len(facts))), np.int64)
    messages = 1 if type(channel) is FakeComm else channel.size  # that of this rank stands for all of them
    headers = np.empty((messages, 1 + FACTS), np.int64)
    why = cause(operation, over, "every rank makes the same call and its checks passed")
    gather, purpose = channel.comm.Iallgather, Purpose.AGREEMENT
    channel.run(why, "all_gather", header.nbytes, gather, header, headers, purpose=purpose)
    # Lists of so few numbers are compared three times as fast as arrays.
    calls, *said = zip(*headers.tolist(), strict=True)
    if calls != (checksum,) * messages:
        refused = getattr(comm, "refused", _nobody_listens)
        numbers = [call // _CALL for call in calls]
        # Ranks that make the same call after other ones are in different steps, from which they do not find together.
        is_settled = peers is None or bool(peers.blocks) or len({call % _CALL for call in calls}) > 1
        if peers is not None and is_settled and channel.size == peers.size:
            peers.number += max(numbers) - numbers[channel.rank]
        if any(call & _FAILED for call in calls):
            raise_together(comm, operation, error, over=over, ranks_named=ranks_named)
        own_call = {"operation": operation, **{name: repr(value) for name, value in call.arguments.items()}}
        texts = all_gather_text(json.dumps(own_call), comm, operation=operation, over=over)
        difference = _differences(texts, over) or getattr(comm, "difference", _of_numbers)(
            comm, numbers, operation, over
        )
        refused()
        raise agreed(named(CollectiveError(difference)), peers, comm.size if is_settled else 0)
    return said[: len(facts)] if messages == channel.size else [each * channel.size for each in said[: len(facts)]]


def _nobody_listens() -> None: ...


def _of_numbers(comm: Any, numbers: Sequence[int], operation: str, over: str) -> str:
    errors = {rank: f"{number - min(numbers)} errors more" for rank, number in enumerate(numbers)}
    return (
        f"ranks have had different errors, and may not be in the same call of {operation}: {text_by_rank(errors, over)}"
    )


def raise_together(
    comm: MPI.Intracomm, operation: str, error: Exception | None, over: str = "comm", ranks_named: bool = False
) -> None:
    """Raise, on every rank of `comm`, the error of the lowest rank that has one; all ranks must call it."""
    getattr(comm, "refused", _nobody_listens)()
    text = "" if error is None else json.dumps([kind_of(error), text_of(error), ranks_named])
    texts = all_gather_text(text, comm, operation=operation, over=over)
    failed = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    kind, said, _ = next(iter(failed.values()))
    if not (all(texts) and len(set(texts)) == 1 and failed[0][2]):
        messages = {rank: message for rank, (_, message, _) in failed.items()}
        said = text_by_rank(messages, over, between="; ")
    together = agreed(named(error_of(kind, said)), channel_of(comm, operation).peers, comm.size, error)
    raise together.with_traceback(error.__traceback__ if error else None) from None


def all_gather_text(text: str, comm: MPI.Intracomm, *, operation: str, over: str = "comm") -> list[str]:
    """Return the text of every rank, in rank order, on every rank; for reports and errors.

    Collective: an Allgather of 8 bytes and an Allgatherv.
    """
    channel = channel_of(comm, operation)
    block = np.frombuffer(text.encode(), np.uint8)
    length, lengths = np.array([block.size], np.int64), np.empty(channel.size, np.int64)
    why = cause(operation, over, "what each rank has to say")
    gather, gatherv = channel.comm.Iallgather, channel.comm.Iallgatherv
    channel.run(why, "all_gather", length.nbytes, gather, length, lengths, purpose=Purpose.AGREEMENT)
    received = np.empty(int(lengths.sum()), np.uint8)
    parts = [received, lengths.tolist()]
    channel.run(why, "all_gather", block.nbytes, gatherv, block, parts, purpose=Purpose.AGREEMENT)
    return [part.tobytes().decode() for part in np.split(received, np.cumsum(lengths)[:-1])]


def _differences(descriptions: list[str], over: str) -> str:
    """Return what differs between the calls of the ranks, as text; "" if nothing does."""
    calls: list[dict[str, str]] = [json.loads(text) for text in descriptions]
    names = list(dict.fromkeys(name for call in calls for name in call))
    differing = {}
    for name in names:
        values = {rank: call.get(name, "not given") for rank, call in enumerate(calls)}
        if len(set(values.values())) > 1:
            differing[f"{name} differ"] = f"{name}: {text_by_rank(values, over)}"
        if name == "operation" and differing:
            break  # the arguments of two different functions are not worth comparing
    if not differing:
        return ""
    # Several differences are another mistake, and the options that hints name are those of plain arrays.
    mistakes = differing.keys() & HINTS.keys() if len(differing) == 1 and over == "comm" else ()
    return hinted("ranks disagree on " + "; ".join(differing.values()), *mistakes)
