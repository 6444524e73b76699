"""The index of a folder of vectors, which `vectors.export` writes and `vectors.judged` reads.

A folder may come from anywhere: a malformed index raises a `ValueError` that names the place.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
import os
from pathlib import Path
from typing import Any

from pce_mpi.conformance.cases import Expects
from pce_mpi.conformance.offers import DTYPES, OPTIONS, REDUCTIONS
from pce_mpi.conformance.plain import made, plain
from pce_mpi.distributed.tensor_files import shortened, shown

_FORMAT = "pce_mpi conformance vectors"
_VERSION = 1
_NAME = "index.json"
# Names and descriptions are printed in full.
_LONGEST = 1000


@dataclass(frozen=True)
class Entry:
    """One vector in the index; the page for its users, `vectors.md`, explains the fields."""

    name: str
    file: str
    catches: str
    expects: Expects
    gradient: bool
    dtype: str
    axis: int
    splits: tuple[int, ...]
    reduction: str
    options: dict[str, Any]  # the values are checked with the problem

    def __post_init__(self) -> None:
        printable = f"1 to {_LONGEST} printable characters"
        for name, right, expected in (
            *((each, _is_text(getattr(self, each)), printable) for each in ("name", "file", "catches")),
            ("dtype", self.dtype in DTYPES, " or ".join(map(repr, DTYPES))),
            ("axis", self.axis >= 0, "a whole number"),
            ("splits", _are_splits(self.splits), "whole numbers from 0 up that do not fall, two at least"),
            ("reduction", self.reduction in REDUCTIONS, " or ".join(map(repr, REDUCTIONS))),
            ("options", self.options.keys() <= {*OPTIONS[1:]}, f"an object with some of {', '.join(OPTIONS[1:])}"),
        ):
            if not right:
                raise ValueError(f"{name} must be {expected}, got {shown(getattr(self, name))}")


@dataclass(frozen=True)
class Index:
    """All vectors of a folder, and the seed of their numbers."""

    seed: int
    vectors: list[Entry]

    def write(self, folder: Path) -> None:
        """Write the index to `folder`."""
        content = {"format": _FORMAT, "version": _VERSION, **plain(self)}
        (folder / _NAME).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(folder: Path) -> Index:
    """Return the index of `folder`; raise `ValueError` if it is malformed or names a file outside `folder`."""
    path = folder / _NAME
    try:
        content = json.loads(path.read_bytes().decode(), parse_constant=_no_number)
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise ValueError(f"it must be {_FORMAT}, version {_VERSION}")
        index = made(Index, content)
        if index.seed < 0:
            raise ValueError(f"seed must be a whole number, got {shown(index.seed)}")
        where = Path(os.path.realpath(folder))
        names = set()
        for number, entry in enumerate(index.vectors):
            if not Path(os.path.realpath(where / entry.file)).is_relative_to(where):
                raise ValueError(f"vectors[{number}]: file must be inside the folder, got {shown(entry.file)}")
            if entry.name in names:
                raise ValueError(f"two vectors are called {shown(entry.name)}")
            names.add(entry.name)
        return index
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is malformed: {shortened(str(error))}") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _is_text(value: str) -> bool:
    return 0 < len(value) <= _LONGEST and value.isprintable()


def _are_splits(value: tuple[int, ...]) -> bool:
    return len(value) > 1 and value[0] == 0 and list(value) == sorted(value)
