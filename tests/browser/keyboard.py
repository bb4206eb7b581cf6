"""What of a page the keyboard alone reaches."""

from __future__ import annotations

from tests.browser.chromium import BrowserPage

CONTROLS = 'a[href], button, input, select, textarea, summary, [tabindex="0"]'
OFF = ":disabled, [inert] *, dialog:not([open]) *"
FIND = f"""
window.unreached = new Set([...document.querySelectorAll(`{CONTROLS}`)]
  .filter((each) => each.checkVisibility({{visibilityProperty: true}}) && !each.matches(`{OFF}`)));
document.activeElement.blur();
window.unreached.size
"""
LOOK = """(() => {
  const focused = document.activeElement;
  if (getComputedStyle(focused).outlineStyle !== 'none') window.unreached.delete(focused);
  return window.unreached.size;
})()"""
REST = "[...window.unreached].filter((each) => each.isConnected).map((each) => each.outerHTML.slice(0, 200))"
SPARE_TABS = 10  # for the browser's own stops, and for elements that come meanwhile


def unreached(page: BrowserPage) -> list[str]:
    """Of the controls that are to be seen those at which Tab never stops, or which do not show that they have the focus."""
    for _ in range(page.evaluate(FIND) + SPARE_TABS):
        page.press("Tab")
        if not page.evaluate(LOOK):
            break
    found = page.evaluate(REST)
    assert isinstance(found, list)
    return found
