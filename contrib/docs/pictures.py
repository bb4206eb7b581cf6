"""Take the README's pictures of the web page: `python contrib/docs/pictures.py ADDRESS`, with the address that `serve` prints.
Needs Chromium."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import BrowserPage, Chromium, find_chromium

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
ASKED = "How are the hens?"
TOKENS = 200
WRITTEN = "document.querySelector('.message.assistant .text')?.textContent.length > 60"
SHOWN = {
    "chat": WRITTEN,
    "swarm": "document.querySelectorAll('#links td').length > 4",
    "machine": "document.querySelector('#machine')?.childElementCount",
}


def take(page: BrowserPage) -> None:
    """Ask a question on `page` and save a picture of each view."""
    page.wait_until("document.getElementById('model').value")
    page.evaluate(f"document.getElementById('max-tokens').value = {TOKENS}")
    page.type_and_enter("#prompt", ASKED)
    for number, (view, is_shown) in enumerate(SHOWN.items()):
        page.resize(1120, 700, dark=number == 1)
        page.evaluate(f"location.hash = '#{view}'")
        page.wait_until(is_shown)
        page.picture(FOLDER / f"{view}.png")


def main(address: str) -> None:
    """Take the pictures of the page at `address`. Raises RuntimeError if there is no Chromium, or no page."""
    program = find_chromium()
    if program is None:
        raise RuntimeError("there is no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, Chromium(program, Path(folder)) as browser:
        take(browser.open(address))


if __name__ == "__main__":
    main(sys.argv[1])
