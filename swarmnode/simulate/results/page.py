"""A page that needs nothing else: no script, nothing from elsewhere; light or dark as its reader's screen is."""

from __future__ import annotations

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


def page(title: str, sections: Sequence[str]) -> str:
    """The whole page; sections are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | range) -> str:
    """Cells of text; the columns with these numbers are set to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="number"' if column in numbers else "" for column in range(len(cells)))
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
            + "</tr>"
        )

    header = line(head, "th") if any(head) else ""
    return f'<div class="wide"><table>{header}{"".join(line(row, "td") for row in rows)}</table></div>'
