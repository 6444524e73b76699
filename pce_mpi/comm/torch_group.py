"""A process group of torch as a communicator, whose collectives are all-gathers of bytes.

Merges do not depend on the order, so a reduction on this rank of what all ranks gathered has the bits of MPI's. Of a
large array each rank merges a block, which an all-to-all brings to it, and all gather the blocks. Torch is imported by
the program that made the group; MPI is not needed.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
import os
import sys
import time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pce_mpi.arrays import HostArray
from pce_mpi.comm.errors import FORKED, CollectiveTimeout
from pce_mpi.comm.tracing import Purpose, Start, cause, open_traces, record

Merge = Callable[[HostArray, HostArray], None]


class TorchGroup:
    """The ranks of a `torch.distributed.ProcessGroup` with a backend for the CPU, such as gloo.

    Torch numbers the collectives of a group, so that the caller's never meet ours; it bounds the wait for them by the
    timeout of the group. Several groups are those of this rank along dims of a mesh, whose `ranks` come in the order of
    the mesh: what is gathered over the last is gathered over the one before.
    """

    peers = None  # its ranks tell each other of errors in agreements alone

    def __init__(self, *groups: Any, ranks: Sequence[int] = ()) -> None:
        from torch import distributed

        self.rank = 0
        for group in groups:
            backends = distributed.get_backend_config(group)
            if "cpu:" not in backends:
                raise TypeError(
                    f"a process group of torch must have a backend for the CPU, such as gloo; it has {backends}"
                )
            self.rank = self.rank * distributed.get_world_size(group) + distributed.get_rank(group)
        self.groups = groups
        self.ranks = ranks or distributed.get_process_group_ranks(groups[0])
        self.size = len(self.ranks)
        self.comm = self  # it is its own channel
        _let_torch_end()

    def run(self, *arguments: Any, **options: Any) -> None:
        """Record a collective of `size` bytes from this rank, start it and wait for it."""
        self.start(*arguments, **options).wait()

    def start(
        self, why: cause, collective: str, size: int, start: Start, *arguments: Any, purpose: Purpose = Purpose.PAYLOAD
    ) -> Pending:
        """Record a collective of `size` bytes from this rank and start it."""
        if _world_of_parent is not None and _world_of_parent is _world():
            raise RuntimeError(FORKED.format("the process group is made"))
        for group in self.groups:
            if why_broken := _broken.get(group):
                raise CollectiveTimeout(f"this process group is not usable any more: {why_broken}")
        if open_traces():
            record(why, collective, purpose, ranks=self.size, bytes=size)
        where = f"{why.operation}: agreement" if purpose is Purpose.AGREEMENT else why.operation
        return start(*arguments, operation=where)

    @staticmethod
    def give_up(group: Any, why: str) -> None:
        """Mark a process group of torch, wrapped or not, as unusable."""
        for each in group.groups if isinstance(group, TorchGroup) else [group]:
            _broken.setdefault(each, why)

    def Iallgather(self, mine: HostArray, everyones: HostArray, *, operation: str) -> Pending:
        """Gather blocks of one size."""

        def finish(gathered: HostArray) -> None:
            everyones[...] = gathered.view(everyones.dtype).reshape(everyones.shape)

        return Pending(self, operation, mine, mine.nbytes, finish)

    def Iallgatherv(self, mine: HostArray, everyones: tuple[HostArray, Sequence[int]], *, operation: str) -> Pending:
        """Gather blocks of several sizes, each filled up to the largest."""
        received, counts = everyones
        sizes = [count * received.itemsize for count in counts]

        def finish(gathered: HostArray) -> None:
            blocks = [block[:size] for block, size in zip(gathered, sizes, strict=True)]
            received[...] = np.concatenate(blocks).view(received.dtype)

        return Pending(self, operation, mine, max(sizes), finish)

    def Iallreduce(self, mine: HostArray, result: HostArray, merge: Merge, *, operation: str) -> Pending | Blocks:
        """Merge the elements of all ranks, in rank order."""
        if self.size > 2 and len(self.groups) == 1 and mine.nbytes >= _LARGE:
            return Blocks(self, operation, mine, result, merge)

        def finish(gathered: HostArray) -> None:
            result[...] = _merged(gathered.view(mine.dtype), merge).reshape(result.shape)

        return Pending(self, operation, mine, mine.nbytes, finish)


def _merged(of_ranks: HostArray, merge: Merge) -> HostArray:
    first: HostArray
    first, *others = of_ranks
    for other in others:
        merge(other, first)
    return first


# From so many bytes of a rank on, an array is merged in blocks: on one host that takes less time from 3 ranks on, and
# the memory of 2 such arrays on any number of ranks.
_LARGE = 1 << 20

# Process groups that cannot be used any more, and the reasons: a `TorchGroup` is made anew in each call.
_broken: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_world_of_parent: Any = None


def _world() -> Any:
    """Return torch's default process group, of which all others are parts; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _after_fork() -> None:
    global _world_of_parent
    _world_of_parent = _world()


os.register_at_fork(after_in_child=_after_fork)


class Pending:
    """An all-gather of blocks of `size` bytes that was started; `finish` takes what came, (ranks, size)."""

    def __init__(
        self, group: TorchGroup, operation: str, mine: HostArray, size: int, finish: Callable[[HostArray], None]
    ) -> None:
        self._finish, self._group, self._operation = finish, group, operation
        self._left, self._shape = list(group.groups), (group.size, size)
        self._gathered = np.zeros(size, np.uint8)
        self._gathered[: mine.nbytes] = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
        self._start()

    def _start(self) -> None:
        """Start to gather over the last group that is left."""
        import torch

        sent, group = self._gathered, self._left.pop()
        with _failing_in_words(self._group, self._operation):
            self._gathered = np.empty((torch.distributed.get_world_size(group), *sent.shape), np.uint8)
            self._work = torch.distributed.all_gather(
                list(torch.from_numpy(self._gathered)), torch.from_numpy(sent), group=group, async_op=True
            )

    def wait(self) -> None:
        """Return when the collective is complete, or raise `CollectiveTimeout`."""
        while True:
            with _failing_in_words(self._group, self._operation):
                self._work.wait()
            if not self._left:
                break
            self._start()
        self._finish(self._gathered.reshape(self._shape))


class Blocks:
    """A reduction that was started: each rank merges a block of every rank's array, and all gather what it gives.

    The second collective begins in `wait`: ranks wait for several reductions in one order.
    """

    def __init__(self, group: TorchGroup, operation: str, mine: HostArray, result: HostArray, merge: Merge) -> None:
        import torch

        self._group, self._operation, self._result, self._merge = group, operation, result, merge
        self._received = np.empty((group.size, -(-mine.size // group.size)), mine.dtype)
        self._sent = np.zeros(self._received.size, mine.dtype)  # filled up with elements that nobody reads
        self._sent[: mine.size] = mine.reshape(-1)
        received, sent = (torch.from_numpy(each.reshape(-1).view(np.uint8)) for each in (self._received, self._sent))
        with _failing_in_words(group, operation):
            self._work = torch.distributed.all_to_all_single(received, sent, group=group.groups[0], async_op=True)

    def wait(self) -> None:
        """Return when the reduction is complete, or raise `CollectiveTimeout`."""
        with _failing_in_words(self._group, self._operation):
            self._work.wait()
        del self._work, self._sent
        block, result = _merged(self._received, self._merge), self._result

        def finish(gathered: HostArray) -> None:
            result[...] = gathered.reshape(-1).view(result.dtype)[: result.size].reshape(result.shape)

        Pending(self._group, self._operation, block, block.nbytes, finish).wait()


@contextmanager
def _failing_in_words(group: TorchGroup, operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        where = f"{operation}, on rank {group.rank} of {group.size}"
        raise CollectiveTimeout(
            f"torch's process group failed, or waited for its timeout, in {where}, and is not usable any more: {error}"
        ) from error


@cache
def _let_torch_end() -> None:
    """Let the process end a little later: a thread of gloo's gives back the tensors of a collective after its end.

    It needs the interpreter for that, and aborts the process if there is none any more.
    """
    atexit.register(time.sleep, 0.1)


def is_process_group(value: Any) -> bool:
    """Return whether `value` is a process group of torch."""
    kind: Any = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", ())
    return isinstance(value, kind)


def groups_wrapped(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options in which each process group of torch is a `TorchGroup`."""
    return {name: TorchGroup(value) if is_process_group(value) else value for name, value in options.items()}
