"""Experts of a mixture that is larger than a card: hot ones on the card, the others computed by the CPU at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.split_experts import SplitStack
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.config import StageConfig
from swarmnode.errors import WeightsLost
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.measuring.hardware import Hardware
from swarmnode.metrics import table
from swarmnode.plan.view import Span as Units
from swarmnode.serving import serving_stage
from tests.card.simulated import SimulatedCards
from tests.compute.model.llama_gguf import save_moe_gguf
from tests.compute.packing.test_packed_weight import needs_ggml, pack
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm, sees_ready

EXPERTS, SLOTS, LAYERS = 12, 5, 2
PROMPT, NEW, CACHE_TOKENS = [5, 80, 3, 61], 8, 512
RELATIVE = 1e-4
Make = Callable[..., ModelSpan]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("mixture")
    save_moe_gguf(folder / "tiny.gguf", form="Q4_0", experts=EXPERTS)
    return pack(folder / "tiny.gguf", folder / "packed")


def load(
    checkpoint: Checkpoint, card: torch.device, *, on_card: int = 0, in_host: int = 0, **options: Any
) -> ModelSpan:
    settings = {"dtype": torch.float32, "products": "exact", "check": False, **options}
    return load_span(
        checkpoint, 0, checkpoint.units, device=card, card_experts=on_card, expert_slots=in_host, **settings
    )


def stacks_of(checkpoint: Checkpoint) -> list[TensorEntry]:
    return [entry for entry in checkpoint.entries.values() if entry.is_stack]


def gone_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the experts that have no slot on the card."""
    return sum((EXPERTS - SLOTS) * entry.nbytes // EXPERTS for entry in stacks_of(checkpoint))


def memory_for_five(checkpoint: Checkpoint) -> int:
    sizes = unit_sizes(checkpoint, dtype=torch.float32, keeps_packed=True)
    return limit_bytes_for(sizes.need_bytes(0, checkpoint.units, CACHE_TOKENS) - gone_bytes(checkpoint) + 100)


def logits(span: ModelSpan, *, rounds: int = 3) -> list[Tensor]:
    """Return those of a prompt of its own in each round, of its next step, and of the first prompt once more."""
    runner, found = StageRunner(span, RunnerConfig(cache_bytes=1 << 22)), list[Tensor]()
    texts_BT = [torch.arange(20)[None] * (7 + number) % 251 for number in range(rounds)]
    for number, ids_BT in enumerate([*texts_BT, texts_BT[0]]):
        runner.open(number, rows=1, max_length=64)
        found += [result.output.cpu() for result in runner.run([StepInput(number, ids_BT, WANT_ALL)])]
        found += [result.output.cpu() for result in runner.run([StepInput(number, ids_BT[:, :1])])]
    runner.close_all(keep_span=True)
    return found


def is_near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() < RELATIVE * wanted.norm())


@needs_ggml
@pytest.mark.parametrize("in_host", [0, 4], ids=["all in the host", "some on the disk"])
@pytest.mark.parametrize("products", ["exact", "fast"])
def test_a_split_layer_is_a_whole_one(checkpoint: Checkpoint, card: torch.device, products: str, in_host: int) -> None:
    whole = logits(load(checkpoint, card))
    span = load(checkpoint, card, on_card=SLOTS, in_host=in_host, products=products)
    found = logits(span)
    near = 1e-4 if products == "exact" else 0.1  # fast products round activations to 8 bits
    for own, wanted in zip(found, whole, strict=True):
        assert (own - wanted).norm() < near * wanted.norm()
    if products == "exact":
        assert all(map(torch.equal, found[:2], found[-2:])), "exact products do not depend on what came before"
    on_card, *on_disk = span.expert_pools
    assert on_card.hits > 0 and on_card.misses > 0
    assert on_card.is_fixed == (products == "exact" or in_host > 0) == (on_card.reads == 0)
    assert [pool.reads > 0 for pool in on_disk] == [True] * bool(in_host)
    span.close()


@needs_ggml
def test_biases_are_added_on_both_sides(checkpoint: Checkpoint, card: torch.device) -> None:
    found = []
    for on_card in (0, SLOTS):
        span = load(checkpoint, card, on_card=on_card)
        for layer in range(LAYERS):
            experts: Any = span.model.get_submodule(f"model.layers.{layer}.mlp.experts")
            experts.has_bias = True
            for number, name in enumerate(("gate_up_proj", "down_proj")):
                drawn_NO = torch.randn(
                    getattr(experts, name).shape[:2], generator=torch.Generator().manual_seed(number)
                )
                setattr(experts, f"{name}_bias", torch.nn.Parameter(drawn_NO.to(card), requires_grad=False))
        found.append(logits(span))
        assert not all(map(is_near, found[-1], logits(load(checkpoint, card))))
    assert all(map(is_near, *found))


@needs_ggml
def test_the_experts_on_the_card_follow_their_use(checkpoint: Checkpoint, card: torch.device) -> None:
    span = load(checkpoint, card, on_card=SLOTS, products="fast")
    (pool,), layer = span.expert_pools, span.expert_pools[0].layers[0]
    assert sorted(layer.ready) == list(range(SLOTS))
    wanted = dict.fromkeys(range(SLOTS - 1, SLOTS + 3), 1)
    for _ in range(3):
        assert layer.found(wanted).keys() <= wanted.keys()
        with pool._lock:
            assert pool._done.wait_for(lambda: not layer.reading, 20)
    assert set(layer.ready) == {0, *wanted}, "one in each pass, in place of those used least recently"
    assert pool.reads == 3
    for _ in range(3):
        layer.found({0: 1})
        assert not layer.reading, "what is on the card stays"
    layer.found({1: 1})
    assert not layer.reading, "an expert that is used less than those on the card does not come"
    whole = load(checkpoint, card)
    stack, other = (one.get_submodule("model.layers.0.mlp.experts").down_proj for one in (span.model, whole.model))
    x_RI = torch.randn(3, stack.shape[2], generator=torch.Generator().manual_seed(0)).to(card)
    for number, slot in layer.ready.items():
        assert torch.equal(stack.times(x_RI, number, slot), other.times(x_RI, number, number))
    span.close()
    with pytest.raises(WeightsLost):
        next(layer.visit({SLOTS + 5: 1}))


@needs_ggml
def test_the_cpu_computes_while_the_card_does(
    checkpoint: Checkpoint, cards: SimulatedCards, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the card has begun with its experts nothing waits for it until the CPU has computed the others."""
    span = load(checkpoint, card, on_card=SLOTS)
    logits(span, rounds=1)
    seen: list[tuple[str, int]] = []
    times = SplitStack.times
    host_times = type(span.split_experts[0].host).times

    def noted(function: Callable[..., Tensor], place: str, *args: Any) -> Tensor:
        seen.append((place, cards.counts(card.index).waits))
        return function(*args)

    monkeypatch.setattr(SplitStack, "times", lambda *args: noted(times, "card", *args))
    for stack in span.split_experts:
        monkeypatch.setattr(stack.host, "times", partial(noted, host_times, "host", stack.host))
    logits(span, rounds=1)
    places = [place for place, _ in seen]
    assert {"card", "host"} == set(places)
    changes = [(one, other) for one, other in pairwise(seen) if (one[0], other[0]) == ("card", "host")]
    assert changes and all(one[1] == other[1] for one, other in changes)


@needs_ggml
@pytest.mark.parametrize("in_host", [0, 4], ids=["all in the host", "some on the disk"])
@pytest.mark.parametrize("products", ["exact", "fast"])
def test_gradients_of_a_split_layer(checkpoint: Checkpoint, card: torch.device, products: str, in_host: int) -> None:
    """Also if another expert has come into a slot meanwhile."""
    x_BTH = torch.randn(1, 12, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    found = []
    for on_card in (0, SLOTS):
        span = load(checkpoint, card, on_card=on_card, in_host=on_card and in_host, products=products)
        x = x_BTH.to(card).requires_grad_()
        loss = span.forward(x, cache=None, start=1, end=LAYERS + 1).square().sum()
        for pool in span.expert_pools[:1]:
            for layer in pool.layers:
                layer.pool.is_fixed = False
                layer.found(dict.fromkeys(range(SLOTS, EXPERTS), 9))
                with pool._lock:
                    assert pool._done.wait_for(lambda layer=layer: not layer.reading, 20)  # type: ignore[misc]
        loss.backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    near = 1e-4 if products == "exact" else 0.1
    assert (found[1] - found[0]).norm() < near * found[0].norm()


@needs_ggml
def test_a_card_holds_what_its_tier_promises(checkpoint: Checkpoint, cards: SimulatedCards, card: torch.device) -> None:
    gc.collect()
    gc.disable()  # a collection would free what other tests left
    try:
        _compare_memory(checkpoint, cards, card)
    finally:
        gc.enable()


def _compare_memory(checkpoint: Checkpoint, cards: SimulatedCards, card: torch.device) -> None:
    before = cards.counts(card.index).used_bytes
    whole = load(checkpoint, card)
    whole_bytes = whole.weight_bytes
    whole.close()
    span = load(checkpoint, card, on_card=SLOTS)
    assert whole_bytes - span.weight_bytes == gone_bytes(checkpoint)
    held_bytes = cards.counts(card.index).used_bytes - before
    assert abs(held_bytes - span.weight_bytes) < 1 << 16
    assert span.host_bytes() >= sum(entry.nbytes for entry in stacks_of(checkpoint))
    span.close()
    assert cards.counts(card.index).used_bytes - before < 1 << 16


@needs_ggml
async def test_a_load_that_is_given_up_leaves_no_reader(
    checkpoint: Checkpoint, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[ModelSpan] = []
    before, may_end, ended = readers(), threading.Event(), threading.Event()

    def slowly(*args: Any, **options: Any) -> ModelSpan:
        assert may_end.wait(20)
        loaded.append(load_span(*args, **options))
        close = loaded[0].close
        monkeypatch.setattr(loaded[0], "close", lambda: (close(), ended.set()))
        return loaded[0]

    monkeypatch.setattr(serving_stage, "load_span", slowly)
    config = StageConfig(
        str(card), products="exact", memory_bytes=memory_for_five(checkpoint), cache_tokens=CACHE_TOKENS
    )
    hardware, host = Hardware.probe(checkpoint, config), MemoryLedger()
    (layout,) = hardware.lay_out(Units(0, checkpoint.units))
    async with contextlib.AsyncExitStack() as undo:
        load = serving_stage._load_part(checkpoint, hardware, host, layout[0], undo)
        task = asyncio.create_task(load)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert host.used_bytes > 0
    assert host.used_bytes == 0
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 20)
    assert readers() <= before


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "read experts"}


@needs_ggml
@in_virtual_time
async def test_a_node_serves_a_mixture_larger_than_its_card(
    checkpoint: Checkpoint, cards: SimulatedCards, card: torch.device, tmp_path: Path
) -> None:
    save_moe_gguf(tmp_path / "tiny.gguf", form="Q4_0", experts=EXPERTS)
    source = from_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "packed", packs=True)
    memory_bytes = memory_for_five(checkpoint)
    for products, number_format in (("fast", "bfloat16+split"), ("exact", "float32")):
        config = StageConfig(str(card), "auto", products=products, memory_bytes=memory_bytes, cache_tokens=CACHE_TOKENS)
        found = Hardware.probe(checkpoint, config)
        assert found.tier is not None and found.tier.is_fixed == (products == "exact")
        assert found.number_format == number_format, "the CPU's experts have noise of their own"
        assert f"experts {found.tier.eighths}" in found.conditions(b"", 4, found.lent[0]).number_format
        if (wider := found.in_float32(checkpoint)) is not None:  # numbers overflowed
            assert wider.tier is not None and 2 <= wider.tier.slots <= found.tier.slots
            assert wider.capacity_units == found.capacity_units
    low = Hardware.probe(
        checkpoint, StageConfig(str(card), products="fast", memory_bytes=2 * memory_bytes, cache_tokens=CACHE_TOKENS)
    )
    assert low.tier is None
    told = {}
    for name, lent in (("whole", {}), ("split", {"memory_bytes": memory_bytes})):
        async with VirtualSwarm(tmp_path / name) as swarm:
            swarm.create(source)
            await swarm.bootstrap()
            stage: dict[str, Any] = {"device": str(card), "dtype": "float32", "products": "exact", **lent}
            member = swarm.node("volunteer", cache_tokens=CACHE_TOKENS, **stage)
            if lent:
                text = (await member.wait_for("experts"))["text"]
                assert (
                    "room on the card for 5 of 12 experts a layer" in text and "with all in the host's memory" in text
                )
            await member.wait_for("ready")
            async with swarm.client() as client:
                await sees_ready(client, 1)
                told[name] = (await client.generate(PROMPT, max_new_tokens=NEW)).ids
                if lent:
                    node = member.node
                    assert node._host is not None and node._hardware is not None
                    assert node._hardware.number_format == "float32"
                    held = node._host.link_config.ledger.accounts()[Account.WEIGHTS]
                    assert held >= sum(entry.nbytes for entry in stacks_of(checkpoint))
                    read = {one.labels[-1]: one.value for one in node.readings() if one.metric is table.EXPERT_READS}
                    assert read.keys() == {"card", "hit", "moved"} and read.pop("moved") == 0 < min(read.values())
    assert told["split"] == told["whole"] and len(told["whole"]) == NEW
