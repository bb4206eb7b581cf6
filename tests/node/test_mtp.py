"""Nodes that guess by a prediction layer (MTP) or an EAGLE head: the same texts, in fewer turns if the layer is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.compute.model.mtp import EagleHead
from swarmnode.errors import UsageError
from swarmnode.ledger import Account
from swarmnode.serving.client.generation import Generation
from tests.mtp import save_eagle, save_mtp
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_draft_model import ask, stage_of
from tests.node.test_kept_sessions import swarm_of
from tests.tiny import TinyModel

NEW = 32
TEXT = [5, 17, 3, 60]
TWO = {"n0": "0:2", "n1": "2:4"}


CASES = {"knows": ("deepseek_v3", True), "knows nothing": ("glm4_moe", False)}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Founded, TinyModel, bool]:
    """A model with a prediction layer, and whether that layer knows the text."""
    model_type, knows = request.param
    folder = save_mtp(tmp_path_factory.mktemp("model"), model_type, knows=knows)
    return Founded.on(folder, tmp_path_factory.mktemp("founded")), TinyModel(folder, units=4), knows


@in_virtual_time
async def test_the_text_is_the_same_and_a_good_layer_saves_turns(
    model: tuple[Founded, TinyModel, bool], tmp_path: Path
) -> None:
    founded, tiny, knows = model
    async with swarm_of(founded, tmp_path, TWO, draft_model="own") as (swarm, client):
        first, last = (stage_of(swarm.members[name]) for name in TWO)
        result: Generation = await ask(client, prompt=TEXT)
        assert result.ids == tiny.alone(TEXT, NEW)
        counts = first.server.meter.drafts
        right, wrong = counts["mtp", "accepted"], counts["mtp", "wasted"]
        assert right >= NEW / 2 if knows else wrong > 0
        reader, ledger = last._parts[0].span.reader, last.hardware.lent[0].ledger
        assert reader is not None and first._parts[0].span.reader is None, "it has no last layer"
        assert ledger.accounts()[Account.WEIGHTS] >= last._parts[0].span.weight_bytes > reader.weight_bytes
        for drafts in ("lookup", "off"):
            assert (await ask(client, drafts, TEXT)).ids == result.ids
        assert (counts["mtp", "accepted"], counts["mtp", "wasted"]) == (right, wrong)
        sampled = [await ask(client, drafts, TEXT, temperature=1.0, seed=3) for drafts in ("auto", "off")]
        assert sampled[0].ids == sampled[1].ids != result.ids
    assert ledger.used_bytes == 0


@in_virtual_time
async def test_an_eagle_head_guesses_at_the_last_hop(model: tuple[Founded, TinyModel, bool], tmp_path: Path) -> None:
    """Heads with an embedding of their own, and without: that borrows the model's, which another node holds."""
    founded, tiny, knows = model
    head = save_eagle(tmp_path / "head", tiny.folder, knows=knows, embeds=not knows)
    async with swarm_of(founded, tmp_path, TWO, draft_model=str(head)) as (swarm, client):
        first, last = (stage_of(swarm.members[name]) for name in TWO)
        assert isinstance(last._parts[0].span.reader, EagleHead) and first.draft is last.draft is None
        assert (await ask(client, prompt=TEXT)).ids == tiny.alone(TEXT, NEW)
        counts = first.server.meter.drafts
        assert counts["mtp", "accepted"] >= NEW / 2 if knows else counts["mtp", "wasted"] > 0
        assert (
            last.hardware.head is not None and last.hardware.lent[0].ledger.used_bytes > last.hardware.head.need_bytes
        )


@in_virtual_time
async def test_a_model_without_the_layer_says_so(founded: Founded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prediction layer"):
        async with swarm_of(founded, tmp_path, {"n0": "0:6"}, draft_model="own"):
            pass
