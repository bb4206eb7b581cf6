"""The bootstrap peer's decisions; that it opens the door is tested in tests/real."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.node.bootstrap import NAT_S, _is_gone, _mapped, _update_invites
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.swarmfile import load_swarm, new_swarm, save_swarm
from tests.net.virtual import in_virtual_time
from tests.swarm.records.test_manifest import make_manifest

HERE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWdoor"
THERE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWdoor"


@pytest.mark.parametrize(("addresses", "named"), [([HERE, THERE], THERE), ([HERE], HERE)])
async def test_an_invite_leads_to_this_machine_only_where_the_swarm_is_on_it(addresses: list[str], named: str) -> None:
    host = behind_router([])
    host.swarm = replace(host.swarm, bootstraps=())
    _update_invites(host, None, addresses)
    assert host.swarm.bootstraps == (named,)


def test_another_port_of_an_interface_that_is_still_there_is_gone() -> None:
    other, lan = HERE.replace("4001", "4002"), "/ip4/192.168.0.7/tcp/4002/p2p/12D3KooWdoor"
    assert _is_gone(HERE, [other]) and _is_gone(HERE, [lan, other])
    assert not _is_gone(HERE, [HERE, other]), "it is there"
    assert not _is_gone(HERE, [lan]), "on an interface that may come back"
    assert not _is_gone(HERE, [other.replace("door", "else")]), "of another peer"
    assert not _is_gone(MAPPED, [MAPPED.replace("4001", "4002")]), "a router's"


async def test_new_doors_are_kept_where_the_file_may_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = new_swarm(encode_manifest(make_manifest()))
    path = tmp_path / "friends.swarm"
    save_swarm(swarm, path)
    host = behind_router([])
    host.swarm = replace(swarm, bootstraps=())
    with caplog.at_level(logging.WARNING):
        _update_invites(host, path, [THERE])
        assert load_swarm(path).bootstraps == (THERE,) and not caplog.records
        _update_invites(host, tmp_path / "read-only" / "friends.swarm", [THERE, THERE.replace("door", "else")])
    [warning] = caplog.records
    assert (
        "cannot write" in warning.message and "invites made later will not name this bootstrap peer" in warning.message
    )


MAPPED = "/ip4/5.5.5.16/tcp/4001/p2p/12D3KooWdoor"


def behind_router(*seen: list[str]) -> Any:
    """A host that asks its router for a port, and what libp2p tells of its addresses, look for look."""
    looks = list(seen)

    async def addresses() -> list[str]:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    return SimpleNamespace(
        network=SimpleNamespace(addresses=addresses),
        config=SimpleNamespace(nat_port_map=True),
        clock=SimpleNamespace(monotonic=asyncio.get_running_loop().time),
        swarm=replace(new_swarm(encode_manifest(make_manifest())), bootstraps=("/ip4/192.168.0.7/tcp/4001",)),
    )


@in_virtual_time
async def test_the_address_that_a_router_maps_is_the_first_of_the_invite() -> None:
    host = behind_router([HERE], [HERE], [HERE, MAPPED])
    _update_invites(host, None, await _mapped(host))
    assert host.swarm.bootstraps[0] == MAPPED and "/ip4/192.168.0.7/tcp/4001" in host.swarm.bootstraps


@in_virtual_time
async def test_a_router_that_maps_nothing_is_not_waited_for_longer() -> None:
    began_s = asyncio.get_running_loop().time()
    assert await _mapped(behind_router([HERE])) == [HERE]
    assert asyncio.get_running_loop().time() - began_s <= NAT_S + 1
