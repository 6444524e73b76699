"""Values in messages, of which long ones lose their middle; and tables in plain text."""

from collections.abc import Collection, Iterable, Sequence
import reprlib
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_LONG, _MANY = 100, 20
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONG


def shown(value: Any) -> str:
    """Return `repr(value)`, or the ends of a long or deep one."""
    return _repr.repr(value)


def shortened(text: str) -> str:
    """Return `text`, or the ends of a long one."""
    return text if len(text) <= 2 * _LONG else f"{text[:_LONG]}...{text[-_LONG:]}"


def bounded(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def names_shown(names: Sequence[Any]) -> str:
    """Return the first names as text for a message."""
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(shown, names[:_MANY])) + more


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in their order, as the ranks of each text."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return the rows of a table as lines; the columns with the numbers in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


Cell = str | int | float | None


def table(rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table, the head first, with columns of numbers aligned right.

    >>> print(table([("work", "ms"), ("forward", 1234.5), ("backward", 0.25)]))
    work         ms
    --------  -----
    forward   1,234
    backward   0.25
    """
    head, *cells = [[cell_text(value) for value in row] for row in rows]
    lines = ["-" * max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return aligned([head, lines, *cells], numeric(rows))


def numeric(rows: Sequence[Sequence[Cell]]) -> set[int]:
    """Return the numbers of the columns that have a number below their head."""
    return {column for row in rows[1:] for column, cell in enumerate(row) if isinstance(cell, int | float)}


def cell_text(value: Cell) -> str:
    """Return the text of a cell: all digits of a whole number, three of any other, nothing for None."""
    if isinstance(value, float):
        return f"{value:.3g}" if not 1000 <= abs(value) < 1e7 else f"{value:,.0f}"
    return "" if value is None else str(value)
