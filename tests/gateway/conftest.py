"""A gateway over a swarm in virtual time, and the clients that ask it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.access.keys import KeyRing
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway, GatewayConfig
from swarmnode.gateway.page.page import Page
from swarmnode.metrics import table
from tests.gateway.in_process import InProcess
from tests.gateway.speaking import save_speaking_llama
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm, sees_ready

MODEL = "virtual"
WHOLE = {"a": "0:4"}
HALVES = {"a": "0:2", "b": "2:4"}
FREED_S = 1.0  # after which nobody holds what nobody reads


@pytest.fixture(scope="session")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """Of a swarm whose model speaks."""
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking_llama(folder)
    return Founded.on(folder, tmp_path_factory.mktemp("founded"))


def found_on(model: Path, folder: Path) -> Founded:
    """As `Founded.on`, where a loop runs already."""
    folder.mkdir()
    swarm = VirtualSwarm(folder)
    swarm.create(model)
    return Founded(swarm.file)


@dataclass(frozen=True)
class Served:
    """A swarm, its gateway, and three who ask: swarmnode's client, HTTP, and OpenAI's."""

    swarm: VirtualSwarm
    client: SwarmClient
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    page: Page

    def sessions(self) -> int:
        """That the nodes hold."""
        return self._sum(table.SESSIONS)

    async def freed(self) -> bool:
        """Whether within a second no node holds a session."""
        await asyncio.sleep(FREED_S)
        return self.sessions() == 0

    def computed(self) -> int:
        """Positions that the nodes have computed."""
        return self._sum(table.TOKENS)

    def _sum(self, metric: Any) -> int:
        nodes = [member.node for member in self.swarm.members.values() if not member.over]
        return sum(int(one.value) for node in nodes for one in node.readings() if one.metric is metric)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(
    founded: Founded,
    folder: Path,
    *,
    nodes: Mapping[str, str] = WHOLE,
    stage: Mapping[str, Any] | None = None,
    keys: KeyRing | None = None,
    api_key: str = "none",
    patience_s: float = 60.0,
    **config: Any,
) -> AsyncIterator[Served]:
    """A gateway over a swarm of these nodes; `config` are GatewayConfig's fields, `stage` `VirtualSwarm.node`'s."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in nodes.items():
            swarm.node(name, span, **(stage or {}))
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client(patience_s=patience_s) as client:
            await sees_ready(client, len(nodes))
            home = folder / "page"
            gateway = Gateway({MODEL: client}, keys, GatewayConfig(**config), home=home)
            page = Page(gateway, home)
            app = build_app(gateway, page)
            async with (
                gateway.loading(),
                httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=None) as http,
            ):
                caller = openai.AsyncOpenAI(
                    api_key=api_key, base_url="http://localhost/v1", http_client=http, max_retries=0
                )
                yield Served(swarm, client, http, caller, page)
