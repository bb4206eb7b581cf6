"""Peers in homes behind NAT serve one another and somebody on the internet: through punched holes, and over the doors' relays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.net.identity import Identity
from tests.real.forked import ForkedSwarm
from tests.real.nat_lab import ABSENT_DOOR, DOORS, VISITOR, NatLab, lacking, reaches
from tests.tiny import PROMPT, TinyModel

SPANS = {"one": "0:3", "two": "3:6"}
PATIENCE_S = 300.0
LONG_PROMPT = PROMPT * 25
HIDDEN_STATES_BYTES = len(LONG_PROMPT) * 64 * 2  # of a prompt between the homes: 64 wide, two bytes each at least


@pytest.fixture(scope="module", autouse=True)
def networks() -> None:
    """Skip where none can be built."""
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)


def found(local: LocalSwarm, lab: NatLab, model: Path) -> str:
    """A private swarm with four doors on the internet; an invite."""
    local.environment["SWARMNODE_OWNER_PASSWORD"] = "secret"
    local.create(model, "--listen", f"/ip4/{DOORS[0]}/tcp/4001", membership="private")
    for door in DOORS:
        more = () if door == DOORS[0] else ("--host-maddr", f"/ip4/{door}/tcp/4001")
        local.bootstrap(*more, inside=lab.inside("doors"))
    return local.command("invite", str(local.file), "--uses", "0").strip()


def generate(local: LocalSwarm, lab: NatLab, invite: str) -> list[int]:
    """What somebody on the internet gets, who knows the homes' peers by the doors alone."""
    prompt = ",".join(map(str, LONG_PROMPT))
    options = ("--ids", prompt, "-n", "8", "--json", "--patience", "60")
    return list(json.loads(local.command("generate", invite, *options, inside=lab.inside("visitor")))["ids"])


def watch(local: LocalSwarm, lab: NatLab) -> NodeProcess:
    """What `swarmnode status --watch` shows to somebody on the internet."""
    return local.start("watch", ["status", str(local.file), "--json", "--watch"], lab.inside("visitor"))


def shown(how: str, seen: NodeProcess) -> None:
    """Wait until the status shows that both homes are reached that way."""
    seen.wait_until(
        lambda picture: [peer["reached"] for peer in picture["peers"]] == [how] * len(SPANS), f"{how} peers", PATIENCE_S
    )


def test_homes_meet_through_holes_and_go_on_over_relays(tiny: TinyModel, tmp_path: Path) -> None:
    expected = tiny.alone(LONG_PROMPT, 8)
    with NatLab(list(SPANS)) as lab, ForkedSwarm(tmp_path) as local:
        invite = found(local, lab, tiny.folder)
        absent = f"/ip4/{ABSENT_DOOR}/tcp/4001/p2p/{Identity.generate().peer_id}"  # delays nobody
        nodes = [
            local.node(home, "--span", span, "--peer", absent, swarm=invite, inside=lab.inside(home))
            for home, span in SPANS.items()
        ]
        for node in nodes:
            node.wait_for("ready")
        started_s = time.monotonic()
        while not all(lab.direct_bytes(home) for home in SPANS):  # they mostly meet before they are ready
            assert time.monotonic() - started_s < PATIENCE_S, "no hole was punched"
            assert generate(local, lab, invite) == expected
        before = lab.direct_bytes("two")
        assert generate(local, lab, invite) == expected
        assert lab.direct_bytes("two") - before > HIDDEN_STATES_BYTES, "the hole carries the session"
        seen = watch(local, lab)
        shown("punched", seen)

        lab.bar()
        before = lab.direct_bytes("two")
        assert generate(local, lab, invite) == expected
        assert lab.direct_bytes("two") == before, "relays carried it"
        seen.seen.clear()
        shown("relayed", seen)


def test_a_host_behind_a_router_that_maps_ports_is_reached_by_the_line_that_it_prints(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """`host --nat` at home, the router between, and a friend on the internet who types the line: tokens come, over no relay."""
    with NatLab(["one"]) as lab, ForkedSwarm(tmp_path) as local:
        outside = lab.map_ports("one")
        name = ("--name", str(tmp_path / "friends"))
        host = local.start("host", ["host", str(tiny.folder), "--nat", "--json", *name], inside=lab.inside("one"))
        told = host.wait_for("hosting")
        assert str(next(iter(told["addresses"]))).startswith(f"/ip4/{outside}/"), "the router's address comes first"
        invite = str(told["invite"])
        host.wait_for("ready")
        assert generate(local, lab, invite) == tiny.alone(LONG_PROMPT, 8)


def test_the_lab_lets_nobody_in() -> None:
    """Else the test above would show nothing."""
    with NatLab(list(SPANS)) as lab:
        visitor, one, two = lab.inside("visitor"), lab.inside("one"), lab.inside("two")
        assert reaches(one, visitor, VISITOR)
        assert not reaches(visitor, one, "192.168.16.2")
        assert not reaches(visitor, one, "5.5.5.16")
        assert not reaches(two, one, "5.5.5.16")
        assert not reaches(two, lab.inside("one-router"), "5.5.5.16")
        lab.bar()
        assert not reaches(one, visitor, VISITOR)
        assert reaches(one, lab.inside("doors"), DOORS[0])


LAB = """
import sys
from tests.real.nat_lab import NatLab
with NatLab(["one"]) as lab:
    print(*lab.holders.values(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_killed_leaves_nothing(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LAB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        holders = [Path("/proc", pid, "ns", "net") for pid in lab.stdout.readline().split()]
        assert len(holders) == 5 and all(holder.exists() for holder in holders)
        lab.send_signal(how)
    deadline_s = time.monotonic() + PATIENCE_S
    while any(holder.exists() for holder in holders):
        assert time.monotonic() < deadline_s, "a namespace outlives the lab"
