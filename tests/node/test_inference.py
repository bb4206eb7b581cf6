"""Any torch module, served by whole nodes: results of one process, whoever is lost on the way, and what cannot be asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmnode.errors import NoRoute, UsageError
from swarmnode.roles.creation.model_source import ModelSource, from_module
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm
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
async def test_what_cannot_be_asked(tmp_path: Path, module: ModelSource) -> None:
    good = inputs(2)
    wrong = {
        "there is no array 'hint'": {"image": good["image"]},
        "nobody asked for an array 'label'": {**good, "label": good["hint"]},
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
