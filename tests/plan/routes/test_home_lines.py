"""Lines that the peers of a home share."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.plan.routes.delays import HELD_S, HomeLines, shared_homes, sharing_lines
from swarmnode.plan.view import PeerView, Span, View


def test_a_line_of_a_home_is_as_fast_as_it_was_while_its_paths_share_it() -> None:
    now_s, names = [0.0], ["ada", "bob", "cyd"]
    lines = HomeLines(lambda: now_s[0])
    inside, out = ("ada", "bob"), ("ada", "cyd")

    def held(out_bps: float, homes: Sequence[str] = ("one", "one", "")) -> dict[tuple[str, str], float]:
        peers = [PeerView(name, Span(0, 2), home=home) for name, home in zip(names, homes, strict=True)]
        return dict(lines.held(View(2, tuple(peers), path_bps={inside: 1e9, out: out_bps}), peers).path_bps)

    assert held(8e6) == {inside: 1e9, out: 8e6}
    now_s[0] = HELD_S - 1
    assert held(2e6) == {inside: 1e9, out: 8e6}, "all at once each get a quarter; what was never measured is not there"
    now_s[0] = HELD_S + 1
    assert held(2e6)[out] == 2e6, "it has become slower"
    assert held(1e6, ("", "", ""))[out] == 1e6, "nobody is known to share a line"


def test_paths_of_a_home_with_several_share_its_line() -> None:
    homes = shared_homes(["one", "one", "two"])
    assert homes == (0, 0, 2)
    assert sharing_lines(homes, 3).tolist() == [[False, False, True], [False, False, True], [True, True, False]]
    assert shared_homes(["one", "two"]) == () and not sharing_lines((), 2).any()
