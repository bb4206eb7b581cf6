"""What is typed to shape a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.cli.options.sampling_options import read_grammar
from swarmnode.errors import UsageError

SCHEMA = '{"type": "object"}'


def test_a_schema_is_given_as_a_file_or_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    assert read_grammar(SCHEMA, "") == read_grammar(str(file), "")
    assert read_grammar("", "") is None


def test_a_schema_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_grammar(str(tmp_path / "none.json"), "")
    with pytest.raises(UsageError, match="either"):
        read_grammar(SCHEMA, "start: 'a'")
