"""Why a node does what it does, as it tells its owner: from what was decided on, when it was decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import NoRoute
from swarmnode.lending.lending import LendingState
from swarmnode.plan.view import Span
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_faults import two_by_two
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT


def told(explained: dict[str, Any], topic: str) -> str:
    """All sentences about a topic."""
    decisions = [one for one in explained["decisions"] if one["topic"] == topic]
    return "; ".join(text for one in decisions for text in (one["what"], *one["facts"]))


@in_virtual_time
async def test_what_was_decided_is_told_with_its_facts(founded: Founded, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        result = await client.generate(PROMPT, max_new_tokens=2)
        member = swarm.member(result.route[0].peer)
        node, start = member.node, result.route[0].start
        session = node.why(result.trace)
        assert "takes a session" in told(session, "admission") and "MB of cache are free" in told(session, "admission")
        assert "fixed with --span" in told(node.why(str(start)), "placement")
        assert f"unit {start} is held by 2 peers, or about to be" in client.why(str(start))["facts"]
        node.lending.pause("a film")
        await node.lending.until(LendingState.PAUSED)
        assert "a film" in told(node.why(), "lending") and node.why()["facts"][0].startswith("it is paused")
        everybody = frozenset(one.peer for one in swarm.members.values())
        with pytest.raises(NoRoute):
            client._router(Span(0, client.units), ring=True).route(everybody, ())
        assert "finds no route" in told(client.why(), "routing")


@in_virtual_time
async def test_a_route_and_a_place_are_explained(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        member = swarm.node("a")
        assert member.node.why() == {"facts": [], "decisions": []}
        await member.wait_for("ready")
        assert "takes layers" in told(member.node.why(), "placement")
        async with swarm.client() as client:
            routing = told(client.why(), "routing")
            assert "takes a route" in routing and member.peer[-8:] in routing and "layers/s" in routing
            assert client.why("a")["facts"][0].startswith("it is ready")
            assert "no peer holds unit 99" in client.why("99")["facts"]
            assert client.why("nobody") == {"facts": [], "decisions": []}
