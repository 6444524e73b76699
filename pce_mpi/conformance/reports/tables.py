"""Tables in plain text, their head first; columns of numbers end at their right edge."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Cell", "aligned", "numeric", "piped", "text"]

Cell = str | int | float | None


def aligned(rows: Sequence[Sequence[Cell]]) -> str:
    """In columns as wide as what they hold."""
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


def piped(rows: Sequence[Sequence[Cell]]) -> str:
    """As Markdown has it."""
    cells = [[text(value).replace("|", "\\|") for value in row] for row in rows]
    rule = ["---:" if to_right else "---" for to_right in numeric(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))


def numeric(rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Of each column, whether it has a number below its head."""
    return [any(isinstance(value, int | float) for value in column) for column in zip(*rows[1:], strict=True)]


def text(value: Cell) -> str:
    """What a cell shows: all of a whole number, three digits of any other, nothing for None."""
    if isinstance(value, float):
        return f"{value:.3g}" if not 1000 <= abs(value) < 1e7 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return value or ""
