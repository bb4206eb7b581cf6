"""docs/api.md has the schema that the gateway serves."""

from __future__ import annotations

from swarmnode.errors import ErrorCode
from swarmnode.gateway.http.api_error import STATUS
from tests.contrib.script import CONTRIB, load


def test_the_page_is_the_schema() -> None:
    script = load(CONTRIB / "docs" / "api.py")
    assert script.PAGE.read_text() == script.page(), "run: python contrib/docs/api.py"
    assert all(f"`POST {path}`" in script.page() for path in ("/v1/responses", "/v1/messages"))


def test_the_table_of_errors_has_each_code_with_its_status() -> None:
    rows = [line for line in load(CONTRIB / "docs" / "api.py").PAGE.read_text().split("\n") if line.startswith("| ")]
    for code in STATUS.keys() - {code.name.lower() for code in ErrorCode}:
        assert [row.split(" | ")[0] for row in rows if f"`{code}`" in row] == [f"| {STATUS[code]}"], code
