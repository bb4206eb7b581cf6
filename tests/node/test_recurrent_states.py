"""Swarms of models with recurrent states say what one process says, whatever is cut back, copied or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.codec.body import HopSpec
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.metrics import table
from swarmnode.serving import server
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import (
    generate_until_shunned,
    hop_in_use,
    noise_on_every_tenth,
    results,
    tamper,
    three_by_two,
)
from tests.node.conftest import Founded
from tests.node.test_client import causal_lm
from tests.node.test_credit import credits
from tests.node.test_faults import TOKENS, generate_and, two_by_two
from tests.node.test_kept_sessions import LONG, NEW, ask, reading, swarm_of
from tests.numerics.families import COMMON, RECURRENT, causal_config
from tests.tiny import PROMPT, TinyModel

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Falcon-H1 of four layers, each with attention and a state-space state."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    folder = tmp_path_factory.mktemp("hybrid")
    sizes: dict[str, Any] = {**COMMON, **RECURRENT["falcon_h1"], "vocab_size": 512, "max_position_embeddings": 1 << 17}
    torch.manual_seed(1)
    model = FalconH1ForCausalLM(FalconH1Config(**{**sizes, "bos_token_id": None, "pad_token_id": None}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    return TinyModel(folder, units=6)


@pytest.fixture(scope="module")
def served(hybrid: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return Founded.on(hybrid.folder, tmp_path_factory.mktemp("founded-hybrid"))


@in_virtual_time
async def test_a_conversation_goes_on_and_its_turns_change(served: Founded, hybrid: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(served, tmp_path, {"a": "0:3", "b": "3:6"}) as (swarm, client):
        first = await ask(client, list(LONG))
        assert first.ids == hybrid.alone(list(LONG), NEW)
        going_on = [*LONG, *first.ids, 7, 1, 9]
        before = reading(swarm, table.TOKENS)
        second = await ask(client, going_on)
        assert second.ids == hybrid.alone(going_on, NEW)
        assert reading(swarm, table.TOKENS) - before == 2 * (4 + NEW - 1), "only what is new, at both hops"
        for other in ([*LONG, 1, 5], [*LONG, 9, 9, 9, 9], LONG[:56], [*LONG, *first.ids, 8, 8]):
            result = await ask(client, list(other))
            assert result.ids == hybrid.alone(list(other), NEW)


@in_virtual_time
async def test_several_answers_to_one_prompt_and_texts_in_company(
    served: Founded, hybrid: TinyModel, tmp_path: Path
) -> None:
    async with swarm_of(served, tmp_path, {"a": "0:3", "b": "3:6"}) as (_, client):
        prompts = [LONG * 5, LONG * 5, [*LONG * 5, 3], PROMPT, LONG[:21]]
        results = await asyncio.gather(*(ask(client, list(prompt)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.ids == hybrid.alone(list(prompt), NEW)


@in_virtual_time
async def test_the_swarm_as_a_transformers_model(served: Founded, hybrid: TinyModel, tmp_path: Path) -> None:
    """Beams reorder states, wrong look-ups take them back, and a crop to where nothing is kept begins the session anew."""
    whole = AutoModelForCausalLM.from_pretrained(hybrid.folder, dtype=torch.float32).eval()
    ids, long = torch.tensor([[*PROMPT, *PROMPT[:4]]]), torch.tensor([(PROMPT * 60)[:450]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    async with causal_lm(served, tmp_path) as (turns, model):
        for way in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
            ours = await turns.run(lambda: model.generate(ids, **options, **way))  # noqa: B023
            beams = {name: number for name, number in way.items() if name == "num_beams"}
            assert torch.equal(ours, whole.generate(ids, **options, **beams))

        def crop_far_back() -> torch.Tensor:
            cache = model.new_cache(1, 500)
            model(long, cache=cache, logits_to_keep=1)
            cache.crop(20)
            logits: torch.Tensor = model(ids, cache=cache).logits
            cache.close()
            return logits

        with torch.inference_mode():
            expected = whole(torch.cat([long[:, :20], ids], 1), use_cache=False).logits[:, 20:]
        logits = await turns.run(crop_far_back)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert float((logits - expected).abs().max() / expected.std()) < 1e-4


@pytest.mark.parametrize("drafts", ["off", "auto"])
@in_virtual_time
async def test_guesses_and_killed_nodes_do_not_change_the_text(
    served: Founded, hybrid: TinyModel, tmp_path: Path, drafts: str
) -> None:
    async with two_by_two(served, tmp_path) as (swarm, _, client):

        async def strike(route: Sequence[HopSpec]) -> None:
            for hop in (0, 1):
                await swarm.member(route[hop].peer).kill()

        result = await generate_and(client, 17, strike, drafts=drafts)
        assert result.ids == hybrid.alone(PROMPT, TOKENS)
        assert result.reroutes >= 1


@in_virtual_time
async def test_texts_are_audited_and_receipted(served: Founded, tmp_path: Path) -> None:
    """Honest peers pass, false activations are found, and receipts count positions once, whatever was computed again."""
    async with three_by_two(served.into, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        assert set(results(client)) == {"passed"}
        tamper(liar, noise_on_every_tenth(5e-4))
        await generate_until_shunned(client, 12)
        assert client.auditor.standing.shunned == {liar.peer}
    (tmp_path / "second").mkdir()
    async with swarm_of(served, tmp_path / "second", {"a": "0:3", "b": "3:6"}) as (pair, client):
        await client.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
        await client.close()
        assert {credit.served for credit in credits(pair).values()} == {3 * (len(PROMPT) + TOKENS - 1)}


def tokens_of(member: Any) -> int:
    return sum(int(one.value) for one in member.node.readings() if one.metric is table.TOKENS)


@pytest.mark.parametrize(
    ("hops", "harm", "drafts"),
    [((0,), "", "off"), ((1,), "", "auto"), ((0, 1), "", "off"), ((1,), "NaN", "off"), ((0,), "kill", "off")],
    ids=["first", "last", "both", "a cache with NaN", "the next one dies later"],
)
@in_virtual_time
async def test_a_node_that_leaves_hands_its_states_over(
    served: Founded,
    hybrid: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hops: Sequence[int],
    harm: str,
    drafts: str,
) -> None:
    """The node that takes its place computes few positions again and is paid for no more. Without a cache that fits, or without its
    journal for another node, it gets the text."""
    prompt, route = (LONG * 8)[:300], list[str]()
    monkeypatch.setattr(
        server, "takes_over", lambda *_, **__: True
    )  # the text of a tiny model is smaller than its cache
    if harm == "NaN":
        pack = server.pack_copy
        monkeypatch.setattr(
            server, "pack_copy", lambda copy: pack(replace(copy, parts={key: x * nan for key, x in copy.parts.items()}))
        )
    async with two_by_two(served, tmp_path) as (swarm, _, client):
        stream = await client.stream(prompt, max_new_tokens=TOKENS, drafts=drafts)
        async for _ in stream:
            if len(stream.result.ids) == 9:
                route = [hop.peer for hop in stream.result.route]
                for hop in hops:
                    swarm.member(route[hop]).leave()
            if len(stream.result.ids) == 30 and harm == "kill":
                await swarm.member(route[1]).kill()
        assert stream.result.ids == hybrid.alone(prompt, TOKENS)
        others = {
            name: tokens_of(member)
            for name, member in swarm.members.items()
            if not member.over and member.peer not in route and tokens_of(member)
        }
        assert (max(others.values()) > 300) == bool(harm), "of a text of which 300 positions came before"
        await client.close()
        if drafts == "off" and harm != "kill":
            told = credits(swarm)
            assert {name: told[name].served for name in others} == {name: 3 * count for name, count in others.items()}


@pytest.mark.parametrize("family", ["gemma4_text", "openai-gpt"], ids=["with caches", "computed again"])
def test_two_nodes_serve_a_family_whose_layers_share_more_than_hidden_states(tmp_path: Path, family: str) -> None:
    config = causal_config(family)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.max_position_embeddings = 512
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(tmp_path / "model")
    whole = TinyModel(tmp_path / "model", units=Checkpoint(tmp_path / "model").units)
    founded, prompt = Founded.on(whole.folder, tmp_path / "founded"), [token % config.vocab_size for token in LONG]

    @in_virtual_time
    async def serve() -> None:
        half = whole.units // 2
        async with swarm_of(founded, tmp_path / "swarm", {"a": f"0:{half}", "b": f"{half}:{whole.units}"}) as (
            _,
            client,
        ):
            for drafts in ("off", "auto"):
                assert (await ask(client, prompt, drafts=drafts)).ids == whole.alone(prompt, NEW)

    serve()
