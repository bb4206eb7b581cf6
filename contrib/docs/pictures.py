"""Take the pages' pictures of the web page: `python contrib/docs/pictures.py ADDRESS`, with the address that `serve` prints, in
the home of a node of SmolLM2. Needs Chromium."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import BrowserPage, Chromium, find_chromium

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
ASKED = "Why do bees swarm? Answer in two sentences."
TOKENS = 120
SHOWN = {
    "chat": "document.querySelector('.message.assistant footer')",
    "swarm": "document.querySelector('#machines .machine')",
    "machine": "document.querySelector('.node .stats strong')",
}
WIDE, PHONE = (1120, 700), (390, 700)


def take(page: BrowserPage) -> None:
    """Ask a question on `page` and save a picture of each view."""
    page.wait_until("document.getElementById('model').value")
    page.wait_until("document.querySelector('.readiness.ready') !== null")
    page.evaluate(f"document.getElementById('max-tokens').value = {TOKENS}")
    page.evaluate("document.getElementById('temperature').value = 0")
    page.type_and_enter("#prompt", ASKED)
    for view, size, dark in (
        ("chat", WIDE, False),
        ("swarm", WIDE, True),
        ("machine", WIDE, False),
        ("chat", PHONE, True),
    ):
        page.resize(*size, dark=dark)
        page.evaluate(f"location.hash = '#{view}'")
        page.wait_until(f"{SHOWN[view]} !== null")
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 1000))")
        page.picture(FOLDER / f"{view}{'-phone' if size == PHONE else ''}.png")


def main(address: str) -> None:
    """Take the pictures of the page at `address`. Raises RuntimeError if there is no Chromium, or no page."""
    program = find_chromium()
    if program is None:
        raise RuntimeError("there is no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, Chromium(program, Path(folder)) as browser:
        take(browser.open(address))


if __name__ == "__main__":
    main(sys.argv[1])
