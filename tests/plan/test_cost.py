import numpy as np
import pytest

from swarmnode.plan.cost import step_s, sustained_units_per_s, transfer_s
from swarmnode.plan.routes.routing import find_route
from swarmnode.plan.spans.span_placement import Joiner, reconsider
from swarmnode.plan.view import PeerView, Span, View


def test_a_message_takes_its_delay_and_its_bytes():
    measured_s, unmeasured_s = transfer_s(1_000_000, np.full(2, 0.02), np.array([8e6, 0.0]))
    assert measured_s == pytest.approx(1.02)
    assert unmeasured_s == 0.02


def test_a_fast_card_behind_a_slow_line_is_a_slow_peer():
    assert sustained_units_per_s(1000, 10, 16_384, 0, 0) == 1000
    assert sustained_units_per_s(1000, 10, 16_384, 1e6, 1e9) == pytest.approx(10 * 1e6 / (8 * 16_384))
    assert sustained_units_per_s(1000, 10, 16_384, 1e9, 1e6) == pytest.approx(10 * 1e6 / (8 * 16_384))
    assert sustained_units_per_s(5, 10, 16_384, 1e6, 1e6) == 5, "a slow card keeps up with it"


def test_a_step_of_one_microbatch_is_all_bubble():
    assert step_s([1, 2], [0.5], beat_s=2, microbatches=1, averaging_s=0.25) == 4.25
    assert step_s([1, 2], [0.5], beat_s=2, microbatches=9, averaging_s=0.25) == 4.25 + 8 * 2


def test_placement_helps_the_peer_whose_line_is_slow():
    """a and b are alike but for a's line; c, who doubles b, is worth more beside a."""
    a, b, c = (
        PeerView(name, span, decode_units_per_s=100) for name, span in zip("abc", [(0, 2), (2, 4), (2, 4)], strict=True)
    )
    a, b, c = (PeerView(p.peer, Span(*p.span), p.state, 100, up_bps=bps) for p, bps in ((a, 1e5), (b, 1e9), (c, 1e9)))
    d = PeerView("d", Span(0, 2), decode_units_per_s=100, up_bps=1e5)
    view = View(4, (a, b, c, d))
    assert reconsider(view, Joiner("c", 2, 100, 0)) is None, "by speed alone both halves are alike"
    slow = View(4, view.peers, position_bytes=10_000)
    assert reconsider(slow, Joiner("c", 2, 100, 0)).span.start < 2


def test_a_route_makes_a_detour_around_a_slow_line():
    near = PeerView("near", Span(0, 2), decode_units_per_s=100, up_bps=1e6)
    far = PeerView("far", Span(0, 2), decode_units_per_s=100, up_bps=1e9)
    end = PeerView("end", Span(2, 4), decode_units_per_s=100, up_bps=1e9)
    rtts = {("near", "end"): 0.01, ("far", "end"): 0.05}
    light = View(4, (near, far, end), rtts, position_bytes=100)
    heavy = View(4, (near, far, end), rtts, position_bytes=16_384)
    assert [hop.peer for hop in find_route(light).hops] == ["near", "end"]
    assert [hop.peer for hop in find_route(heavy).hops] == ["far", "end"], "16 KiB take 131 ms of a 1 Mbit/s line"
