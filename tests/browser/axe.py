"""axe-core's opinion of a page, where npm can fetch it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.browser.chromium import BrowserPage

NPM_TIMEOUT_S = 60.0
VIEWS = ("chat", "swarm", "machine")
RUN = "axe.run(document, {resultTypes: ['violations']}).then((told) => told.violations)"
SERIOUS = ("serious", "critical")


def serious_faults(page: BrowserPage, folder: Path) -> list[str]:
    """Of each view, light and dark. None where axe-core cannot be had, which is printed."""
    script = _fetch(folder)
    if script is None:
        print("axe-core cannot be had: the page was not tried with it")
        return []
    page.call("Page.setBypassCSP", {"enabled": True})
    page.call("Page.reload")
    page.wait_until("document.getElementById('model')?.value")
    page.evaluate(script)
    found = []
    for dark in (False, True):
        page.resize(1280, 800, dark=dark)
        for view in VIEWS:
            page.evaluate(f"location.hash = '#{view}'")
            page.wait_until(f"!document.getElementById('view-{view}').hidden")
            for fault in page.evaluate(RUN):
                if fault["impact"] in SERIOUS:
                    nodes = [node["html"] + " " + node["failureSummary"] for node in fault["nodes"]]
                    found.append(f"{view}, {'dark' if dark else 'light'}: {fault['help']}: {nodes[:3]}")
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
