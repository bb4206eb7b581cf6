import json

import numpy as np
import pytest

from swarmnode.plan.view import Span
from swarmnode.simulate.environment.peers import Change
from swarmnode.simulate.sessions import serving
from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings
from tests.simulate.worlds import MB, figures, model, run, scenario, total

HALVES = [Span(0, 4), Span(4, 8)]


def settings(arrivals_per_s=0.01, seconds=300.0, new_tokens=20, **more):
    serve = ServeSettings(arrivals_per_s, prompt_tokens=32, new_tokens=new_tokens, spread=0.0)
    return Settings(hours=seconds / 3600, serve=serve, **more)


def test_a_token_takes_its_turn_of_the_ring():
    """Two hops of 4 units at 40 units/s, 10 ms apart both ways: 0.1 + 0.1 + 0.02 s, and what 2 kB and the id take (to both
    the client and the first hop)."""
    result = run(scenario([40.0, 40.0]), model(8), settings(), spans=HALVES)
    wire_s = 8 * (64 + 2000 + 2 * (64 + 8)) / 1e8
    assert np.percentile(result.measures.values["between tokens, s"], 50) == pytest.approx(0.22 + wire_s, rel=1e-6)


def test_a_prompt_goes_in_chunks_of_which_the_hops_work_at_once():
    """A chunk of 128 tokens takes 8 passes of 0.1 s per hop; the second hop is one chunk behind the first."""
    serve = ServeSettings(0.005, prompt_tokens=512, new_tokens=1, spread=0.0)
    result = run(scenario([40.0, 40.0]), model(8), Settings(hours=0.1, serve=serve), spans=HALVES)
    assert np.percentile(result.measures.values["first token, s"], 50) == pytest.approx(5 * 0.8, rel=0.05)


def test_sessions_that_meet_are_batched():
    """Throttled devices take as long for many rows as for one: together sessions get far more than one could."""
    network = scenario([40.0, 40.0], memory_bytes=100_000 * MB)
    crowd = run(network, model(8), settings(0.2, 300.0, new_tokens=10_000), spans=HALVES)
    assert total(crowd.measures, "tokens") > 5 * 300 / 0.22


def test_twice_the_speed_gets_more_of_the_sessions():
    network = scenario([100.0, 50.0], delay_s=0.001)
    result = run(network, model(8), settings(2.0, 300.0), spans=[Span(0, 8)] * 2)
    fast, slow = result.world.peers
    assert fast.busy_s > slow.busy_s > 0


def test_the_same_seed_gives_the_same_figures_and_another_one_others():
    network = scenario([40.0, 80.0, 20.0, 60.0], memory_bytes=220 * MB)
    first, again, other = (run(network, model(8), settings(0.5, 200.0, churn=30.0, seed=seed)) for seed in (1, 1, 2))
    assert json.dumps(figures(first)) == json.dumps(figures(again))
    assert figures(first)["totals"] != figures(other)["totals"]


def test_every_session_ends_however_peers_come_and_go():
    network = scenario([40.0] * 6, memory_bytes=220 * MB)
    result = run(network, model(8), settings(0.2, 1200.0, churn=20.0))
    totals = result.measures.totals
    running = result.measures.curves["sessions running"][-1]
    assert totals["peers lost"] > 20
    assert totals["replayed, unit tokens"] > 0
    assert totals["sessions begun"] >= totals["sessions done"] + total(result.measures, "sessions failed") + running
    assert totals["sessions done"] > 0.8 * totals["sessions begun"]
    assert all(peer.sessions >= 0 for peer in result.world.peers)


def test_a_lost_peers_cache_is_filled_again_by_another():
    """Session at rest on peers 0 and 1; peer 1 dies, peer 2 holds the same: it computes every position again."""
    network = scenario([40.0, 80.0, 40.0], delay_s=0.001)
    spans = [Span(0, 4), Span(4, 8), Span(4, 8)]
    trace = [Change(60.0, 1, False)]
    result = run(network, model(8), settings(0.05, 100.0, new_tokens=100_000), spans=spans, trace=trace)
    totals = result.measures.totals
    assert totals["lost, unit tokens"] == totals["replayed, unit tokens"] > 0
    assert result.world.peers[2].busy_s > 0


def test_without_a_holder_sessions_wait_and_in_the_end_fail():
    trace = [Change(30.0, 1, False)]
    result = run(scenario([40.0, 40.0]), model(8), settings(0.2, 300.0), spans=HALVES, trace=trace)
    assert total(result.measures, "waits for a route") > 0
    assert total(result.measures, "sessions failed") > 0


def test_a_full_cache_sends_sessions_elsewhere_or_lets_them_wait():
    network = scenario([40.0, 40.0], memory_bytes=600 * MB)  # 8 units of 20 MB, and 112 MB of cache for 35 tokens each
    few = SwarmSettings(cache_tokens=100)
    result = run(network, model(8, hidden=200_000), settings(1.0, 200.0, swarm=few), spans=[Span(0, 8)] * 2)
    assert total(result.measures, "busy answers") > 0
    assert total(result.measures, "sessions done") > 0
    assert all(peer.cache_free_bytes >= 0 for peer in result.world.peers)


def test_the_gap_of_a_dead_peer_is_filled_by_one_that_moves():
    network = scenario([40.0] * 4, memory_bytes=300 * MB)
    spans_wanted = SwarmSettings(cache_tokens=100)
    result = run(network, model(8), settings(0.05, 200.0, swarm=spans_wanted), trace=[Change(20.0, 0, False)])
    held = {unit for peer in result.world.by_id.values() if peer.serves for unit in range(*peer.span)}
    assert held == set(range(8))


def test_flows_agree_with_what_is_followed_token_by_token(monkeypatch):
    network = scenario([200.0, 100.0, 150.0, 120.0, 80.0, 200.0], memory_bytes=250 * MB)
    wanted = settings(1.5, 300.0, new_tokens=60)
    exact = run(network, model(8), wanted)
    monkeypatch.setattr(serving, "EXACT_PEERS", 0)
    fluid = run(network, model(8), wanted)
    for name in ("between tokens, s", "session, s", "first token, s"):
        means = [sum(r.measures.values[name]) / len(r.measures.values[name]) for r in (exact, fluid)]
        assert means[1] == pytest.approx(means[0], rel=0.25), name
    assert total(fluid.measures, "tokens") == pytest.approx(total(exact.measures, "tokens"), rel=0.05)
    assert fluid.world.utilisation() == pytest.approx(exact.world.utilisation(), rel=0.25)


def test_a_large_swarm_is_followed_by_sessions():
    result = run(scenario([40.0, 80.0]), model(8), settings(0.0, 60.0, churn=10.0), peers=400)
    assert total(result.measures, "sessions done") > 20
    assert result.events < 20_000
    assert total(result.measures, "peers lost") > 20
