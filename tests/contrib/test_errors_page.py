"""docs/errors.md says what the tree of errors says, and docs/models.md what keys of quantised checkpoints are read."""

from __future__ import annotations

from swarmnode.errors import ERROR_TEXT, REMEDY, ErrorCode, SwarmnodeError
from tests.contrib.script import CONTRIB, load


def test_the_page_is_the_tree() -> None:
    script = load(CONTRIB / "docs" / "errors.py")
    assert script.PAGE.read_text() == script.page(), "run: python contrib/docs/errors.py"


def test_the_keys_of_quantised_checkpoints_are_those_of_the_code() -> None:
    script = load(CONTRIB / "docs" / "quantisation.py")
    assert script.PAGE.read_text() == script.page(), "run: python contrib/docs/quantisation.py"


def test_each_error_says_what_to_do() -> None:
    assert set(REMEDY) == set(ERROR_TEXT) == set(ErrorCode)
    script = load(CONTRIB / "docs" / "errors.py")
    kinds = [kind for _, kind in script.tree(SwarmnodeError)]
    assert len(kinds) > 10 and all(kind.remedy.endswith((".", "`.")) for kind in kinds)


def test_the_pages_of_figures_are_the_records() -> None:
    script = load(CONTRIB / "docs" / "figures.py")
    assert script.EVIDENCE.read_text() == script.evidence(), "run: python contrib/docs/figures.py"
    assert script.PERFORMANCE.read_text() == script.performance(), "run: python contrib/docs/figures.py"


def test_what_a_benchmark_prints_becomes_rows() -> None:
    script = load(CONTRIB / "docs" / "figures.py")
    printed = 'reads {nothing}\n{"decode": {"ratio": 0.91234, "runs": [1, 2]},\n "rows": [{"name": "edits"}]}\n'
    (result,) = script.results(printed)
    assert dict(script.flat(result)) == {"decode ratio": "0.9123", "decode runs": "1, 2", "rows 0 name": "edits"}
