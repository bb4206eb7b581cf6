"""Self-contained HTML page with SVG figures: no scripts, no external files; light or dark as the reader's screen is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

LIGHT = (
    "--ink:#222;--paper:#fff;--rule:#ddd;--c0:#2a6f97;--c1:#d1495b;--c2:#4f8a6f;--c3:#7d5ba6;--c4:#b97708;--c5:#5f6b6d"
)
DARK = "--ink:#e4e6e8;--paper:#16181b;--rule:#3a3f45;--c0:#6cb6e0;--c1:#ff8a70;--c2:#8fd0ae;--c3:#bda0e6;--c4:#f2b950;--c5:#a3b0b3"
STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;color:var(--ink);background:var(--paper)}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}figure{margin:1.5em 0}figcaption{font-weight:600}"
    "svg{width:100%;font:11px system-ui,sans-serif;fill:var(--ink)}table{border-collapse:collapse}code{overflow-wrap:anywhere}"
    "td,th{padding:.15em .9em .15em 0;text-align:left;border-bottom:1px solid var(--rule)}"
    ".wide{overflow-x:auto}td.number,th.number{text-align:right}"
)
WIDTH, HEIGHT = 640, 200
MAX_LABEL_CHARS = 22
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 10, 28  # margins
COLOURS = tuple(f"var(--c{number})" for number in range(6))  # variables of STYLE


def curves(title: str, times_s: Sequence[float], lines: dict[str, Sequence[float]]) -> str:
    """Draw curves as an SVG figure with a legend: `lines` are values by name, at `times_s`."""
    highest = _round_up(max((value for line in lines.values() for value in line), default=0.0))
    latest_s = max(times_s, default=1.0)
    parts = [_frame(highest, latest_s)]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{_x(time_s / latest_s):.1f},{_y(value / highest):.1f}"
            for time_s, value in zip(times_s, line, strict=True)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        parts.append(_legend(number, name, colour))
    return figure(title, "".join(parts), HEIGHT)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Draw a horizontal bar for each of `rows`: (label, value, value in words)."""
    highest = max((value for _, value, _ in rows), default=0.0) or 1.0
    row_height = 18
    parts = []
    for number, (label, value, words) in enumerate(rows):
        y, width = TOP + number * row_height, (WIDTH - 300) * value / highest
        parts.append(f'<text x="176" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="182" y="{y + 2}" width="{width:.1f}" height="{row_height - 5}" fill="{COLOURS[0]}"/>'
            f'<text x="{188 + width:.1f}" y="{y + 13}">{escape(words)}</text>'
        )
    return figure(title, "".join(parts), TOP + len(rows) * row_height + 6)


def spans(title: str, units: int, rows: Sequence[tuple[str, int, int, float]]) -> str:
    """Draw the layers that each peer holds, a line for each of `rows`: (label, start, end, share of the time that it computed)."""
    row_height = 11 if len(rows) > 20 else 16
    width = WIDTH - 200 - RIGHT
    parts = []
    for number, (label, start, end, share) in enumerate(rows):
        y = TOP + number * row_height
        left, right = 190 + width * start / units, 190 + width * end / units
        parts.append(f'<text x="184" y="{y + row_height - 3}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 1}" width="{right - left:.1f}" height="{row_height - 2}" '
            f'fill="{COLOURS[0]}" fill-opacity="{0.15 + 0.85 * min(1.0, share):.2f}">'
            f"<title>{escape(label)}: units {start} to {end - 1}, computing {share:.0%} of the time</title></rect>"
        )
    bottom = TOP + len(rows) * row_height + 14
    for unit in (0, units):
        parts.append(f'<text x="{190 + width * unit / units:.1f}" y="{bottom}" text-anchor="middle">{unit}</text>')
    return figure(title, "".join(parts), bottom + 8)


def role_colour(role: int, roles: int) -> str:
    """Return the CSS colour of `role` of `roles`: hues in order, none of them pale."""
    return f"hsl({200 + 300 * role / max(1, roles):.0f} 55% 42%)"


def legend(title: str, roles: Sequence[tuple[str, str]]) -> str:
    """Draw the numbered colours of `roles`: (name, value in words)."""
    columns, row_height = 2, 17
    parts = []
    for number, (name, words) in enumerate(roles):
        x, y = LEFT / 2 + number % columns * (WIDTH - LEFT) / columns, TOP + number // columns * row_height
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="18" height="13" fill="{role_colour(number, len(roles))}"/>'
            f'<text x="{x + 9:.1f}" y="{y + 10}" text-anchor="middle" style="fill:#fff">{number}</text>'
            f'<text x="{x + 23:.1f}" y="{y + 10}">{escape(shortened(name))} ({escape(words)})</text>'
        )
    return figure(title, "".join(parts), TOP + -(-len(roles) // columns) * row_height + 4)


def shortened(text: str) -> str:
    """Cut `text` to `MAX_LABEL_CHARS` characters, with "…" at the end if it was longer."""
    return text if len(text) <= MAX_LABEL_CHARS else text[: MAX_LABEL_CHARS - 1] + "…"


def figure(title: str, inside: str, height: float) -> str:
    """Build a figure with `title` above an SVG picture of width `WIDTH`; `inside` is its SVG content."""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg></figure>'
    )


def _frame(highest: float, latest_s: float) -> str:
    """Draw horizontal lines and labels of both axes, four steps each."""
    lines = []
    for step in range(5):
        y, x = _y(step / 4), _x(step / 4)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--rule)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(highest * step / 4)}</text>')
        lines.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{_clock(latest_s * step / 4)}</text>')
    return "".join(lines)


def _legend(number: int, name: str, colour: str) -> str:
    x = LEFT + 10 + 170 * (number % 3)
    y = TOP + 10 + 14 * (number // 3)
    return f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/><text x="{x + 14}" y="{y}">{escape(name)}</text>'


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share


def _round_up(value: float) -> float:
    """Return the next 1, 2, 4, 5, 8 or 10 times a power of ten, for an axis that people can read; 1.0 for 0 or less."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= value * (1 - 1e-9))


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.3g} min" if minutes < 180 else f"{minutes / 60:.3g} h"


def page(title: str, sections: Sequence[str]) -> str:
    """Return the whole HTML page with this `title`; `sections` are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | range) -> str:
    """Build an HTML table of text; columns in `numbers` are aligned right. An empty `head` gives no header row."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="number"' if column in numbers else "" for column in range(len(cells)))
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
            + "</tr>"
        )

    header = line(head, "th") if any(head) else ""
    return f'<div class="wide"><table>{header}{"".join(line(row, "td") for row in rows)}</table></div>'
