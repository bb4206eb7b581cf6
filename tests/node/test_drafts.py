"""Whole nodes that guess: texts of a real model are the same, however tokens are drawn; they are audited and continued."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.messages import Open
from swarmnode.compute.serving.cohort import Window
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.founding.swarm_creation import from_folders
from swarmnode.serving.client.generation import Generation
from swarmnode.serving.drafting.drafter import DraftBudget, Drafter
from tests.adapters import merged_checkpoint, save_llama_adapter
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import results, three_by_two
from tests.node.conftest import Founded
from tests.node.test_kept_sessions import swarm_of
from tests.node.virtual_swarm import VirtualSwarm
from tests.serving.drafting import Oracle, Steady
from tests.tiny import PROMPT, TinyModel

NEW = 40
TWO = {"n0": "0:3", "n1": "3:6"}
VOCABULARY = 512
DRAWS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {7: 2.0, 9: -5.0}, "temperature": 1.0, "seed": 1},
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 2},
    "int8": {"compress": "int8"},
}


WINDOW = Window(16)
MOVES_AT = WINDOW.columns  # positions


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A swarm with a model whose layers look back over a few positions only."""
    folder = tmp_path_factory.mktemp("sliding")
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=VOCABULARY, num_hidden_layers=2, sliding_window=WINDOW.size, **sizes)
    MistralForCausalLM(config).save_pretrained(folder / "model")
    return Founded.on(folder / "model", folder)


@pytest.fixture(scope="module")
def verse(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Founded, TinyModel]:
    """A swarm with an adapter, and one process's model that it has changed."""
    folder = tmp_path_factory.mktemp("verse")
    saved = save_llama_adapter(folder / "verse", tiny.folder, seed=0)
    source = from_checkpoint(str(tiny.folder), folder / "none")
    adapters = from_folders({"verse": saved}, source, folder / "adapters")
    merged = merged_checkpoint(folder / "merged", tiny.folder, saved)
    return Founded.on(tiny.folder, folder, adapters=adapters), TinyModel(merged, tiny.units)


def let_guess(swarm: VirtualSwarm, text: list[int], wrong: float = 0.3) -> list[Steady]:
    """Let all nodes guess this text. Returns the budgets that the sessions will have."""
    budgets: list[Steady] = []

    def drafting(_opened: Open) -> tuple[Drafter, DraftBudget]:
        budgets.append(Steady(6))
        return Oracle(text, wrong, seed=len(budgets), vocabulary=VOCABULARY), budgets[-1]

    for member in swarm.members.values():
        if member.node._stage is not None:
            member.node._stage.server.drafting = drafting  # type: ignore[attr-defined]
    return budgets


async def ask(client: SwarmClient, prompt: list[int], owner: str | None = None, **options: Any) -> Generation:
    stream = await client.stream(prompt, kept_for=owner, **{"max_new_tokens": NEW, **options})
    async for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)
@in_virtual_time
async def test_the_text_is_the_same_however_tokens_are_drawn(
    founded: Founded, tmp_path: Path, options: dict[str, Any]
) -> None:
    async with swarm_of(founded, tmp_path, TWO) as (swarm, client):
        plain = await ask(client, PROMPT, **options, drafts="off")
        assert plain.accepted_drafts == 0
        budgets = let_guess(swarm, [*PROMPT, *plain.ids])
        guessed = await ask(client, PROMPT, **options)
        assert guessed.ids == plain.ids
        assert guessed.accepted_drafts == budgets[-1].accepted > NEW / 4 and budgets[-1].rejected > 0
        assert [[one.id for one in told] for told in guessed.logprobs] == [
            [one.id for one in told] for told in plain.logprobs
        ]


@in_virtual_time
async def test_a_text_with_guesses_is_audited_and_its_hops_trusted(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with three_by_two(founded.into, tmp_path) as (swarm, client):
        budgets = let_guess(swarm, [*PROMPT, *tiny.alone(PROMPT, NEW)])
        for number in range(1, 4):
            result = await ask(client, PROMPT)
            assert result.ids == tiny.alone(PROMPT, NEW) and result.accepted_drafts > 0 and budgets
            await client.auditor.idle()
            assert results(client) == {"passed": number}
        assert all(client.auditor.standing.trust(hop.peer) > 0 for hop in result.route)


@in_virtual_time
async def test_a_kept_text_with_guesses_goes_on(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO) as (swarm, client):
        said, text = PROMPT * 8, list[int]()
        let_guess(swarm, text)
        for turn in range(4):
            text[:] = [*said, *tiny.alone(said, NEW)]
            result = await ask(client, said, "me")
            assert result.ids == tiny.alone(said, NEW), f"turn {turn}"
            assert (result.cached_tokens > 0) == (turn > 0) and result.accepted_drafts > 0
            said += [*result.ids, 7, turn, 9]


@in_virtual_time
async def test_a_text_by_an_adapter_is_the_same(
    verse: tuple[Founded, TinyModel], tiny: TinyModel, tmp_path: Path
) -> None:
    """In turn with one by the model itself."""
    founded, changed = verse
    texts = {"verse": changed.alone(PROMPT, NEW), "": tiny.alone(PROMPT, NEW)}
    assert texts["verse"] != texts[""], "an adapter that changes nothing would prove nothing"
    async with swarm_of(founded, tmp_path, TWO) as (swarm, client):
        for name in ("verse", "", "verse"):
            budgets = let_guess(swarm, [*PROMPT, *texts[name]])
            result = await ask(client, PROMPT, adapter=name)
            assert result.ids == texts[name]
            assert result.accepted_drafts > NEW / 4 and budgets[-1].rejected > 0


@pytest.mark.parametrize("place", [1, 2])
@in_virtual_time
async def test_a_hop_is_lost_while_a_sure_position_waits_where_a_wrong_guess_was(
    founded: Founded, tmp_path: Path, place: int
) -> None:
    """Devices are slow beside the network, so that verdicts come before the next passes begin."""
    spans = {f"n{number}": span for number, span in enumerate(["0:2", "2:4", "4:6"] * 2)}
    async with swarm_of(founded, tmp_path, spans, cost_s=lambda _item: 0.3) as (swarm, client):
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.7, "seed": 5, "compress": "none"}
        plain = await ask(client, PROMPT, **options, drafts="off")
        let_guess(swarm, [*PROMPT, *plain.ids], wrong=0.2)
        stream = await client.stream(PROMPT, **options)
        async with asyncio.timeout(4 * plain.seconds):  # a ring that waits for a position for ever would not end
            async for _ in stream:
                if len(stream.result.ids) == 8 and not stream.result.reroutes:
                    await swarm.member(stream.result.route[place].peer).kill()
        assert stream.result.ids == plain.ids and stream.result.reroutes == 1


@in_virtual_time
async def test_windows_of_sliding_layers_go_back_behind_wrong_guesses(sliding: Founded, tmp_path: Path) -> None:
    """Their buffers move on in the middle of the answer."""
    prompt = [(7 * position) % VOCABULARY for position in range(MOVES_AT - NEW // 2)]
    async with swarm_of(sliding, tmp_path, {"n0": "0:2", "n1": "2:4"}) as (swarm, client):
        plain = await ask(client, prompt, drafts="off")
        budgets = let_guess(swarm, [*prompt, *plain.ids], wrong=0.4)
        guessed = await ask(client, prompt)
        assert guessed.ids == plain.ids and budgets[-1].rejected > 0 and guessed.accepted_drafts > 0
