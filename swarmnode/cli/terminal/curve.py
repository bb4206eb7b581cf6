"""A curve drawn in text: braille characters, each a grid of two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

HEIGHT = 10  # lines on a terminal
MAX_WIDTH = 100  # characters
DOTS_WIDE, DOTS_HIGH = 2, 4
_BLANK = 0x2800
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row from the top]


def curve_with_notes(
    points: Sequence[tuple[int, float]], end: int, terminal_width: int, *notes: tuple[str, str]
) -> Text:
    """The curve of `draw_curve` for a terminal, with pairs of text and style below it."""
    from rich.text import Text

    lines = draw_curve(points, end, width=min(terminal_width, MAX_WIDTH), height=HEIGHT)
    return Text.assemble(("\n".join(lines) + "\n", "cyan"), *notes)


def draw_curve(points: Sequence[tuple[int, float]], end: int, *, width: int, height: int) -> list[str]:
    """`height` lines of `width` characters, the scale at the left: values over the numbers 0 to end - 1.

    Where several points share a column of dots, their mean is drawn; values that are not finite are left out.
    """
    finite = [(number, value) for number, value in points if math.isfinite(value)]
    labels = _labels([value for _, value in finite], height)
    room = max((len(label) for label in labels), default=0) + 1
    columns = max(1, width - room) * DOTS_WIDE
    rows = height * DOTS_HIGH
    cells = [[_BLANK] * (columns // DOTS_WIDE) for _ in range(height)]
    means = _joined(_means(finite, end, columns))
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
    before: int | None = None
    for column, value in means.items():
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        for dot in _stroke(before, row):
            cells[dot // DOTS_HIGH][column // DOTS_WIDE] |= _BITS[column % DOTS_WIDE][dot % DOTS_HIGH]
        before = row
    lines = ("".join(map(chr, line)) for line in cells)
    return [f"{label:>{room - 1}} {line}" for label, line in zip(labels, lines, strict=True)]


def _means(points: Sequence[tuple[int, float]], end: int, columns: int) -> dict[int, float]:
    """Mean value by column, from left to right."""
    sums: dict[int, list[float]] = {}
    for number, value in sorted(points):
        sums.setdefault(min(columns - 1, number * columns // max(1, end)), []).append(value)
    return {column: math.fsum(values) / len(values) for column, values in sums.items()}


def _joined(means: dict[int, float]) -> dict[int, float]:
    """With straight lines over the columns between."""
    joined = dict(list(means.items())[:1])
    for (left, start), (right, stop) in pairwise(means.items()):
        for column in range(left + 1, right + 1):
            joined[column] = start + (stop - start) * (column - left) / (right - left)
    return joined


def _stroke(before: int | None, row: int) -> range:
    """The dots of one column: up or down from the row of the column before."""
    if before is None or before == row:
        return range(row, row + 1)
    return range(before + 1, row + 1) if before < row else range(row, before)


def _labels(values: Sequence[float], height: int) -> list[str]:
    """The largest value at the top, the smallest at the bottom."""
    labels = [""] * height
    if values:
        labels[-1] = f"{min(values):.4g}"
        labels[0] = f"{max(values):.4g}"
    return labels
