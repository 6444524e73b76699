"""A progress bar on rank 0's terminal, or plain lines where tqdm is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["progress"]


def progress(names: Sequence[str], comm: MPI.Intracomm | None) -> Iterator[str]:
    """Yield each of `names` and show on rank 0's stderr how far that has got."""
    if comm is not None and comm.rank > 0:
        yield from names
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for number, name in enumerate(names, 1):
            print(f"{number}/{len(names)} {name}", file=sys.stderr)
            yield name
        return
    with tqdm(names, file=sys.stderr) as bar:
        for name in bar:
            bar.set_description(name)
            yield name
