"""Peers in homes behind NAT serve one another and somebody on the internet: through a punched hole, or over the door's relay."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from swarmnode.localswarm import LocalSwarm
from tests.real.conftest import PROMPT, TinyModel
from tests.real.nat_lab import DOORS, PUBLIC, NatLab, lacking, reaches

PATIENCE_S = 60.0
REASON = lacking()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(
        "SWARMNODE_NAT" not in os.environ, reason="builds networks and takes minutes: set SWARMNODE_NAT=1"
    ),
    pytest.mark.timeout(300),
]


def generate(local: LocalSwarm, lab: NatLab, invite: str) -> list[int]:
    """What somebody on the internet gets, who knows both homes' peers by the door alone."""
    prompt = ",".join(map(str, PROMPT))
    options = ("--ids", prompt, "-n", "8", "--json", "--patience", "60")
    return list(json.loads(local.command("generate", invite, *options, inside=lab.inside("internet")))["ids"])


def addresses(local: LocalSwarm, lab: NatLab, peer: str) -> list[str]:
    status = local.command("status", str(local.file), "--json", inside=lab.inside("internet"))
    return list(json.loads(status)["addresses"].get(peer, []))


@pytest.mark.parametrize("punchable", [True, False], ids=["hole punching", "relay"])
def test_a_private_swarm_over_two_homes(tiny: TinyModel, tmp_path: Path, punchable: bool) -> None:
    with NatLab(["one", "two"], punchable=punchable) as lab, LocalSwarm(tmp_path) as local:
        local.environment["SWARMNODE_OWNER_PASSWORD"] = "secret"
        local.create(tiny.folder, "--private", "--listen", f"/ip4/{DOORS[0]}/tcp/4001")
        local.bootstrap(inside=lab.inside("internet"))
        for door in DOORS[1:] if punchable else ():
            local.bootstrap("--host-maddr", f"/ip4/{door}/tcp/4001", inside=lab.inside("internet"))
        invite = local.command("invite", str(local.file)).strip()
        nodes = [
            local.node(home, "--span", span, swarm=invite, inside=lab.inside(home))
            for home, span in (("one", "0:3"), ("two", "3:6"))
        ]
        for node in nodes:
            node.wait_for("ready")
        started_s = time.monotonic()
        while not all(any("p2p-circuit" in at for at in addresses(local, lab, node.peer)) for node in nodes):
            assert time.monotonic() - started_s < PATIENCE_S, "no relay took them in"
        expected = tiny.alone(PROMPT, 8)
        assert generate(local, lab, invite) == expected
        if not punchable:
            assert [lab.direct_bytes(home) for home in ("one", "two")] == [0, 0], "the relay carried it"
            return
        while not all(lab.direct_bytes(home) for home in ("one", "two")):
            assert time.monotonic() - started_s < 2 * PATIENCE_S, "no hole was punched"
            assert generate(local, lab, invite) == expected


def test_the_lab_lets_nobody_in() -> None:
    """Else the tests above would show nothing."""
    with NatLab(["one", "two"]) as lab:
        assert reaches(lab.inside("one"), lab.inside("internet"), DOORS[0])
        assert not reaches(lab.inside("internet"), lab.inside("one"), "192.168.10.2")
        assert not reaches(lab.inside("two"), lab.inside("onerouter"), f"{PUBLIC}.10")
    assert not any(Path("/var/run/netns").glob(f"sn{os.getpid()}*"))
