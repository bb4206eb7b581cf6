"""Gateway of several swarms: the models that it serves, its API keys and its queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from fastapi import Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey, KeyRing
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.openai.kept_responses import KeptResponses
from swarmnode.gateway.served_model import GatewayConfig, ServedModel, TokenizerLoader
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.records.manifest import GENERATE

ADAPTERS_S = 20.0  # between looks for the adapters that members bring
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
        self.readings: Counter[str] = Counter()  # of kept responses that are read now, by the key's name
        self.keys = keys or KeyRing()
        self.queue = FairQueue(running=config.running, waiting=config.waiting, wait_s=config.wait_s)
        self._tasks = Tasks("gateway", on_crash=None)
        self._is_loading = False
        self.swarms: dict[str, ServedModel] = {}
        self.models: dict[str, ServedModel] = {}
        for name, client in clients.items():
            self.add(name, client)

    def add(self, name: str, client: SwarmClient) -> None:
        """Serve one more swarm under `name`. Its tokenizer is loaded while `loading` lasts."""
        own, *adapters = _models(name, client, self.queue, self.config, self._tasks)
        self.swarms[name] = self.models[name] = own
        self._take(adapters)
        if self._is_loading:
            self._tasks.spawn(own.loader.load(), f"loading of {name}")

    def _take(self, adapters: Iterable[ServedModel]) -> None:
        """Serve these models of adapters. A swarm wins if an adapter's model has its name."""
        self.models |= {model.name: model for model in adapters if model.name not in self.swarms}

    async def follow_adapters(self) -> None:
        """Serve the adapters that members have brought meanwhile, and those that are gone no longer."""
        for name, own in list(self.swarms.items()):
            if own.client.manifest.task != GENERATE:
                continue
            offered = {f"{name}:{adapter}": adapter for adapter in await own.client.adapters.offered()}
            gone = [model.name for model in self.models.values() if model.parent == name and model.name not in offered]
            for model in gone:
                del self.models[model]
            self._take(own.with_adapter(adapter) for model, adapter in offered.items() if model not in self.models)

    async def _follow_adapters(self) -> None:
        while True:
            await self.follow_adapters()
            await asyncio.sleep(ADAPTERS_S)

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Load the swarms' tokenizers in the background while the context lasts, and remove expired responses. Loading that is
        unfinished when the context ends is cancelled."""
        self._is_loading = True
        for name, model in self.swarms.items():
            self._tasks.spawn(model.loader.load(), f"loading of {name}")
        self._tasks.spawn(self._follow_adapters(), "follow adapters")
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
            known = ", ".join(self.models) or "none, because no swarm has been reached yet"
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
    own = ServedModel(name, client, TokenizerLoader(client, tasks), queue, config)
    return [own, *map(own.with_adapter, client.manifest.adapter_names)]


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
