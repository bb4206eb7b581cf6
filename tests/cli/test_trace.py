"""`swarmnode why trace`: what is refused, and how a timeline looks to people and to scripts."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from rich.table import Table

from swarmnode.cli.lend.why import hops_table, timeline_json, tokens_table
from swarmnode.codec.measuring_messages import DraftCount, Trace, TraceStep
from swarmnode.codec.messages import ProposerKind
from swarmnode.measuring.meters import by_proposer
from swarmnode.measuring.trace import Timeline
from tests.cli.command import assert_clear, invoke

ALICE, BOB = "12D3KooWaliceALICE", "12D3KooWbobbbBOB"
ID = "5f2a61c09be34d17a8f0c2d94be17763"


def timeline(late_us: int = 0, slow_us: int = 0) -> Timeline:
    """Two hops of 10 and 20 ms with 5 ms between them either way; token 8 is slow at Bob's, or late on its way there."""
    alice, bob = [TraceStep(5, 5, 0, 0, 9_000, 9_000, 1)], [TraceStep(5, 5, 0, 0, 9_000, 9_000, 1)]
    for number in range(6):
        later_us = (late_us + slow_us) * (number > 2)
        came_us = 40_000 * (number + 1) + later_us
        alice.append(TraceStep(6 + number, 1, came_us, 0, 10_000, 10_000, 1))
        was_late_us, was_slow_us = late_us * (number == 2), slow_us * (number == 2)
        bob.append(
            TraceStep(6 + number, 1, came_us + was_late_us, 1_000, 19_000 + was_slow_us, 20_000 + was_slow_us, 2)
        )
    drafts = DraftCount(ProposerKind.MODEL, 4, 1), DraftCount(ProposerKind.LOOKUP, 2), DraftCount(99, 0, 3)
    return Timeline({BOB: Trace(3, 6, tuple(bob)), ALICE: Trace(0, 3, tuple(alice), drafts)})


def rows(table: Table) -> list[list[str]]:
    """The cells of a table as it is printed, without its head."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if line[0] == "│"]


@pytest.mark.parametrize("session", ["5f2a", ID + "00", "x" * 32, ""])
def test_an_id_that_is_none(session: str) -> None:
    assert_clear(invoke("why", "trace", "x.swarm", session), 2, "32 hex digits")


def test_a_slow_hop_is_read_off() -> None:
    slow = timeline(slow_us=100_000)
    assert rows(hops_table(slow)) == [
        ["iceALICE", "0:3", "6", "0.0 / 0.0", "10.0 / 10.0", "1 / 1"],
        ["bobbbBOB", "3:6", "6", "1.0 / 1.0", "19.0 / 119.0", "2 / 2"],
    ]
    assert rows(tokens_table(slow.slowest(1))) == [
        ["8", "140.0", "1.0", "129.0", "0.0", "10.0", "computed at bobbbBOB: 119.0 ms"]
    ]


def test_a_slow_link_is_read_off() -> None:
    ((*figures, where),) = rows(tokens_table(timeline(late_us=100_000).slowest(1)))
    assert figures == ["8", "140.0", "1.0", "29.0", "0.0", "110.0"]
    assert where == "on the way, 100.0 ms more than usual from iceALICE to bobbbBOB"


def test_for_scripts() -> None:
    told = json.loads(json.dumps(timeline_json(ID, timeline(slow_us=100_000), 1)))
    assert told["trace"] == ID
    assert [(hop["peer"], hop["span"], hop["tokens"]) for hop in told["hops"]] == [(ALICE, [0, 3], 6), (BOB, [3, 6], 6)]
    assert told["hops"][1]["compute_s"] == {"median": 0.019, "worst": 0.119}
    assert told["hops"][1]["batch"] == {"median": 2, "worst": 2}
    (token,) = told["slowest"]
    assert (token["position"], token["seconds"], token["late"]) == (8, 0.14, None)
    assert {(part["what"], part["peer"]): part["seconds"] for part in token["parts"]} == {
        ("wait", ALICE): 0.0,
        ("compute", ALICE): 0.01,
        ("leave", ALICE): 0.0,
        ("wait", BOB): 0.001,
        ("compute", BOB): 0.119,
        ("leave", BOB): 0.0,
        ("way", None): 0.01,
    }


def test_guesses_are_told_by_proposer() -> None:
    told = {
        "lookup": {"drafted": 2, "accepted": 2, "wasted": 0},
        "model": {"drafted": 5, "accepted": 4, "wasted": 1},
        "other": {"drafted": 3, "accepted": 0, "wasted": 3},
    }
    assert by_proposer(timeline().drafts) == told
    first, last = timeline_json(ID, timeline(), 1)["hops"]
    assert (first["drafts"], last["drafts"]) == (told, {})
