"""An invite as a QR code (ISO/IEC 18004): in capitals, which take 5.5 bits a character instead of 8."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import groupby

import segno

QUIET_ZONE = 4  # modules round it, as the standard wants


class InviteQr:
    """Of one line of text. Raises ValueError where it is longer than a QR code can be."""

    def __init__(self, line: str) -> None:
        self._code = segno.make_qr(line.upper(), error="l")

    def __repr__(self) -> str:
        return f"<InviteQr of {self.size} modules a side>"

    @property
    def size(self) -> int:
        """Modules a side, with the quiet zone."""
        return len(self._code.matrix) + 2 * QUIET_ZONE

    def svg_path(self) -> str:
        """The dark modules as the `d` of an SVG path, in a square of `size`."""
        rows = enumerate(self._code.matrix, QUIET_ZONE)
        return "".join(f"M{x} {y}h{width}v1h-{width}z" for y, row in rows for x, width in _dark_runs(row))

    def terminal(self) -> str:
        """As half blocks, with half of the quiet zone, since terminals are narrow."""
        text = io.StringIO()
        self._code.terminal(text, compact=True, border=QUIET_ZONE // 2)
        return text.getvalue()


def _dark_runs(row: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(where it begins, how long it is) of each."""
    x = QUIET_ZONE
    for dark, run in groupby(row):
        width = len(list(run))
        if dark:
            yield x, width
        x += width
