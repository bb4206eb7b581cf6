"""axe-core's opinion of a page, where npm can fetch it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.browser.chromium import BrowserPage
from tests.browser.views import VIEWS, show_view

NPM_TIMEOUT_S = 60.0
RUN = "axe.run(document, {resultTypes: ['violations']}).then((told) => told.violations)"
SERIOUS = ("serious", "critical")
SCREENS = {
    "wide, light": (1280, 800, False),
    "wide, dark": (1280, 800, True),
    "phone, light": (360, 740, False),
    "phone, dark": (360, 740, True),
}


def serious_faults(page: BrowserPage, folder: Path) -> list[str]:
    """Of each view on each of the screens. None where axe-core cannot be had, which is printed."""
    script = _fetch(folder)
    if script is None:
        print("axe-core cannot be had: the page was not tried with it")
        return []
    page.call("Page.setBypassCSP", {"enabled": True})
    page.call("Page.reload")
    page.wait_until("document.getElementById('model')?.value")
    page.evaluate(script)
    found = []
    for screen, (width, height, dark) in SCREENS.items():
        page.resize(width, height, dark=dark)
        for view in VIEWS:
            show_view(page, view)
            for fault in page.evaluate(RUN):
                if fault["impact"] in SERIOUS:
                    nodes = [node["html"] + " " + node["failureSummary"] for node in fault["nodes"]]
                    found.append(f"{view}, {screen}: {fault['help']}: {nodes[:3]}")
    return found


def _fetch(folder: Path) -> str | None:
    npm = shutil.which("npm")
    if npm is None:
        return None
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4"]
    try:
        subprocess.run(install, check=True, capture_output=True, timeout=NPM_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        return None
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()
