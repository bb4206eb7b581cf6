"""What a stage sends as what: fixed codecs within the swarm's bounds, choices told once, top-k against the slowest link."""

from __future__ import annotations

import pytest
import torch

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import UsageError
from swarmnode.measuring.meters import BACKWARD, FORWARD
from swarmnode.plan.compression import HURRY, Choice
from swarmnode.swarm.records.manifest import DEFAULT_CODECS, TRAINING_CODECS
from swarmnode.swarm.records.run import Compression
from swarmnode.training.worker.activation_compressor import ActivationCompressor

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
    compressor.begin_step(0.05, 0.0)
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
        compressor.begin_step(0.06, 0.0)
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
    assert compressor.choices["bob", FORWARD].reason.startswith("adatopk keeps 1 / 100 of the elements: 0.541 s")


def test_the_slowest_link_of_all_counts_once_it_is_told() -> None:
    compressor = ActivationCompressor("adatopk", TRAINING_CODECS)
    codecs(compressor, 1e6)
    own_s = compressor.slowest_link_s
    assert own_s == pytest.approx(VALUES[0].nbytes * 8 / 1e6 + VALUES[1].nbytes * 8 / 1e6)
    compressor.begin_step(0.1, 10 * own_s)
    infos, _ = compressor.encode(VALUES, "bob", FORWARD, 1e6)
    assert infos[0].param == round(VALUES[0].numel() / 10)


def test_what_comes_in_is_measured_too_and_who_is_gone_forgotten() -> None:
    compressor = ActivationCompressor("auto", TRAINING_CODECS)
    compressor.arrived((TensorInfo(Codec.TOPK, DType.FLOAT32, (1000,), 10),), "bob", FORWARD, 1e6)
    compressor.arrived((TensorInfo(Codec.NONE, DType.FLOAT32, (1000,)),), "alice", FORWARD, None)
    assert compressor.slowest_link_s == pytest.approx(0.032), "as they would have come uncompressed"
    compressor.begin_step(0.1, 0.0)
    assert compressor.slowest_link_s > 0, "of the step that ended"
    compressor.begin_step(0.1, 0.0)
    assert compressor.slowest_link_s == 0


def test_the_run_has_the_first_word_within_what_the_swarm_allows() -> None:
    compressor = ActivationCompressor("int8", TRAINING_CODECS)
    compressor.adopt(Compression("topk", 8.0))
    infos, _ = compressor.encode(VALUES, "bob", FORWARD, 1e6)
    assert (infos[0].codec, infos[0].param) == (Codec.TOPK, VALUES[0].numel() // 8)
    compressor.adopt(Compression())
    assert codecs(compressor, 1e6) == [Codec.INT8, Codec.NONE]
    bound = ActivationCompressor("none", DEFAULT_CODECS)
    bound.adopt(Compression("topk"))
    assert codecs(bound, 1e6) == [Codec.NONE, Codec.NONE]


def test_only_the_slowest_link() -> None:
    compressor = ActivationCompressor("slowest", TRAINING_CODECS)
    compressor.begin_step(0.1, VALUES[0].nbytes * 8 / 1e6)
    assert codecs(compressor, 1e6) == [Codec.TOPK, Codec.NONE]
    assert codecs(compressor, 2e6, "twice as fast") == [Codec.NONE, Codec.NONE]
