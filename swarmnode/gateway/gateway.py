"""Gateway of several swarms: the models that it serves, its API keys and its queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey, KeyRing
from swarmnode.gateway.config import GatewayConfig
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.openai.kept_responses import KeptResponses
from swarmnode.gateway.served_model import ServedModel, TokenizerLoader
from swarmnode.net.tasks import Tasks

SWEEP_S = 600.0  # between removals of expired responses


class Gateway:
    """Gateway to the swarms in `clients`, which are keyed by the names that the API serves them under. `swarms` are their models by
    name; `models` are these and one more model per adapter. Without a `home` no responses are kept."""

    def __init__(
        self,
        clients: Mapping[str, SwarmClient],
        keys: KeyRing | None = None,
        config: GatewayConfig = GatewayConfig(),
        *,
        home: Path | None = None,
    ) -> None:
        self.config = config
        self.responses = None if home is None else KeptResponses(home)
        self.keys = keys or KeyRing()
        self.queue = FairQueue(running=config.running, waiting=config.waiting, wait_s=config.wait_s)
        self._tasks = Tasks("gateway", on_crash=None)
        served = [
            model
            for name, client in clients.items()
            for model in _models(name, client, self.queue, config, self._tasks)
        ]
        self.swarms = {model.name: model for model in served if model.parent is None}
        self.models = {
            model.name: model for model in served
        } | self.swarms  # a swarm wins if an adapter's model has its name

    def __repr__(self) -> str:
        return f"<Gateway to {', '.join(self.models)}, {self.queue!r}>"

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Load the swarms' tokenizers in the background while the context lasts, and remove expired responses. Loading that is
        unfinished when the context ends is cancelled."""
        for name, model in self.swarms.items():
            self._tasks.spawn(model.loader.load(), f"loading of {name}")
        if self.responses is not None:
            self._tasks.spawn(_sweep(self.responses), "sweep of kept responses")
        try:
            yield
        finally:
            await self._tasks.close()

    def model(self, name: str) -> ServedModel:
        """Return the model called `name`; the only swarm's model if `name` is empty and the gateway has one swarm. Raises ApiError
        (404) if there is no such model, or if `name` is empty and there are several swarms."""
        if not name and len(self.swarms) == 1:
            return next(iter(self.swarms.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            sentence = f"there is no model {name!r} here: choose one of {known}"
            if not name:
                sentence = f"the request names no model: choose one of {known}"
            raise ApiError(404, sentence, code="model_not_found", parameter="model")
        return self.models[name]


async def _sweep(responses: KeptResponses) -> None:
    while True:
        await asyncio.to_thread(responses.sweep)
        await asyncio.sleep(SWEEP_S)


def _models(name: str, client: SwarmClient, queue: FairQueue, config: GatewayConfig, tasks: Tasks) -> list[ServedModel]:
    """Return the model of one swarm, and one model for each of its adapters."""
    loader = TokenizerLoader(client, tasks)
    adapters = [
        ServedModel(f"{name}:{adapter}", client, loader, queue, config, adapter=adapter, parent=name)
        for adapter in client.manifest.adapter_names
    ]
    return [ServedModel(name, client, loader, queue, config), *adapters]


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that received `request`."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def key_of(request: Request) -> ApiKey:
    """Return the API key of `request`, which the guard has put into the request's state."""
    key = request.state.key
    assert isinstance(key, ApiKey)
    return key
