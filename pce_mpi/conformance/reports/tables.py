"""Tables in plain text, with the head first and columns of numbers aligned right."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | int | float | None


def table(rows: Sequence[Sequence[Cell]]) -> str:
    """Align the columns of a table.

    >>> print(table([("work", "ms"), ("forward", 1234.5), ("backward", 0.25)]))
    work         ms
    --------  -----
    forward   1,234
    backward   0.25
    """
    cells = [[text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = numeric(rows)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (cells[0], ["-" * width for width in widths], *cells[1:])
    )


def numeric(rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Return for each column True if it has a number below its head."""
    return [any(isinstance(row[column], int | float) for row in rows[1:]) for column in range(len(rows[0]))]


def text(value: Cell) -> str:
    """Return the text of a cell: all digits of a whole number, three of any other, nothing for None."""
    if isinstance(value, float):
        return f"{value:.3g}" if not 1000 <= abs(value) < 1e7 else f"{value:,.0f}"
    return "" if value is None else str(value)
