"""Real swarms for tests: every member is a process of its own, with its own p2pd, on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.localswarm import NodeProcess
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.real.forked import ForkedSwarm
from tests.tiny import TinyModel

TIMEOUT_S = 1200  # of a test that hangs: processes take long on a machine that is busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies beside this file as `real`: to be left out with -m "not real"."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("tiny"))


class Stages:
    """Two stages, two replicas each, and a bootstrap peer: kept whole between tests by starting what has died."""

    SPANS: ClassVar = {"a1": "0:3", "a2": "0:3", "b1": "3:6", "b2": "3:6"}

    def __init__(self, local: ForkedSwarm) -> None:
        self.local = local
        self.door = local.bootstrap()
        self.nodes: dict[str, NodeProcess] = {}
        self.heal()

    def heal(self) -> None:
        """Start every node that is not running, and wait until all serve."""
        if self.door.process.poll() is not None:
            self.door = self.local.bootstrap()
        for name, span in self.SPANS.items():
            if name not in self.nodes or self.nodes[name].process.poll() is not None:
                self.nodes[name] = self.local.node(name, "--span", span)
        for member in self.nodes.values():
            member.wait_for("ready")

    def member(self, peer: str) -> NodeProcess:
        """The node with this peer id."""
        return next(member for member in self.nodes.values() if member.peer == peer)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[SwarmClient]:
        """A client that sees all four nodes ready."""
        client = await SwarmClient.join(load_swarm(self.local.file), home=self.local.folder / "client", audit_share=0.0)
        try:
            while sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"]) < 4:
                await client.changed()
            yield client
        finally:
            await client.close()


@pytest.fixture(scope="session")
def running(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with ForkedSwarm(tmp_path_factory.mktemp("swarm")) as local:
        local.create(tiny.folder)
        yield Stages(local)


@pytest.fixture
def stages(running: Stages) -> Stages:
    """The session's swarm, whole again."""
    running.heal()
    return running
