"""What a stage sends as what: fixed codecs within the swarm's bounds, choices told once, AdaTopK against the slowest link."""

from __future__ import annotations

import pytest
import torch

from swarmnode.codec.tensors import Codec
from swarmnode.errors import UsageError
from swarmnode.plan.compression import HURRY, Choice
from swarmnode.roles.measuring.meters import BACKWARD, FORWARD
from swarmnode.roles.training.worker.activation_compressor import ActivationCompressor
from swarmnode.swarm.records.manifest import DEFAULT_CODECS, TRAINING_CODECS

VALUES = (torch.randn(4, 64, 64), torch.ones(4, 64, dtype=torch.int64))


def codecs(compressor: ActivationCompressor, bandwidth_bps: float | None, peer: str = "bob") -> list[int]:
    infos, _ = compressor.encode(VALUES, peer, FORWARD, bandwidth_bps)
    return [info.codec for info in infos]


def test_a_fixed_codec_for_floats_alone() -> None:
    assert codecs(ActivationCompressor("int8", TRAINING_CODECS), None) == [Codec.INT8, Codec.NONE]


@pytest.mark.parametrize("mode", ["int4", "adatopk"])
def test_what_the_swarm_does_not_allow(mode: str) -> None:
    with pytest.raises(UsageError, match=f"--compress {mode}"):
        ActivationCompressor(mode, DEFAULT_CODECS)


def test_a_choice_is_told_when_it_changes() -> None:
    compressor = ActivationCompressor("auto", TRAINING_CODECS)
    told: list[tuple[str, str, Choice]] = []
    compressor.on_choice = lambda *choice: told.append(choice)
    compressor.beat_s = 0.05
    assert codecs(compressor, None) == [Codec.NONE, Codec.NONE]
    for _ in range(HURRY + 3):
        last = codecs(compressor, 1e6)
    assert last == [Codec.INT4, Codec.NONE]
    assert [(peer, direction, choice.codec) for peer, direction, choice in told] == [("bob", FORWARD, Codec.INT4)]
    assert "1 Mbit/s" in compressor.choices["bob", FORWARD].reason


def test_directions_share_the_uplink() -> None:
    """What one direction could afford alone, two cannot."""
    alone, shared = ActivationCompressor("auto", TRAINING_CODECS), ActivationCompressor("auto", TRAINING_CODECS)
    for compressor in (alone, shared):
        compressor.beat_s = 0.06
    for _ in range(HURRY + 3):
        one = codecs(alone, 12e6)
        shared.encode(VALUES, "alice", BACKWARD, 12e6)
        two = codecs(shared, 12e6)
    assert one == [Codec.NONE, Codec.NONE]
    assert two == [Codec.BF16, Codec.NONE]


def test_adatopk_spares_fast_links() -> None:
    compressor = ActivationCompressor("adatopk", TRAINING_CODECS)
    assert codecs(compressor, None) == [Codec.NONE, Codec.NONE], "nothing is known yet"
    infos, _ = compressor.encode(VALUES, "slow", FORWARD, 1e6)
    assert infos[0].codec == Codec.TOPK
    assert infos[0].param == round(VALUES[0].numel() / 100)
    infos, _ = compressor.encode(VALUES, "half as slow", FORWARD, 2e6)
    assert infos[0].param == round(VALUES[0].numel() / 50)
    assert codecs(compressor, 1e9, "fast") == [Codec.NONE, Codec.NONE]


def test_what_adatopk_chose_is_told() -> None:
    compressor = ActivationCompressor("adatopk", TRAINING_CODECS)
    told: list[Codec] = []
    compressor.on_choice = lambda _peer, _direction, choice: told.append(choice.codec)
    for _ in range(3):
        codecs(compressor, 1e6)
    assert told == [Codec.TOPK]
    assert compressor.choices["bob", FORWARD].reason == "AdaTopK keeps 0.01 of the elements"
