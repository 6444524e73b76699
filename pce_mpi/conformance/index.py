"""The index of a folder of vectors, which `vectors.export` writes and `vectors.judged` reads.

A folder may come from anywhere: a malformed index raises a `ValueError` that names the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
import json
import os
from pathlib import Path
from typing import Any

from pce_mpi.conformance.cases import Expects
from pce_mpi.conformance.offers import DTYPES, OPTIONS, REDUCTIONS
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
    expects: str
    gradient: bool
    dtype: str
    axis: int
    splits: tuple[int, ...]
    reduction: str
    options: dict[str, Any]


def write(folder: Path, seed: int, entries: Iterable[Entry]) -> None:
    """Write the index of all vectors, and their seed, to `folder`."""
    vectors = [asdict(entry) for entry in entries]
    content = {"format": _FORMAT, "version": _VERSION, "seed": seed, "vectors": vectors}
    (folder / _NAME).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[int, list[Entry]]:
    """Return seed and entries; raise `ValueError` if the index is malformed or names a file outside `folder`."""
    path = folder / _NAME
    try:
        content = json.loads(path.read_bytes().decode(), parse_constant=_no_number)
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise ValueError(f"it must be {_FORMAT}, version {_VERSION}")
        seed = _field(content, "seed", _is_whole, "a whole number")
        entries: dict[str, Entry] = {}
        vectors = _field(content, "vectors", lambda value: isinstance(value, list), "a list")
        for number, vector in enumerate(vectors):
            try:
                entry = _entry(vector, folder)
            except ValueError as error:
                raise ValueError(f"vectors[{number}]: {error}") from error
            if entries.setdefault(entry.name, entry) is not entry:
                raise ValueError(f"two vectors are called {shown(entry.name)}")
        return seed, list(entries.values())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is malformed: {shortened(str(error))}") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _entry(vector: Any, folder: Path) -> Entry:
    if not isinstance(vector, dict):
        raise ValueError(f"it must be an object, got {shown(vector)}")
    fields = {name: _field(vector, name, right, expected) for name, (right, expected) in _FIELDS.items()}
    where = Path(os.path.realpath(folder))
    if not Path(os.path.realpath(where / fields["file"])).is_relative_to(where):
        raise ValueError(f"file must be inside the folder, got {shown(fields['file'])}")
    return Entry(**fields | {"splits": tuple(fields["splits"])})


def _field(vector: dict[str, Any], name: str, right: Callable[[Any], bool], expected: str) -> Any:
    if name not in vector:
        raise ValueError(f"{name} is missing")
    if not right(vector[name]):
        raise ValueError(f"{name} must be {expected}, got {shown(vector[name])}")
    return vector[name]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_of(words: Iterable[str]) -> tuple[Callable[[Any], bool], str]:
    known = [str(word) for word in words]
    return lambda value: value in known, " or ".join(map(repr, known))


def _are_splits(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(map(_is_whole, value))
        and value[0] == 0
        and value == sorted(value)
    )


def _are_options(value: Any) -> bool:
    # The values are checked with the problem.
    return isinstance(value, dict) and all(name in OPTIONS and name != "weight" for name in value)


_TEXT = _is_text, f"1 to {_LONGEST} printable characters"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": _TEXT,
    "file": _TEXT,
    "catches": _TEXT,
    "expects": _one_of(Expects),
    "gradient": (lambda value: isinstance(value, bool), "true or false"),
    "dtype": _one_of(DTYPES),
    "axis": (_is_whole, "a whole number"),
    "splits": (_are_splits, "whole numbers from 0 up that do not fall, two at least"),
    "reduction": _one_of(REDUCTIONS),
    "options": (_are_options, f"an object with some of {', '.join(OPTIONS[1:])}"),
}
