import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.errors import UsageError
from swarmnode.plan.offline.hosting import DeviceRates, Planner, Workload
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.peers import Change
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation
from swarmnode.simulate.steps.simulated_training import beat_s, share_out
from swarmnode.swarm.records.announcement import State
from swarmnode.swarm.records.run import Averaging
from tests.simulate.worlds import MB, figures, model, run, scenario, total

HALVES = [Span(0, 4), Span(4, 8)]


def settings(seconds=300.0, *, seed=0, churn=0.0, **train):
    wanted = {"microbatches": 8, "microbatch": 1, "sequence": 64, "compress": "none", **train}
    return Settings("train", hours=seconds / 3600, seed=seed, churn=churn, train=TrainSettings(**wanted))


def test_one_stage_computes_every_microbatch_forward_and_back():
    """8 units at 80 units/s, 64 tokens as 4 passes: 0.4 s forward, 0.8 s back, 8 microbatches, nobody to agree with."""
    result = run(scenario([80.0]), model(8, parameters=1000), settings())
    assert result.measures.values["step, s"][0] == pytest.approx(8 * 1.2, rel=0.01)
    assert result.measures.values["of it agreeing, s"][0] == 0.0
    assert total(result.measures, "tokens trained") == 8 * 64 * total(result.measures, "steps")


def test_a_pipeline_works_on_several_at_once():
    """Two stages of half the model: a step costs little more than half, once the pipeline is full."""
    network = scenario([80.0, 80.0], delay_s=0.001, bandwidth_bps=1e10)
    result = run(network, model(8, parameters=1000), settings(), spans=HALVES)
    assert 4 * 1.2 < result.measures.values["step, s"][0] < 5.5 * 1.2


def test_a_pipeline_over_long_hops_does_not_run_dry():
    """Four stages of 0.3 s a microbatch, 0.25 s from each to the next: 40 take a stage's time each, and the way of one."""
    network = scenario([80.0] * 4, delay_s=0.25, bandwidth_bps=1e10)
    result = run(network, model(8, parameters=1000), settings(microbatches=40), spans=QUARTERS)
    way_s = 4 * 0.3 + 6 * 0.25
    assert result.measures.values["step, s"][0] < 1.1 * (39 * 0.3 + way_s)


def test_replicas_of_unequal_speeds_in_a_row_of_stages_all_have_work():
    """Each of four stages has a machine of three units of speed and one of one, so a microbatch leaves it every 0.3 s."""
    network = scenario([60.0, 20.0] * 4, delay_s=0.1, bandwidth_bps=1e10)
    spans = [span for span in QUARTERS for _ in range(2)]
    result = run(network, model(8, parameters=1000), settings(microbatches=80), spans=spans)
    way_s = 4 * 0.6 + 6 * 0.1
    assert result.measures.values["step, s"][0] < 1.1 * (80 * 0.3 + way_s)


def test_who_leaves_its_units_stands_by():
    """Of three, one gives up its half after a while: the other two train on."""
    network = scenario([80.0] * 3, delay_s=0.001, bandwidth_bps=1e10)
    simulation = Simulation(network, model(8, parameters=1000), settings(), spans=[*HALVES, HALVES[1]])
    spare = simulation.world.peers[2]
    simulation.clock.at(30.0, lambda: simulation.world.move(spare, Span(0, 0)))
    values = simulation.run().measures.values
    assert spare.state is State.JOINING and not spare.span.units
    assert sum(values["step, s"]) > 250.0


def test_who_leaves_again_before_the_next_step_takes_no_part_in_it():
    """One comes to the other half in the middle of a step, and gives that up at once."""
    network = scenario([80.0] * 3, delay_s=0.001, bandwidth_bps=1e10)
    simulation = Simulation(network, model(8, parameters=1000), settings(), spans=[*HALVES, HALVES[1]])
    world, spare = simulation.world, simulation.world.peers[2]
    simulation.clock.at(30.0, lambda: world.move(spare, HALVES[0]))
    simulation.clock.at(32.1, lambda: world.move(spare, Span(0, 0)) if spare.state is State.READY else None)
    values = simulation.run().measures.values
    assert spare.state is State.JOINING and sum(values["step, s"]) > 250.0


def test_half_the_speed_gets_half_the_work():
    network = scenario([100.0, 50.0], delay_s=0.001)
    result = run(network, model(8, parameters=1000), settings(microbatches=30), spans=[Span(0, 8)] * 2)
    fast, slow = result.world.peers
    assert fast.busy_s == pytest.approx(slow.busy_s, rel=0.15)


def test_replicas_agree_on_gradients_by_parts():
    """Two replicas send one another half of 8 x 1 M float32 gradients, twice."""
    network = scenario([1e4, 1e4], delay_s=0.25, bandwidth_bps=8e6)
    result = run(network, model(8, parameters=MB), settings(600.0), spans=[Span(0, 8)] * 2)
    expected_s = 2 * (16e6 * 8 / 8e6 + 0.25) + 2 * 0.25  # both rounds, then the word to commit and its answer
    assert result.measures.values["of it agreeing, s"][0] == pytest.approx(expected_s, rel=0.01)


def test_averaging_seldom_or_with_a_codec_costs_less():
    network = scenario([1e4, 1e4], bandwidth_bps=8e6)

    def agreeing_s(**averaging):
        wanted = settings(2000.0, averaging=Averaging(**averaging))
        values = run(network, model(8, parameters=MB), wanted, spans=[Span(0, 8)] * 2).measures.values
        return sum(values["of it agreeing, s"]) / len(values["of it agreeing, s"])

    every = agreeing_s()
    assert agreeing_s(codec=Codec.INT8) == pytest.approx(every / 4, rel=0.15)
    assert agreeing_s(every=10) < every / 5


def test_a_slow_link_is_compressed_and_a_fast_one_left_alone():
    def choices(bandwidth_bps):
        network = scenario([80.0, 80.0], delay_s=0.001, bandwidth_bps=bandwidth_bps)
        result = run(network, model(8), settings(compress="auto"), spans=HALVES)
        return {choice.codec for choice in result.workload.encoder.codecs.choices.values()}

    assert choices(1e10) == {Codec.NONE}
    assert choices(1e6) == {Codec.INT4}


def test_a_lost_peers_microbatches_are_replayed_by_its_replica():
    spans = [Span(0, 4), Span(4, 8), Span(4, 8)]
    network = scenario([80.0, 40.0, 40.0], delay_s=0.001)
    result = run(network, model(8, parameters=1000), settings(), spans=spans, trace=[Change(4.0, 2, False)])
    totals = result.measures.totals
    assert totals["lost, unit microbatches"] > 0
    assert (
        totals["replayed, unit microbatches"] >= totals["lost, unit microbatches"]
    )  # it passes the others again as well
    assert totals["steps"] > 10
    assert total(result.measures, "steps lost") == 0


def test_an_agreement_that_a_death_interrupts_begins_anew_without_what_was_on_its_way():
    """Three replicas need 2 x 2 x 8/3 MB through 8 Mbit/s; one dies in the middle, the two that are left need 2 x 4 MB."""
    network = scenario([1e4] * 3, delay_s=0.0, bandwidth_bps=8e6)
    trace = [Change(5.0, 2, False)]
    shape = model(2, parameters=MB)
    result = run(network, shape, settings(60.0, microbatches=3), spans=[Span(0, 2)] * 3, trace=trace)
    noticed_s = 5.0 + result.settings.swarm.detect_s
    assert result.measures.values["step, s"][0] == pytest.approx(noticed_s + 8.0, rel=0.02)


def test_units_that_nobody_holds_stop_the_training_until_they_return():
    trace = [Change(50.0, 1, False), Change(100.0, 1, True)]
    network = scenario([80.0, 80.0], delay_s=0.001, memory_bytes=700 * MB)
    result = run(network, model(8, parameters=5 * MB), settings(400.0), trace=trace)
    assert 45 < total(result.measures, "waiting for units, s") < 120
    assert total(result.measures, "steps lost") > 0  # since the last checkpoint
    assert result.workload.step >= 5


def test_churn_costs_but_does_not_stop_and_is_the_same_each_time():
    network = scenario([80.0] * 6, memory_bytes=700 * MB, bandwidth_bps=1e9)
    wanted = settings(600.0, churn=20.0, seed=4)
    calm, first, again = (run(network, model(8, parameters=5 * MB), each) for each in (settings(600.0), wanted, wanted))
    assert 0 < total(first.measures, "steps") < total(calm.measures, "steps")
    assert json.dumps(figures(first)) == json.dumps(figures(again))


def test_a_plans_pipelines_are_kept_to():
    """Two pipelines, each on an island of its own: nothing crosses but gradients."""
    network = scenario([80.0] * 4)
    pipelines = [[0, 1], [2, 3]]
    result = run(network, model(8), settings(averaging=Averaging(every=1000)), spans=HALVES * 2, pipelines=pipelines)
    sent = {link for link, size_bytes in result.world.links.bytes_sent.items() if link[0] < 4 and size_bytes}
    assert sent == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_of_a_plans_pipelines_the_faster_ones_get_more_microbatches():
    """Three of one stage each; in equal numbers the slowest would take three times as long as the swarm needs."""
    speeds = [930.0, 1800.0, 3640.0]
    network = scenario(speeds, delay_s=0.001, bandwidth_bps=1e10)
    wanted = settings(3.0, microbatches=48)
    result = run(network, model(8, parameters=1000), wanted, spans=[Span(0, 8)] * 3, pipelines=[[0], [1], [2]])
    alone_s = 1.2 * 80  # of a microbatch, times units/s: as with one stage above
    bound_s = 48 * alone_s / sum(speeds)
    assert bound_s < result.measures.values["step, s"][0] < 1.15 * bound_s


def test_lost_pipelines_get_nothing_while_others_are_left():
    assert Counter(share_out(40, [1.0, 3.0, math.inf])) == {0: 30, 1: 10}
    assert Counter(share_out(40, [math.inf, math.inf])) == {0: 20, 1: 20}, "as all are taken by whoever is left"
    half_lost = {"here": Replica(Span(0, 4), 0.5)}
    assert beat_s(["here", "gone"], half_lost) == 2.0
    assert beat_s(["gone"], half_lost) == math.inf


def test_peers_find_places_so_that_pipelines_stay_on_their_islands():
    """Memory for two units of eight each, numbered by turns: whole pipelines on either island, next to nothing crosses."""
    island = np.arange(16) % 2
    near = island[:, None] == island[None, :]
    network = replace(
        scenario([80.0] * 16), bandwidth_bps=np.where(near, 1e9, 2e7), delay_s=np.where(near, 0.001, 0.05)
    )
    wanted = settings(120.0, microbatches=32, averaging=Averaging(every=1000))
    result = run(network, model(8, parameters=20 * MB), wanted)
    for places in (0, 1):
        held = Counter(peer.span for peer in result.world.peers[places::2])
        assert held == {Span(start, start + 2): 2 for start in range(0, 8, 2)}
    sent = {path: size_bytes for path, size_bytes in result.world.links.bytes_sent.items() if max(path) < 16}
    across = sum(size_bytes for (one, other), size_bytes in sent.items() if (one - other) % 2)
    assert across < 0.05 * sum(sent.values())


def test_what_the_ends_share_is_agreed_on_by_both():
    tied, free = model(8, shared=5 * MB), model(8)
    assert [tied.block_parameters(block) for block in (0, 3, 7, -1)] == [5 * MB, 10 * MB, 5 * MB, 5 * MB]
    assert free.block_parameters(-1) == 0


@pytest.mark.parametrize("wrong", [{"compress": "zip"}, {"microbatches": 10**6}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UsageError):
        run(scenario([80.0]), model(8), settings(**wrong))


def test_a_swarm_too_large_to_follow_is_refused():
    with pytest.raises(UsageError, match="at most 500"):
        run(scenario([80.0]), model(8), settings(), peers=501)


def test_a_lost_coordinator_is_followed_by_the_next_eldest():
    """Noticed, waited for and asked around: the step takes that much longer, and goes on with what was counted."""
    spans = [Span(0, 8), Span(0, 8), Span(0, 8)]
    network = scenario([80.0, 80.0, 80.0], delay_s=0.05)

    def steps_s(*trace):
        result = run(network, model(8, parameters=1000), settings(), spans=spans, trace=list(trace))
        return result, result.measures.values["step, s"]

    _, calm = steps_s()
    result, lost = steps_s(Change(4.0, 0, False))
    assert total(result.measures, "coordinators lost") == 1
    assert result.workload.gauges()["stages"] == 2
    assert len(lost) > 0.5 * len(calm), "two of three go on"
    slowest_s = max(lost)
    assert calm[0] < slowest_s < 3 * calm[0] + result.world.settings.detect_s + 1.0


def test_a_swarm_that_lost_everybody_goes_on_when_others_come():
    network = scenario([80.0, 80.0], delay_s=0.01)
    changes = [Change(20.0, 0, False), Change(21.0, 1, False), Change(40.0, 0, True), Change(41.0, 1, True)]
    result = run(network, model(8, parameters=1000), settings(), spans=[Span(0, 4), Span(4, 8)], trace=changes)
    assert total(result.measures, "coordinators lost") >= 1
    assert result.workload.gauges()["stages"] == 2 and total(result.measures, "steps") > 5


QUARTERS = [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)]


def test_a_plan_for_unequal_devices_is_carried_out_as_fast_as_it_says():
    """Fixed pipelines, some of which pair a fast one with a slow one, took 2.8 times as long as planned."""
    speeds = [160.0, 40.0, 20.0, 120.0, 90.0, 40.0, 30.0, 70.0]
    network, microbatches = scenario(speeds, delay_s=0.005, bandwidth_bps=1e9), 64
    rates = DeviceRates(tuple(speed / (1.2 * 10) for speed in speeds), (10**12,) * 8)
    load = Workload((1,) * 8, (4000,) * 8, (1.0,) * 8, (64 * 1000 * 4,) * 8, microbatches)
    planned = Planner(network, rates, load).plan(stages=4, replicas=2, effort=0.01)
    held = {device: stage.span for stage in planned.stages for device in stage.devices}
    wanted = settings(microbatches=microbatches)
    result = run(network, model(8, parameters=1000), wanted, spans=[held[device] for device in range(8)])
    assert result.measures.values["step, s"][0] == pytest.approx(planned.step_s, rel=0.15)


@pytest.mark.parametrize(
    ("speeds", "spans", "network", "parameters"),
    [
        ([80.0, 80.0], HALVES, {"delay_s": 0.001, "bandwidth_bps": 1e10}, 1000),
        ([100.0, 50.0], [Span(0, 8)] * 2, {"delay_s": 0.001}, 1000),
        ([1e4] * 2, [Span(0, 8)] * 2, {"delay_s": 0.25, "bandwidth_bps": 8e6}, MB),
        ([80.0, 60.0, 100.0, 70.0] * 2, QUARTERS * 2, {"delay_s": 0.05, "bandwidth_bps": 2e6}, 1000),
    ],
    ids=["pipeline", "unequal replicas", "averaging on slow lines", "slow links"],
)
def test_the_first_step_is_forecast_and_the_ones_after_it_are_corrected(speeds, spans, network, parameters):
    """Floor: 20 %. From speeds and links alone the first is up to 0.7 % off; the next, for which that one is half believed, half of
    that, and the others not at all."""
    result = run(scenario(speeds, **network), model(8, parameters=parameters), settings(90.0), spans=spans)
    off = result.measures.values["off its forecast, share"]
    assert off[0] < 0.2 and off[1] <= max(0.05, 0.6 * off[0]) and max(off[2:], default=0.0) < 0.05, off
