"""Common modules train as in plain torch, whole and in stages, or are refused in one sentence."""

from __future__ import annotations

import pytest

from swarmnode.errors import UsageError
from tests.numerics.exactness import check_stages, founded
from tests.numerics.modules import MODULES, REFUSED

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_in_plain_torch(name: str) -> None:
    module, batch = MODULES[name]()
    exported = founded(module, batch)
    assert exported.graph.any_batch
    check_stages(module, batch, exported, 1, 2, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_in_a_sentence(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UsageError) as refused:
        founded(*make())
    assert words in str(refused.value) and "\n" not in str(refused.value)
