"""A card for the tests of this folder: a real one where there is one, else the simulated one of a process of its own.

Without a card only `test_simulated_card.py` is collected, which runs the others in that process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.model.checkpoint import Checkpoint
from tests.card.simulated import LOADED, SimulatedCards
from tests.card.tables import Tables, batch_of_tables
from tests.llama import save_llama

collect_ignore_glob = ["test_simulated_card.py"] if torch.cuda.is_available() else ["test_on_*.py"]

LAYERS = 3
POSITIONS = 64  # of GPT-2's table


@pytest.fixture(autouse=True)
def waiting_allowed() -> Iterator[None]:
    """A test that fails while waiting is refused leaves others as they are."""
    yield
    if torch.cuda.is_available() and torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def cards() -> Iterator[SimulatedCards]:
    """Both simulated cards, reset; what needs them to be counted or limited is not tested on a real one."""
    if not LOADED:
        pytest.skip("what is counted here, only a simulated card counts")
    LOADED[0].reset()
    yield LOADED[0]
    LOADED[0].reset()


@pytest.fixture
def card(request: pytest.FixtureRequest) -> torch.device:
    """The last card: that the first is the current one must not matter."""
    if LOADED:
        request.getfixturevalue("cards")
    return torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A small Llama and a small GPT-2, random but fixed."""
    folder: Path = tmp_path_factory.mktemp("models")
    save_llama(folder / "llama", layers=LAYERS, vocab_size=99, hidden_size=32, intermediate_size=48)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": POSITIONS, "vocab_size": 99}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).save_pretrained(folder / "gpt2")
    return {kind: Checkpoint(folder / kind) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="session")
def tables() -> Exported:
    """The graph of the module with tables, and its weights, which a segment trains copies of."""
    return export_module(Tables(), batch_of_tables())
