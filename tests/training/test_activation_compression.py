"""Activations that travel by a rule of top-k: the slowest link of the whole swarm sends the least, as the run asks."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from swarmnode.client.training.preparation import check_compression
from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.errors import UsageError
from swarmnode.measuring.meters import FORWARD
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LinkDurations
from swarmnode.swarm.records.manifest import DEFAULT_CODECS, TRAIN, TRAINING_CODECS, Manifest, ModelInfo
from swarmnode.swarm.records.run import Compression
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from tests.net.virtual import in_virtual_time
from tests.peer.training_swarm import PATIENCE_S, TrainingSwarm, Volunteer, toy_batches, toy_run

RATIO = 4.0
SLOW_S, FASTER_S = 1.0, 0.5


class KnownDurations(LinkDurations):
    """Of links that were measured: seconds by the peer at the other end."""

    def __init__(self, seconds: Mapping[PeerId, float]) -> None:
        super().__init__()
        self._seconds = seconds

    def record(self, link: Hashable, values: Sequence[TensorInfo], bandwidth_bps: float | None) -> float | None:
        self._now_s[link] = self._seconds.get(link[0], 0.0)  # type: ignore[index]
        return self._now_s[link]


def measured(volunteer: Volunteer, seconds: Mapping[PeerId, float]) -> None:
    compressor = ActivationCompressor("none", TRAINING_CODECS)
    compressor.codecs.durations = KnownDurations(seconds)
    volunteer.stage.compressor = compressor


@in_virtual_time
async def test_the_slowest_link_of_all_is_compressed_most_whatever_one_peer_says(tmp_path: Path) -> None:
    """The first stage knows of the slow link by the coordinator alone; the last one says that it knows of a far slower one."""
    async with TrainingSwarm(tmp_path) as swarm:
        first, second, third = [await swarm.join(unit, unit + 1) for unit in range(3)]
        measured(first, {second.peer: FASTER_S})
        measured(second, {first.peer: FASTER_S, third.peer: SLOW_S})
        measured(third, {second.peer: SLOW_S, "nobody": 1e6})
        third.stage.compressor.arrived((), "nobody", FORWARD, 1.0)
        run = toy_run(toy_batches(), 4, compression=Compression("adatopk", RATIO, feedback=True))
        _, trainer = await swarm.trainer(run, toy_batches(), lambda _report: None)
        assert await asyncio.wait_for(trainer.train(asyncio.Event()), PATIENCE_S) == 4
        slow = second.stage.compressor.choices[third.peer, FORWARD]
        faster = first.stage.compressor.choices[second.peer, FORWARD]
        assert (slow.codec, slow.topk_share) == (Codec.TOPK, 1 / RATIO)
        assert (faster.codec, faster.topk_share) == (Codec.TOPK, 2 / RATIO)


def test_a_swarm_that_allows_no_top_k_refuses_it() -> None:
    manifest = Manifest("school", ModelInfo("gpt2", 4, 8), (), 0, mode=TRAIN, codecs=TRAINING_CODECS)
    check_compression(manifest, "adatopk")
    with pytest.raises(UsageError, match="the swarm school does not allow it; choose auto"):
        check_compression(msgspec.structs.replace(manifest, codecs=DEFAULT_CODECS), "adatopk")
