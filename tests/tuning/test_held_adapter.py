"""A hop compresses what its link cannot take in time, if the owner leaves that to it."""

from __future__ import annotations

import msgspec
import torch

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import OpenAdapter
from swarmnode.measuring.meters import BACKWARD, FORWARD
from swarmnode.tuning.held_adapter import HopCodecs

FIXED = OpenAdapter(bytes(16), 1, (HopSpec("hop", 0, 2),), 0, b"recipe", 1, 8, 4, int(Codec.FP16))
ADAPTS = msgspec.structs.replace(FIXED, codec=0, adapts=True)
VALUES = (torch.randn(1, 8, 64),)
PLAIN_BITS = 8 * VALUES[0].nbytes
BEAT_S = 0.1


def last_codec(codecs: HopCodecs, direction: str, bandwidth_bps: float | None) -> int:
    for _ in range(4):
        codecs.hear(direction, bandwidth_bps)
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
