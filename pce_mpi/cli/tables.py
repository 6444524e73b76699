"""Aligned tables on the terminal."""

from collections.abc import Sequence

__all__ = ["table"]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """`rows` under `head`, numbers to the right, everything else to the left."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
