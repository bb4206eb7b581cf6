"""Peers of one class of equal bits are compared by digests: any difference is found, and no honest peer differs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.audits import audit_case
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.config import FAST
from swarmnode.founding.model_source import ModelSource, from_checkpoint
from swarmnode.plan import audits
from swarmnode.serving.span_part import find_bits
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import (
    Change,
    compute_anew,
    hop_in_use,
    results,
    span_of,
    swapped,
    tamper,
    three_by_two,
)
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import TinyModel

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)

PROMPT, NEW = [5, 80, 3, 61, 17, 200, 9], 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("packed")
    save_llama_gguf(folder / "tiny.gguf", form="Q4_0")
    return from_checkpoint(str(folder / "tiny.gguf"), folder / "packed", packs=True)


@asynccontextmanager
async def packed_swarm(
    source: ModelSource, folder: Path, monkeypatch: pytest.MonkeyPatch, last: int = 3
) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Two stages of three replicas of one class, or fewer of the last one, whose audits all ask for digests if they can."""
    monkeypatch.setattr(audits, "SAME_CLASS", 1.0)
    stages: Any = {"spans": ("0:2", "2:4"), "products": FAST}
    async with three_by_two(lambda swarm: swarm.create(source), folder, last, **stages) as (swarm, client):
        yield swarm, client


async def generate(client: SwarmClient, *, seed: int = 0, **options: Any) -> None:
    await client.generate(PROMPT, max_new_tokens=NEW, temperature=1.0, seed=seed, **options)
    await client.auditor.idle()


def kinds_asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether digests were asked for, and came, in each account that is fetched from now on."""
    kinds: list[bool] = []
    fetch = audit_case.fetch_account

    async def fetch_account(*args: Any, **options: Any) -> audit_case.HopAccount:
        account = await fetch(*args, **options)
        kinds.append(account.digests)
        return account

    monkeypatch.setattr(audit_case, "fetch_account", fetch_account)
    return kinds


def runner_of(member: VirtualMember) -> StageRunner:
    assert member.node._stage is not None
    return member.node._stage._parts[0].runner  # type: ignore[union-attr, no-any-return]


def test_a_span_has_a_class_that_its_numbers_make(source: ModelSource, tmp_path: Path) -> None:
    """The class is the same each time, and another for other layers or weights; plain products have none."""
    checkpoint = Checkpoint(source.folder)
    found = []
    for start, end in ((0, 2), (0, 2), (1, 3), (2, 4)):
        runner = StageRunner(load_span(checkpoint, start, end, products=FAST), RunnerConfig(1 << 28))
        found.append(find_bits(runner))
    assert all(found) and found[0] == found[1] and len(set(found)) == 3
    runner.span.model.get_submodule("model.norm").weight.data[3] *= 1.01
    runner.span.lowered.clear()
    assert find_bits(StageRunner(runner.span, RunnerConfig(1 << 28))) not in (*found, b"")
    plain = StageRunner(load_span(checkpoint, 0, 2), RunnerConfig(1 << 28))
    assert find_bits(plain) == b""


def test_a_span_whose_bits_depend_on_the_company_has_no_class(source: ModelSource) -> None:
    runner = StageRunner(load_span(Checkpoint(source.folder), 0, 2, products=FAST), RunnerConfig(1 << 28))
    assert runner.graphs is not None
    run = runner.graphs.run
    for rows, count in ((8, 1), (2, 2), (1, 33)):

        def beside(cohort: Any, x: Tensor, *args: Any, kind: tuple[int, int] = (rows, count)) -> Tensor | None:
            y = run(cohort, x, *args)
            return y if y is None or tuple(x.shape[:2]) != kind else y.nextafter(y + 1)

        runner.graphs.run = beside  # type: ignore[method-assign]
        assert find_bits(runner) == b""
    runner.graphs.run = run  # type: ignore[method-assign]
    assert find_bits(runner) != b""


def test_torch_products_of_plain_matrices_have_no_class(tmp_path: Path) -> None:
    """Experts are chosen by a plain matrix, whose sums in torch differ with the number of rows, though not in each trial."""
    save_moe_gguf(tmp_path / "tiny.gguf", form="Q4_0")
    source = from_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "packed", packs=True)
    for start in (1, 2):
        runner = StageRunner(
            load_span(Checkpoint(source.folder), start, start + 1, products=FAST), RunnerConfig(1 << 28)
        )
        runner.graphs = None
        assert find_bits(runner) == b""


@in_virtual_time
async def test_honest_peers_of_a_class_pass_by_digests(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with packed_swarm(source, tmp_path, monkeypatch) as (_swarm, client):
        kinds = kinds_asked(monkeypatch)
        for number, options in enumerate(({}, {"drafts": "off"}, {"compress": "int8"}, {"compress": "bf16"})):
            await generate(client, seed=number, **options)
        assert results(client) == {"passed": 4}
        assert all(kinds) and len(kinds) == 4 * 4
        assert not client.auditor.standing.doubted


def one_bit(hidden_BTH: Tensor) -> Tensor:
    """The last bit of one number of one position of a prompt."""
    if hidden_BTH.shape[1] > 1:
        hidden_BTH = hidden_BTH.clone()
        hidden_BTH[0, 1, 5] = hidden_BTH[0, 1, 5].nextafter(torch.tensor(1e9))
    return hidden_BTH


def one_bit_of_a_step(hidden_BTH: Tensor) -> Tensor:
    return hidden_BTH.nextafter(hidden_BTH + 1) if hidden_BTH.shape[1] == 1 else hidden_BTH


def noise(hidden_BTH: Tensor) -> Tensor:
    """3 % of noise, which no audit by sketches has found."""
    noise_BTH = torch.randn(hidden_BTH.shape, generator=torch.Generator().manual_seed(hidden_BTH.shape[1]))
    return hidden_BTH + 0.03 * hidden_BTH.norm(dim=-1, keepdim=True) / hidden_BTH.shape[-1] ** 0.5 * noise_BTH


def one_token(logits_BTV: Tensor) -> Tensor:
    """Another likeliest token at each step."""
    return logits_BTV.roll(1, -1) if logits_BTV.shape[1] == 1 else logits_BTV


def silence_a_head(member: VirtualMember, source: ModelSource) -> None:
    """Let a node compute with one attention head less in its first layer: what the head's outputs are multiplied by is 0."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source.folder.parent / "tiny.gguf").tensors}
    packed_OB = torch.from_numpy(tensors["blk.0.attn_output.weight"].data.copy())
    packed_OB[:, 2:18] = packed_OB[:, 2:18] & 0xF0 | 8  # the low halves of the first block of 32: 16 inputs, one head's
    weight = span_of(member).model.get_submodule("model.layers.0.self_attn.o_proj").weight
    weight._parts[0].refill(packed_OB.reshape(-1))  # type: ignore[union-attr]
    compute_anew(member)


@pytest.mark.parametrize(
    ("lie", "place"), [(one_bit, 0), (one_bit_of_a_step, 0), (noise, 0), (swapped, 0), (one_token, 1), (None, 0)]
)
@in_virtual_time
async def test_one_wrong_bit_is_out_at_the_first_audit(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Change | None, place: int
) -> None:
    """Also 3 % of noise, positions that are swapped, another token, and one attention head less (None)."""
    async with packed_swarm(source, tmp_path, monkeypatch) as (swarm, client):
        liar = await hop_in_use(swarm, client, place)
        await client.auditor.idle()
        if lie is None:
            silence_a_head(liar, source)
        else:
            tamper(liar, lie)
        await generate(client, drafts="off")
        assert results(client).get("false") == 1
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_who_lies_as_a_verifier_is_left_out_alone(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with packed_swarm(source, tmp_path, monkeypatch) as (swarm, client):
        used = await hop_in_use(swarm, client, 0)
        liar = next(swarm.members[name] for name in ("a0", "a1", "a2") if swarm.members[name] is not used)
        tamper(liar, lambda hidden_BTH: one_bit(hidden_BTH) if hidden_BTH.shape[1] > len(PROMPT) else hidden_BTH)
        for seed in range(12):
            await generate(client, seed=seed)
            if client.auditor.standing.shunned:
                break
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_a_class_that_a_peer_does_not_have_is_found_at_its_first_audit(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of another kind, whose sums round otherwise, announces the class of the others."""
    async with packed_swarm(source, tmp_path, monkeypatch) as (swarm, client):
        other = await hop_in_use(swarm, client, 0)
        await client.auditor.idle()
        tamper(other, lambda hidden_BTH: hidden_BTH * (1 + 2**-22))
        await generate(client)
        assert client.auditor.standing.shunned == {other.peer}


@in_virtual_time
async def test_a_change_of_class_is_no_crime(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop that computed one session in two ways, or has another class now, is judged by sketches."""
    async with packed_swarm(source, tmp_path, monkeypatch) as (swarm, client):
        kinds = kinds_asked(monkeypatch)
        one, _, third = (runner_of(swarm.members[name]) for name in ("a0", "a1", "a2"))
        announced = one.bits
        for number in range(3):
            one.bits_of_graph = False  # all its sessions were computed in another way than its class
            third.bits = bytes(8)
            await generate(client, seed=number)
        assert set(results(client)) <= {"passed", "void"} and "passed" in results(client)
        assert not client.auditor.standing.shunned and not client.auditor.standing.doubted
        assert not all(kinds)
        assert one.bits == announced


@in_virtual_time
async def test_a_class_of_two_is_judged_by_sketches(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with packed_swarm(source, tmp_path, monkeypatch, last=2) as (_swarm, client):
        kinds = kinds_asked(monkeypatch)
        await generate(client)
        assert results(client) == {"passed": 1}
        assert kinds and not any(kinds)


@in_virtual_time
async def test_plain_products_have_no_class(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path / "model").folder
    async with three_by_two(lambda swarm: swarm.create(model), tmp_path, dtype="bfloat16") as (_swarm, client):
        assert {peer.bits for peer in client._host.directory.peers().values()} == {b""}


@asynccontextmanager
async def plain_swarm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Two stages of three replicas with plain products of equal bits in bfloat16, whose audits all ask for digests."""
    monkeypatch.setattr(audits, "SAME_CLASS", 1.0)
    model = TinyModel.save(folder / "model").folder
    stages: Any = {"dtype": "bfloat16", "equal_bits": True}
    async with three_by_two(lambda swarm: swarm.create(model), folder, **stages) as (swarm, client):
        yield swarm, client


@in_virtual_time
async def test_plain_products_of_equal_bits_pass_by_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with plain_swarm(tmp_path, monkeypatch) as (_swarm, client):
        kinds = kinds_asked(monkeypatch)
        for number, options in enumerate(({}, {"drafts": "off"}, {"compress": "int8"})):
            await generate(client, seed=number, **options)
        assert results(client) == {"passed": 3}
        assert kinds and all(kinds)


def one_bit_in_half(hidden_BTH: Tensor) -> Tensor:
    """The last bit of one bfloat16 of one position of a prompt."""
    if hidden_BTH.shape[1] > 1:
        hidden_BTH = hidden_BTH.clone()
        hidden_BTH[0, 1, 5].view(torch.int16).bitwise_xor_(1)
    return hidden_BTH


def one_head_less(hidden_BTH: Tensor) -> Tensor:
    """As if one head of one position had been left out: a small part of the state."""
    if hidden_BTH.shape[1] > 1:
        hidden_BTH = hidden_BTH.clone()
        hidden_BTH[0, 1] *= 1 + 2**-7
    return hidden_BTH


@pytest.mark.parametrize("lie", [one_bit_in_half, one_head_less, swapped])
@in_virtual_time
async def test_one_wrong_bit_of_plain_products_is_out_at_the_first_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Change
) -> None:
    async with plain_swarm(tmp_path, monkeypatch) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        await client.auditor.idle()
        tamper(liar, lie)
        await generate(client, drafts="off")
        assert results(client).get("false") == 1
        assert client.auditor.standing.shunned == {liar.peer}
