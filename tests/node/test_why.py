"""Why a node does what it does, as it tells its owner: from what was decided on, when it was decided."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swarmnode.decisions import Topic, names_unit
from swarmnode.errors import ErrorCode, NoRoute
from swarmnode.lending.lending import LendingState
from swarmnode.peer.swarm_status import explain
from swarmnode.plan.view import Span
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_faults import two_by_two
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT

NO_WORDS = re.compile(
    rf"\b(?:units?|spans?|quorum|peers?|epoch|hops?|{'|'.join(code.name for code in ErrorCode)})\b", re.ASCII
)


def told(explained: dict[str, Any], topic: str) -> str:
    """All sentences about a topic."""
    decisions = [one for one in explained["decisions"] if one["topic"] == topic]
    return "; ".join(text for one in decisions for text in (one["what"], *one["facts"]))


def assert_plain(explained: dict[str, Any]) -> None:
    """A volunteer understands each sentence: no word of the code, and no code of an error."""
    sentences = [*explained["facts"], *(told(explained, topic.value) for topic in Topic)]
    found = [word for text in sentences for word in NO_WORDS.findall(text.replace("--span", ""))]
    assert not found and sentences, (found, sentences)


@in_virtual_time
async def test_what_was_decided_is_told_with_its_facts(founded: Founded, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        result = await client.generate(PROMPT, max_new_tokens=2)
        member = swarm.member(result.route[0].peer)
        node, start = member.node, result.route[0].start
        session = node.why(result.trace)
        assert "takes a text" in told(session, "admission") and "MB for texts are free" in told(session, "admission")
        assert "fixed with --span" in told(node.why(str(start)), "placement")
        assert f"layer {start} is on 2 machines, or will be soon" in client.why(str(start))["facts"]
        node.lending.pause("a film")
        await node.lending.until(LendingState.PAUSED)
        assert "a film" in told(node.why(), "lending") and node.why()["facts"][0].startswith(
            "it is paused, and had layers"
        )
        everybody = frozenset(one.peer for one in swarm.members.values())
        with pytest.raises(NoRoute):
            client._router(Span(0, client.units), ring=True).route(everybody, ())
        assert "finds no route" in told(client.why(), "routing")
        for explained in (session, node.why(), client.why(), client.why(str(start)), client.why(member.peer)):
            assert_plain(explained)


@in_virtual_time
async def test_a_route_and_a_place_are_explained(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        door = await swarm.bootstrap()
        ends = (door.host.peer_id[-length:] for length in range(1, 8))
        name = next(end for end in ends if not names_unit(end))  # as a short name is the end of some id by chance
        member = swarm.node(name)
        assert member.node.why() == {"facts": [], "decisions": []}
        await member.wait_for("ready")
        assert "takes layers 0 to 5" in told(member.node.why(), "placement")
        async with swarm.client() as client:
            routing = told(client.why(), "routing")
            assert "takes a route" in routing and member.peer[-8:] in routing and "layers/s" in routing
            assert client.why(name)["facts"][0].startswith("it has layers 0 to 5")
            while member.peer not in door.host.directory.peers():
                await client.changed()
            assert "layers 0 to 5" in explain(door.host, name)["facts"][0]
            assert "no machine has layer 99" in client.why("99")["facts"]
            assert_plain(member.node.why())
            assert client.why("nobody") == {"facts": [], "decisions": []}
