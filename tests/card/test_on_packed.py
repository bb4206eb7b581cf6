"""Packed weights on a card: they stay packed there, and give what dequantised ones give; captured steps as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.compute.capacity.capacity import unit_sizes
from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.card_matrix import working_bytes
from swarmnode.compute.packing.packed_weight import PackedWeight, held_by
from swarmnode.compute.serving.captured_decode import STEADY_STEPS
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.config import EXACT, FAST, PLAIN, StageConfig
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.measuring.hardware import Hardware
from tests.card.simulated import SimulatedCards
from tests.card.test_on_captured_decode import Dictated
from tests.card.test_on_nodes import CACHE_TOKENS
from tests.card.test_on_quantised import PROMPTS, Text, write
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm, sees_ready

ABSOLUTE, RELATIVE = 1e-4, 1e-3
SPARE_BYTES = 1 << 16  # norms, buffers and the tables of codes


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., None], str], Checkpoint]:
    """A packed checkpoint by its writer and format."""

    def pack(save: Callable[..., None], form: str) -> Checkpoint:
        folder: Path = tmp_path_factory.mktemp("packed")
        save(folder / "tiny.gguf", form=form)
        (out := folder / "out").mkdir()
        GgufCheckpoint(folder / "tiny.gguf").pack(out)
        return Checkpoint(out)

    return pack


def load(checkpoint: Checkpoint, card: torch.device, products: str) -> ModelSpan:
    return load_span(checkpoint, 0, checkpoint.units, device=card, dtype=torch.float32, products=products, check=False)


def texts(span: ModelSpan, steps: int, *, capture: bool = False) -> list[Text]:
    runner = StageRunner(span, RunnerConfig(1 << 22, capture=capture))
    if runner.captured is not None:
        runner.captured.stopwatch = Dictated(span.device, 1.0, 2.0)
    written = [Text(name) for name in PROMPTS]
    write(runner, *written, steps=steps)
    if runner.captured is not None:
        assert runner.captured.replays > 0 and not runner.captured.refusal
    runner.close_all(keep_span=True)
    return written


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "Q5_1", "F16"])
def test_a_packed_model_on_a_card_is_the_plain_one(
    form: str, card: torch.device, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of(save_llama_gguf, form)
    packed, plain = (load(checkpoint, card, products) for products in ("exact", "plain"))
    assert {weight.device for weight in held_by(packed.model)} == {card} == {packed.device}
    for captured in (False, True):
        pairs = zip(texts(packed, STEADY_STEPS + 4, capture=captured), texts(plain, STEADY_STEPS + 4), strict=True)
        for got, wanted in pairs:
            assert got.ids == wanted.ids
            torch.testing.assert_close(
                torch.stack(got.logits), torch.stack(wanted.logits), atol=ABSOLUTE, rtol=RELATIVE
            )


def test_experts_stay_packed_on_a_card(card: torch.device, checkpoint_of: Callable[..., Checkpoint]) -> None:
    checkpoint = checkpoint_of(save_moe_gguf, "Q4_0")
    packed, plain = (load(checkpoint, card, products) for products in ("fast", "plain"))
    for got, wanted in zip(texts(packed, 4), texts(plain, 4), strict=True):
        assert got.ids == wanted.ids


def test_packed_bytes_are_on_the_card_and_go_with_the_span(
    cards: SimulatedCards, card: torch.device, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of(save_llama_gguf, "Q4_0")
    before = cards.counts(card.index).used_bytes
    span = load(checkpoint, card, "fast")
    held = cards.counts(card.index).used_bytes - before
    promised = sum(unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True).weight_bytes)
    assert promised <= span.weight_bytes + SPARE_BYTES and held <= promised + SPARE_BYTES
    largest_bytes = max(working_bytes(part) for weight in held_by(span.model) for part in weight.card_parts)
    assert span.pass_bytes(1, 1) > largest_bytes > 0, "a tile is dequantised"
    wanted = texts(span, 4)
    span.move_to(torch.device("cpu"))
    assert cards.counts(card.index).used_bytes - before < SPARE_BYTES
    span.move_to(card)
    assert [text.ids for text in texts(span, 4)] == [text.ids for text in wanted]
    span.close()
    assert cards.counts(card.index).used_bytes - before < SPARE_BYTES


def test_packed_products_wait_for_no_card(
    cards: SimulatedCards, card: torch.device, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    span = load(checkpoint_of(save_llama_gguf, "Q4_0"), card, "fast")
    weights = list(held_by(span.model))
    ids_N = torch.arange(6, device=card)
    for number in range(2):
        before = cards.counts(card.index)
        for weight in weights:
            assert isinstance(weight, PackedWeight)
            weight.multiply(torch.ones(2, weight.shape[1], device=card))
            weight.rows(ids_N)
        after = cards.counts(card.index)
        assert after.launches > before.launches
        assert number == 0 or (after.waits, after.uploads) == (before.waits, before.uploads)


def test_a_card_keeps_weights_packed_and_is_what_its_dtype_says(
    cards: SimulatedCards, card: torch.device, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    """No Triton is here: only an owner that chose the products has packed weights then."""
    checkpoint = checkpoint_of(save_llama_gguf, "Q4_0")

    def probed(**chosen: Any) -> tuple[str, str, int]:
        found = Hardware.probe(checkpoint, StageConfig(device=str(card), cache_tokens=CACHE_TOKENS, **chosen))
        return found.products, found.number_format, sum(found.sizes.weight_bytes)

    plain, fast, exact = probed(), probed(products="fast", dtype="bfloat16"), probed(products="exact")
    assert plain[0] == PLAIN and fast[:2] == (FAST, "bfloat16") and exact[:2] == (EXACT, "float32")
    assert fast[2] < plain[2] / 2 and exact[2] < plain[2]


@in_virtual_time
async def test_a_node_serves_packed_weights_on_a_card(
    cards: SimulatedCards, card: torch.device, tmp_path: Path
) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf", form="Q4_0")
    source = from_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "packed", packs=True)
    texts_told = {}
    for name, products in (("packed", EXACT), ("plain", PLAIN)):
        async with VirtualSwarm(tmp_path / name) as swarm:
            swarm.create(source)
            await swarm.bootstrap()
            stage: dict[str, Any] = {"device": str(card), "dtype": "float32", "products": products, "capture": "off"}
            member = swarm.node("volunteer", cache_tokens=CACHE_TOKENS, **stage)
            await member.wait_for("ready")
            async with swarm.client() as client:
                await sees_ready(client, 1)
                texts_told[name] = (await client.generate([5, 80, 3, 61], max_new_tokens=8)).ids
    assert texts_told["packed"] == texts_told["plain"] and len(texts_told["plain"]) == 8
