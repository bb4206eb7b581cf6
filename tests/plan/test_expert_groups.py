"""Expert parallelism: the model's arithmetic, its sentences, and its choices held to a simulation of single messages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarmnode.errors import UsageError
from swarmnode.plan.expert_groups import (
    CARDS,
    LAN,
    WAN,
    ExpertMixture,
    ExpertPhase,
    ExpertSchedule,
    GroupMachine,
    GroupNetwork,
    GroupWork,
    LayerOnGroup,
    LinkCost,
    WorkKind,
    chunked_s,
    compare,
)
from tests.contrib.script import CONTRIB, load

MIXTURE = ExpertMixture(48, 2048, 128, 8, 3 * 2048 * 768, 18.9e6)  # as Qwen3-30B-A3B
MACHINE = GroupMachine(28e12, 650e9, pass_s=36e-6)
PROMPT = GroupWork(WorkKind.PROMPTS, 1, 1000)


def test_the_sentence_is_right_by_hand() -> None:
    """Two layers of two experts, one active, of 10^6 parameters each; a machine has memory for two experts; 1 Gbit/s, 1 ms."""
    mixture = ExpertMixture(layers=2, hidden=1000, experts=2, active=1, expert_parameters=1e6, dense_parameters=0)
    machine, line = GroupMachine(1e10, 0.0, memory_bytes=4e6), LinkCost(1e-3, 0.0, 125e6)
    compared = compare(mixture, machine, GroupNetwork(2, line), GroupWork(WorkKind.DECODING, 1))
    # Group: both members have the token and compute half of its expert. Each sends the half of its partial sum that the other one
    # owns, 1,000 bytes, and then its own half of the whole sum.
    group_s = 2 * (1e6 / 1e10 + 2 * (1e-3 + 1000 / 125e6))
    # Pipeline: a layer a stage, and the token goes there and back.
    pipeline_s = 2 * (2e6 / 1e10 + 1e-3 + 2000 / 125e6)
    assert compared.schedule == ExpertSchedule("sum", shards=2)
    assert (compared.group_s, compared.pipeline_s) == (pytest.approx(group_s), pytest.approx(pipeline_s))
    assert math.isinf(compared.alone_s), "no machine holds both layers"
    says = "decoding (1 at once), 2 machines at 1 Gbit/s: no group; a pipeline is 1.74 times faster"
    assert group_s / pipeline_s == pytest.approx(1.74, abs=0.005)
    assert str(compared) == says and compared.summary()["says"] == says


def test_a_chunk_is_sent_while_the_next_one_is_computed() -> None:
    """A second of computing and one of sending, in two chunks: the first half is computed before any is sent."""
    halves = (ExpertPhase(compute_s=0.5), ExpertPhase(line_s=0.25, delay_s=0.1), ExpertPhase(line_s=0.25, delay_s=0.1))
    assert chunked_s(halves, 1) == pytest.approx(1.2)
    assert chunked_s(halves, 2) == pytest.approx(1.2 + 0.5)
    assert chunked_s((*halves[:2], ExpertPhase(line_s=0.75, delay_s=0.1)), 4) == pytest.approx(4 * 1.0 + 0.1), (
        "the line decides"
    )


def test_the_sentence_follows_the_times() -> None:
    weights = 2 * 48 * (128 * MIXTURE.expert_parameters + MIXTURE.dense_parameters)
    card = replace(MACHINE, memory_bytes=weights * 0.6)
    computer = replace(card, memory_bytes_per_s=40e9, flops_per_s=5e11)
    prompt, token = replace(PROMPT, tokens=512), GroupWork(WorkKind.DECODING, 1)
    for link, member, work, group in (
        (LAN, card, prompt, False),
        (CARDS, card, prompt, True),
        (LAN, computer, token, True),
        (WAN, computer, token, False),
    ):
        compared = compare(MIXTURE, member, GroupNetwork(2, link), work)
        assert compared.pays is group
        ratio = compared.pipeline_s / compared.group_s if group else compared.group_s / compared.pipeline_s
        end = (
            f"is {ratio:.3g} times faster than a pipeline"
            if group
            else f"no group; a pipeline is {ratio:.3g} times faster"
        )
        assert ratio > 1.15 and str(compared).endswith(end)


def test_a_gain_within_the_models_error_is_no_group() -> None:
    work = GroupWork(WorkKind.DECODING, 16)
    compared = compare(MIXTURE, MACHINE, GroupNetwork(2, CARDS), work)
    assert not compared.pays or compared.gain > 1.15
    slightly = replace(compared, group_s=1.0, pipeline_s=1.1, alone_s=2.0)
    assert str(slightly).endswith("no group; it would be only 1.1 times faster than a pipeline")


def test_memory_decides() -> None:
    """A model that no machine holds is read from the next tier, if there is one; training has no such tier."""
    network, decoding = GroupNetwork(2, LAN), GroupWork(WorkKind.DECODING, 1)
    weights = 2 * 48 * (128 * MIXTURE.expert_parameters + MIXTURE.dense_parameters)
    half = replace(MACHINE, memory_bytes=weights / 2)
    none = compare(MIXTURE, half, network, decoding)
    assert math.isinf(none.alone_s) and math.isfinite(none.pipeline_s) and math.isfinite(none.group_s) is False
    fits = compare(MIXTURE, replace(half, memory_bytes=weights * 0.6), network, decoding)
    assert math.isfinite(fits.group_s), "the dense parts of all layers are on every member of a group"
    disk = compare(MIXTURE, replace(half, spill_bytes_per_s=2e9), network, decoding)
    assert disk.pipeline_s < disk.alone_s < math.inf
    train = compare(MIXTURE, replace(half, spill_bytes_per_s=2e9), network, GroupWork(WorkKind.TRAINING, 8, 128))
    assert str(train).endswith("they do not hold the model, in a group or otherwise")
    assert train.summary()["group_s"] is None and not train.pays


def test_dedicated_schedules_are_chosen_where_cards_share_a_line() -> None:
    """Four cards with the same tokens in each of two machines: splitting them before the exchange sends a quarter."""
    layer = LayerOnGroup(MIXTURE, MACHINE, GroupNetwork(2, LAN, cards=4), tokens=4096, same=4)
    chosen = layer.choose()
    assert chosen.name in ("s1", "s2")
    plain_s = layer.experts_s(ExpertSchedule("ep"))
    assert 3 < plain_s / layer.experts_s(ExpertSchedule(chosen.name, chosen.shards)) < 5
    assert {schedule.name for schedule in layer.schedules()} == {"ep", "esp", "s1", "s2"}
    assert {schedule.chunks for schedule in replace(layer, tokens=1).schedules()} == {1}, "one token is one chunk"


def test_links_cost_what_they_say() -> None:
    group = GroupNetwork(2, LinkCost(0.01, 0.001, 1e6), cards=2, inner=LinkCost(0.0, 0.0001, 1e9))
    swap = group.exchange(4, 10, 100)
    assert swap.line_s == pytest.approx(0.001 + 2 * 2 * 1000 / 1e6), "both cards send to two far ones over one line"
    assert swap.inner_s == pytest.approx(0.0001 + 1000 / 1e9) and swap.delay_s == 0.01
    assert group.exchange(2, 10, 100).line_s == 0, "neighbours share a machine"
    assert group.exchange(1, 10, 100).seconds == 0
    assert group.exchange(4, 0.1, 100).line_s == pytest.approx(0.2 * 0.001 + 2 * 2 * 10 / 1e6), (
        "few tokens, few messages"
    )


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: replace(MIXTURE, experts=0), "experts is 0; it must be a finite number of at least 1"),
        (lambda: replace(MIXTURE, active=0), "active is 0"),
        (lambda: replace(MIXTURE, active=129), "129 experts are active in a token, but a layer has 128"),
        (lambda: replace(MIXTURE, expert_parameters=math.inf), "expert_parameters is inf"),
        (lambda: replace(MIXTURE, hidden="wide"), "hidden is wide"),
        (lambda: GroupNetwork(1, LAN), "1 machine with 1 card is no group; give at least 2"),
        (lambda: GroupNetwork(0, LAN, cards=4), "machines is 0"),
        (lambda: replace(LAN, bytes_per_s=math.nan), "bytes_per_s is nan"),
        (lambda: replace(WAN, delay_s=-1.0), "delay_s is -1.0"),
        (lambda: replace(MACHINE, flops_per_s=math.nan), "flops_per_s is nan"),
        (lambda: GroupWork(WorkKind.DECODING, 0), "sequences is 0"),
    ],
)
def test_refusals(build, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        build()


@pytest.mark.parametrize("cases", [20, 200])
def test_choices_hold_in_a_simulation_of_single_messages(cases: int) -> None:
    figures = load(CONTRIB / "benchmarks" / "expert_groups.py").report(cases, seed=2)
    assert figures["chosen_over_best"]["mean"] >= 0.95
    assert figures["false_yes_share_of_all"] <= 0.05 and figures["false_yes_share_of_yes"] <= 0.05
    assert figures["says_yes"] >= cases / 20 and figures["most_missed_gain"] < 1.5
