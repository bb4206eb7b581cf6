"""Curves as an SVG file that needs nothing to be drawn or read: several runs of each of a few sides, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Run = Mapping[int, float]
"""Value by step"""

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 120, 20, 44
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
DASHES = ("none", "6 4", "2 3", "8 3 2 3")
TICKS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)  # times powers of ten


def draw(sides: Mapping[str, Sequence[Run]], values: str, steps: str) -> str:
    """Return an SVG picture of all runs. `values` and `steps` name the axes. Values must be above 0."""
    points = [point for runs in sides.values() for run in runs for point in run.items()]
    last = max(step for step, _ in points)
    low, high = min(value for _, value in points) / 1.05, max(value for _, value in points) * 1.05

    def across(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * step / max(1, last)

    def down(value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * math.log(high / value) / math.log(high / low)

    parts = [f'<rect width="{WIDE}" height="{HIGH}" fill="#ffffff"/>']
    for tick in ticks(low, high):
        parts.append(line(LEFT, down(tick), WIDE - RIGHT, down(tick), "#d8dee4"))
        parts.append(text(LEFT - 6, down(tick) + 4, f"{tick:g}", "end"))
    for step in sorted({step for step, _ in points}):
        parts.append(text(across(step), HIGH - BOTTOM + 16, str(step), "middle"))
    parts.append(text((LEFT + WIDE - RIGHT) / 2, HIGH - 8, steps, "middle"))
    parts.append(text(LEFT, TOP - 6, values, "start"))
    for number, (name, runs) in enumerate(sides.items()):
        colour, dash = COLOURS[number], DASHES[number]
        for run in runs:
            path = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in sorted(run.items()))
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"/>'
            )
        height = TOP + 16 + 20 * number
        parts.append(line(WIDE - RIGHT + 10, height, WIDE - RIGHT + 40, height, colour, dash))
        parts.append(text(WIDE - RIGHT + 46, height + 4, name, "start"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Return round values between two numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick * 10.0**power for power in powers for tick in TICKS if low <= tick * 10.0**power <= high]


def line(x: float, y: float, to_x: float, to_y: float, colour: str, dash: str = "none") -> str:
    """Return a straight line."""
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}" stroke-dasharray="{dash}"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Return a text, whose `anchor` (start, middle or end) is at the place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f">{words}</text>'
