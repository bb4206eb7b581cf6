"""docs/api.md has the schema that the gateway serves."""

from __future__ import annotations

from tests.contrib.script import CONTRIB, load


def test_the_page_is_the_schema() -> None:
    script = load(CONTRIB / "docs" / "api.py")
    page = script.page()
    assert script.PAGE.read_text() == page, "run: python contrib/docs/api.py"
    assert all(f"`POST {path}`" in page for path in ("/v1/responses", "/v1/messages"))
