"""The network as a map and as a matrix, with a plan drawn in."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.simulate.results.result_page import (
    MOST,
    Machines,
    coordinates,
    network_map,
    network_matrix,
    planned_machines,
)
from tests.simulate.results.page_parser import ParsedPage


def places(*sizes: int, names: tuple[str, ...] = ("Ohio", "Tokyo", "Rome")) -> Scenario:
    """So many devices at each of some places, whose numbers are mixed: 1 Gbit/s and 1 ms inside, 50 Mbit/s and 80 ms between."""
    place = np.random.default_rng(0).permutation(np.repeat(range(len(sizes)), sizes))
    inside = place[:, None] == place
    unknown = (None,) * len(place)
    regions = tuple(names[number] for number in place)
    delay_s, bandwidth_bps = np.where(inside, 0.001, 0.08), np.where(inside, 1e9, 5e7)
    return Scenario("places", regions, delay_s, bandwidth_bps, unknown, unknown, unknown)


def planned(network: Scenario, pipelines: int, stages: int) -> Machines:
    """A grid that takes devices as they come."""
    grid = np.arange(pipelines * stages).reshape(pipelines, stages).tolist()
    held = [[row[stage] for row in grid] for stage in range(stages)]
    return planned_machines(network, held, [f"units {stage} <&" for stage in range(stages)], grid).shown()


def drawn(machines: Machines) -> tuple[ParsedPage, ParsedPage]:
    return ParsedPage(network_map(machines, "hops")), ParsedPage(network_matrix(machines, "hops"))


@pytest.mark.parametrize("sizes, pipelines, stages", [((4, 4), 2, 4), ((32, 20, 12), 8, 8), ((2, 3), 1, 5)])
def test_every_machine_and_every_hop_is_drawn(sizes: tuple[int, ...], pipelines: int, stages: int) -> None:
    machines = planned(places(*sizes), pipelines, stages)
    in_map, in_matrix = drawn(machines)
    assert len(in_map.all("circle")) == sum(sizes)
    hops = pipelines * (stages - 1)
    assert len(in_map.all("line")) == len(in_matrix.all("circle")) == hops
    frames = [frame for frame in in_matrix.all("rect") if frame["fill"] == "none"]
    assert len(frames) == len(sizes), "each place is a cluster, however its devices are numbered"
    assert {"Ohio", "Tokyo"} <= set(in_map.words)


def test_machines_do_not_lie_upon_one_another_and_are_inside_the_picture() -> None:
    in_map, _ = drawn(planned(places(32, 20, 12), 8, 8))
    circles = np.array([[float(circle[name] or 0) for name in ("cx", "cy", "r")] for circle in in_map.all("circle")])
    apart = np.hypot(*(circles[:, None, :2] - circles[None, :, :2]).transpose(2, 0, 1)) + 1e3 * np.eye(len(circles))
    assert apart.min() > 1.2 * circles[:, 2].max()
    _, _, width, height = map(float, str(in_map.all("svg")[0]["viewbox"]).split())
    assert (circles[:, :2] > circles[:, 2:]).all() and (circles[:, :2] < [width, height] - circles[:, 2:]).all()


def test_names_of_strangers_are_text() -> None:
    evil = ("</svg><script>", "\"'&", "x" * 100)
    for parsed in drawn(planned(places(3, 2, 1, names=evil), 2, 3)):
        assert "script" not in dict(parsed.seen)
        assert any("</svg><script>" in words for words in parsed.words)


def test_points_in_a_plane_are_found_again() -> None:
    points_N2 = np.random.default_rng(1).random((9, 2))
    distances_NN = np.hypot(*(points_N2[:, None] - points_N2[None]).transpose(2, 0, 1))
    found_N2 = coordinates(distances_NN)
    assert np.hypot(*(found_N2[:, None] - found_N2[None]).transpose(2, 0, 1)) == pytest.approx(distances_NN)


def test_where_nothing_is_far_from_anything_there_is_no_map() -> None:
    assert network_map(planned(places(6), 2, 3), "hops") == ""
    assert network_map(planned(places(1), 1, 1), "hops") == ""
    ParsedPage(network_matrix(planned(places(1), 1, 1), "hops"))


def test_of_very_many_machines_some_are_drawn_those_that_work_first() -> None:
    network = places(700, 500)
    few = planned(network, 10, 4)
    assert len(few.names) == MOST and sum(role >= 0 for role in few.roles) == 40
    assert len(planned(network, 300, 4).names) <= MOST
