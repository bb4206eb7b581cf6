"""Any torch module, served by whole nodes: results of one process, whoever is lost on the way, and what cannot be asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.messages import MAX_WORK_IDS
from swarmnode.codec.tensors import Codec, DType, TensorInfo, payload_bytes
from swarmnode.compress.codecs import Encoded, decode_values, encode_values, payload_of
from swarmnode.credit.receipts import GATHER_S, folder_credits
from swarmnode.errors import ErrorCode, NoRoute, ProtocolError, UsageError
from swarmnode.founding.model_source import ModelSource, from_module
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm, sees_ready
from tests.segmenter import SIDE, WORDS, segmenter


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return from_module(
        "tests.segmenter:segmenter", tmp_path_factory.mktemp("module") / "weights", units=4, trains=False
    )


def inputs(samples: int, seed: int = 1) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {"image": chance.normal(size=(samples, 1, SIDE, SIDE)), "hint": chance.integers(0, WORDS, samples)}


def expected(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    whole, _ = segmenter()
    with torch.no_grad():
        outputs = whole.eval()(torch.from_numpy(arrays["image"]).float(), torch.from_numpy(arrays["hint"]))
    return {name: tensor.numpy() for name, tensor in outputs.items()}


def assert_close(outputs: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> None:
    alone = expected(arrays)
    assert outputs.keys() == alone.keys()
    for name, array in alone.items():
        np.testing.assert_allclose(outputs[name], array, atol=1e-5)


Change = Callable[[Encoded], Encoded]
"""What a node tells in place of what it computed"""


def nan(encoded: Encoded) -> Encoded:
    return encode_values([value * torch.nan if value.is_floating_point() else value for value in decoded(encoded)])


def too_few(encoded: Encoded) -> Encoded:
    return encode_values(decoded(encoded)[1:])


def another_shape(encoded: Encoded) -> Encoded:
    return encode_values([value[:1] for value in decoded(encoded)])


def another_dtype(encoded: Encoded) -> Encoded:
    return encode_values([value.int() for value in decoded(encoded)])


def a_huge_one(encoded: Encoded) -> Encoded:
    """Of 256 MiB, in a few bytes."""
    infos, payloads = encoded
    shape = (1 << 26,)
    empty = bytes(payload_bytes(TensorInfo(Codec.TOPK, DType.FLOAT32, shape)))
    return (TensorInfo(Codec.TOPK, DType.FLOAT32, shape), *infos[1:]), [empty, *payloads[1:]]


def too_large(_: Encoded) -> Encoded:
    raise ProtocolError("it never fits", code=ErrorCode.TOO_LARGE)


def decoded(encoded: Encoded) -> Sequence[Tensor]:
    infos, payloads = encoded
    return decode_values(infos, payload_of(payloads), "cpu")


class Liars:
    """Of these nodes whoever is asked first tells something else than it computes, or all of them do."""

    def __init__(self, patch: pytest.MonkeyPatch, change: Change, members: Sequence[VirtualMember], *, all_do: bool):
        self._change = change
        self._all_do = all_do
        self.lied: list[str] = []
        for member in members:
            server = member.node._stage.server  # type: ignore[union-attr]
            patch.setattr(server, "_compute", partial(self._compute, member, server._compute))

    def _compute(self, member: VirtualMember, honest: Callable[..., Encoded], *asked: Any) -> Encoded:
        if not self._all_do and self.lied not in ([], [member.peer]):
            return honest(*asked)
        if member.peer not in self.lied:
            self.lied.append(member.peer)
        return self._change(honest(*asked))


@contextlib.contextmanager
def lying(change: Change, *members: VirtualMember, all_do: bool = False) -> Iterator[list[str]]:
    """Yields who has lied."""
    with pytest.MonkeyPatch.context() as patch:
        yield Liars(patch, change, members, all_do=all_do).lied


@contextlib.asynccontextmanager
async def blaming(swarm: VirtualSwarm) -> AsyncIterator[tuple[SwarmClient, list[str]]]:
    """A client that knows all nodes, and whom it suspects from then on."""
    async with swarm.client() as client:
        await sees_ready(client, len(swarm.members))
        blamed: list[str] = []
        suspect = client._host.directory.suspect
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                client._host.directory, "suspect", lambda peer, reason: (blamed.append(peer), suspect(peer, reason))
            )
            yield client, blamed


async def two_hops(swarm: VirtualSwarm, module: ModelSource, replicas: int) -> None:
    """So many nodes with either half."""
    swarm.create(module)
    units, half = module.model.units, module.model.units // 2
    assert half >= 1
    await swarm.bootstrap()
    for number in range(replicas):
        swarm.node(f"first-{number}", f"0:{half}")
        swarm.node(f"last-{number}", f"{half}:{units}")
    for member in swarm.members.values():
        await member.wait_for("ready")


@in_virtual_time
async def test_equals_one_process_whatever_the_batch(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 1)
        async with swarm.client() as client:
            batches = [inputs(samples, samples) for samples in (1, 3, 4, 32)]
            for arrays, outputs in zip(batches, await asyncio.gather(*map(client.infer, batches)), strict=True):
                assert_close(outputs, arrays)


@in_virtual_time
async def test_each_hop_is_signed_for_what_it_computed(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 2)
        async with swarm.client() as client:
            for samples in (2, 3):
                await client.infer(inputs(samples))
            with lying(nan, swarm.members["first-0"], swarm.members["first-1"]) as lied:
                await client.infer(inputs(4))
            assert lied, "whose answer was of no use"
        credits = {one.worker: one.credit for one in folder_credits(swarm.folder / "homes")}
        served: Counter[str] = Counter()
        for worker, credit in credits.items():
            assert list(credit.by_client) == [client.peer_id]
            served[swarm.member(worker).name.partition("-")[0]] += credit.served
        half = module.model.units // 2
        assert served == {"first": half * (2 + 3 + 4), "last": (module.model.units - half) * (2 + 3 + 4)}


@in_virtual_time
async def test_many_passes_are_signed_for_without_waiting(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 1)
        async with swarm.client() as client:
            issuer, last = client._receipts, swarm.members["last-0"]
            works = [number.to_bytes(16, "big") for number in range(4 * MAX_WORK_IDS)]
            for work in works:
                last.node._host.completed.record(work, 5, 5)  # as that many passes would
                issuer.record(last.peer, work, served=5)
            await asyncio.sleep(2 * GATHER_S)
            (found,) = folder_credits(swarm.folder / "homes")
            assert found.credit.served == 5 * len(works)


@in_virtual_time
async def test_goes_on_when_peers_die_and_hang(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 3)
        async with swarm.client() as client:
            await client.infer(inputs(2))
            passes = [asyncio.ensure_future(client.infer(inputs(3, seed))) for seed in range(8)]
            await asyncio.sleep(0.001)
            await swarm.members["first-0"].kill()
            with swarm.members["last-1"].hanging():
                for seed, outputs in enumerate(await asyncio.gather(*passes)):
                    assert_close(outputs, inputs(3, seed))
                await swarm.members["last-0"].stop()
                assert_close(await client.infer(inputs(5)), inputs(5))


@in_virtual_time
async def test_who_lies_is_left_and_nobody_else(tmp_path: Path, module: ModelSource) -> None:
    arrays = inputs(2)
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 2)
        for hop in ("first", "last"):
            replicas = [swarm.members[f"{hop}-{number}"] for number in range(2)]
            for change in (nan, too_few, another_shape, another_dtype, a_huge_one):
                with lying(change, *replicas) as lied:
                    async with blaming(swarm) as (client, blamed):
                        assert_close(await client.infer(arrays), arrays)
                        assert len(lied) == 1 and set(blamed) == set(lied), change
            with lying(too_large, *replicas) as lied:
                async with blaming(swarm) as (client, blamed):
                    assert_close(await client.infer(arrays), arrays)
                    assert len(lied) == 1 and not blamed  # it may be so: its memory is its own


def scaled(encoded: Encoded) -> Encoded:
    return encode_values([value * 1.2 if value.is_floating_point() else value for value in decoded(encoded)])


@contextlib.asynccontextmanager
async def auditing(swarm: VirtualSwarm) -> AsyncIterator[SwarmClient]:
    """A client that has every pass computed again, and knows all nodes."""
    async with swarm.client(audit_share=1.0) as client:
        await sees_ready(client, len(swarm.members))
        yield client


async def audited(client: SwarmClient, passes: int) -> None:
    for seed in range(passes):
        await client.infer(inputs(2, seed))
        await (await client.remote_module()).auditor.idle()


@in_virtual_time
async def test_who_computes_something_else_is_left_out_for_a_week(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 3)
        liar = swarm.members["first-1"]
        with lying(scaled, liar):
            async with auditing(swarm) as client:
                await audited(client, 24)
                standing = client._host.standing
                assert standing.shunned == {liar.peer} and not standing.doubted
                assert all(standing.trust(one.peer) > 0 for one in swarm.members.values() if one is not liar)
                assert_close(await client.infer(inputs(2)), inputs(2))
            facts = client.why(liar.peer)
            assert any("wrong results" in fact for fact in facts["facts"]), facts


@in_virtual_time
async def test_of_two_who_differ_nobody_is_believed(tmp_path: Path, module: ModelSource) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 2)
        with lying(scaled, swarm.members["last-0"]):
            async with auditing(swarm) as client:
                await audited(client, 6)
                both = {swarm.members[f"last-{number}"].peer for number in range(2)}
                assert client._host.standing.doubted == both and not client._host.standing.shunned


@in_virtual_time
async def test_what_the_input_is_at_fault_for_blames_nobody(tmp_path: Path, module: ModelSource) -> None:
    arrays = inputs(2)
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(module)
        assert module.model.units == 7
        await swarm.bootstrap()
        for span in ("0:3", "3:7", "3:5", "5:7"):
            swarm.node(span, span)
        for member in swarm.members.values():
            await member.wait_for("ready")
        ends = swarm.members["3:7"], swarm.members["5:7"]
        for change, sentence in ((nan, "gives NaN for this input"), (too_large, "for so large an input")):
            with lying(change, *ends, all_do=True) as said:
                async with blaming(swarm) as (client, blamed):
                    with pytest.raises(UsageError, match=sentence):
                        await client.infer(arrays)
                    assert len(said) == 2 and not blamed
        async with blaming(swarm) as (client, blamed):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match="for so large an input"):
                patch.setattr("swarmnode.graph_serving.remote_module.MAX_PAYLOAD_BYTES", 100)
                await client.infer(arrays)
            assert_close(await client.infer(arrays), arrays)


@in_virtual_time
async def test_what_cannot_be_asked(tmp_path: Path, module: ModelSource) -> None:
    good = inputs(2)
    wrong = {
        "there is no array 'hint'": {"image": good["image"]},
        "the model takes no array 'label'": {**good, "label": good["hint"]},
        "the model takes (batch, 1, 8, 8)": {**good, "image": good["image"][:, 0]},
        "'hint' has the shape (1,)": {**good, "hint": good["hint"][:1]},
        "'image' holds NaN": {**good, "image": np.full_like(good["image"], np.nan)},
        "'hint' is of float64": {**good, "hint": good["hint"] * 1.0},
        "'image' is of object": {**good, "image": np.array([[None]])},
        "hold no samples": {"image": good["image"][:0], "hint": good["hint"][:0]},
        "a number in it is out of range": {**good, "hint": np.array([0, WORDS])},
        "holds numbers that int64 does not have": {**good, "hint": np.array([0, 2**64 - 1], dtype=np.uint64)},
    }
    async with VirtualSwarm(tmp_path) as swarm:
        await two_hops(swarm, module, 1)
        async with swarm.client() as client:
            for sentence, arrays in wrong.items():
                with pytest.raises(UsageError) as caught:
                    await client.infer(arrays)
                assert sentence in str(caught.value)
            with pytest.raises(UsageError, match="no language model"):
                await client.generate([1, 2, 3])
            assert_close(await client.infer(good), good)
            await swarm.members["last-0"].kill()
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(NoRoute):
                await client.infer(good)
            assert asyncio.get_running_loop().time() - began_s < 2 * client.config.patience_s
