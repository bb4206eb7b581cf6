"""A hop compresses what its link cannot take in time, if the owner leaves that to it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import OpenAdapter
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.measuring.meters import BACKWARD, FORWARD
from swarmnode.plan.view import Span
from swarmnode.tuning.adapter_parts import AdapterParts, AdapterPassage, TuningDevice, TuningPace
from swarmnode.tuning.held_adapter import HopCodecs
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time
from tests.tiny import TinyModel
from tests.tuning.hops import IDS, UNITS

FIXED = OpenAdapter(bytes(16), 1, (HopSpec("hop", 0, 2),), 0, b"recipe", 1, 8, 4, int(Codec.FP16))
ADAPTS = msgspec.structs.replace(FIXED, codec=0, adapts=True)
VALUES = (torch.randn(1, 8, 64),)
PLAIN_BITS = 8 * VALUES[0].nbytes
BEAT_S = 0.1


def last_codec(codecs: HopCodecs, direction: str, bandwidth_bps: float | None) -> int:
    for _ in range(4):
        codecs.record_bandwidth(direction, bandwidth_bps)
        for number in range(3):
            codecs.count(number * BEAT_S)
        codecs.end_step()
        infos, _ = codecs.encode(VALUES, direction)
    return infos[0].codec


def test_each_direction_is_compressed_as_its_link_needs() -> None:
    codecs = HopCodecs(ADAPTS, {Codec.NONE, Codec.BF16, Codec.INT8})
    assert last_codec(codecs, FORWARD, None) == Codec.NONE, "nothing is known of the link"
    assert last_codec(codecs, FORWARD, 100 * PLAIN_BITS / BEAT_S) == Codec.NONE
    assert last_codec(codecs, FORWARD, 0.8 * PLAIN_BITS / BEAT_S) == Codec.BF16
    assert last_codec(codecs, BACKWARD, 0.1 * PLAIN_BITS / BEAT_S) == Codec.INT8, "no more than the swarm allows"
    assert last_codec(HopCodecs(FIXED, {Codec.NONE}), FORWARD, 0.1 * PLAIN_BITS / BEAT_S) == Codec.FP16


@in_virtual_time
async def test_held_out_microbatches_pass_a_hop_of_several_devices(tmp_path: Path) -> None:
    tiny, losses = TinyModel.save(tmp_path, layers=UNITS - 2), []
    recipe = AdapterRecipe(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
    for cuts in ((0, UNITS), (0, 2, UNITS), (0, 1, 3, UNITS)):
        executor = InlineExecutor()
        devices = [
            TuningDevice(load_span(Checkpoint(tiny.folder), *ends, check=False), executor, pace)
            for ends in pairwise(cuts)
            for pace in [TuningPace(executor, 1.0, lambda: False)]
        ]
        parts = await AdapterParts.open(devices, Span(0, UNITS), recipe, "owner", (2, 8))
        for number, learns in enumerate((True, False, True)):
            passage = AdapterPassage(parts, number, (IDS,), learns=learns)
            passage.ends_here, passage.labels, passage.share = True, (IDS,), 1 / 14
            back = await passage.cross()
            assert (back is not None) == learns
            losses.append(passage.loss)
        parts.close()
        await executor.close()
    assert losses == [losses[0]] * 9
