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
