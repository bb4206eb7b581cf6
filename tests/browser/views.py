"""The views of the gateway's page."""

from __future__ import annotations

from tests.browser.chromium import BrowserPage

VIEWS = {
    "chat": "#messages > *",
    "swarm": "#machines .machine",
    "machine": "#machine > *",
}  # and what they hold once shown


def show_view(page: BrowserPage, view: str) -> None:
    """Go there, and wait until there is something to be seen."""
    page.evaluate(f"location.hash = '#{view}'")
    page.wait_until(f"!document.getElementById('view-{view}').hidden && document.querySelector('{VIEWS[view]}')")
