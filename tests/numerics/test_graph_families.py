"""Families of transformers train as modules do in plain torch, whole and in stages."""

from __future__ import annotations

import pytest

from tests.numerics.exactness import check_stages, founded
from tests.numerics.graph_families import FAMILIES, build

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_plain_torch(family: str) -> None:
    module, batch = build(family)
    exported = founded(module, batch)
    assert exported.graph.any_batch and exported.graph.units > 2
    check_stages(module, batch, exported, 1, 2, 3)
