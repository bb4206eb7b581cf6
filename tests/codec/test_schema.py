"""`protocol/schema` says exactly what the decoders take."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from tests.codec.schemas import FOLDER, NAMES, schema_of


@pytest.mark.parametrize("struct", NAMES, ids=NAMES.get)
def test_every_structure_has_its_schema(struct: type[msgspec.Struct]) -> None:
    written = json.loads((FOLDER / f"{NAMES[struct]}.json").read_text())
    assert written == schema_of(struct)
    jsonschema.Draft202012Validator.check_schema(written)


def test_no_schema_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES.values())
