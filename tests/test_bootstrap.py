"""The bootstrap peer's decisions; that it opens the door is tested in tests/real."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.bootstrap import _bootstraps, _keep
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.swarmfile import load_swarm, new_swarm, save_swarm
from tests.swarm.records.test_manifest import make_manifest

HERE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWdoor"
THERE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWdoor"


def test_an_invite_leads_to_this_machine_only_where_the_swarm_is_on_it() -> None:
    assert _bootstraps([HERE, THERE]) == [THERE]
    assert _bootstraps([HERE]) == [HERE]


def test_new_doors_are_kept_where_the_file_may_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    swarm = new_swarm(encode_manifest(make_manifest()))
    path = tmp_path / "friends.swarm"
    save_swarm(swarm, path)
    with caplog.at_level(logging.WARNING):
        _keep(replace(swarm, bootstraps=(THERE,)), path)
        assert load_swarm(path).bootstraps == (THERE,) and not caplog.records
        _keep(replace(swarm, bootstraps=(HERE,)), tmp_path / "read-only" / "friends.swarm")
    [warning] = caplog.records
    assert "cannot write" in warning.message and "later invites do not know this bootstrap peer" in warning.message
