"""A gateway: the models that it serves, and whom it serves them to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from fastapi import Request

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey, KeyRing
from swarmnode.gateway.config import GatewayConfig
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.served_model import ServedModel, TokenizerLoader
from swarmnode.net.tasks import Tasks


class Gateway:
    """`clients` are the swarms by the names under which they are served. `swarms` are their models; `models` are these and those
    that adapters make of them."""

    def __init__(
        self,
        clients: Mapping[str, SwarmClient],
        keys: KeyRing | None = None,
        config: GatewayConfig = GatewayConfig(),
    ) -> None:
        self.config = config
        self.keys = keys or KeyRing()
        self.queue = FairQueue(running=config.running, waiting=config.waiting, wait_s=config.wait_s)
        self._tasks = Tasks("gateway", on_crash=None)
        served = [
            model
            for name, client in clients.items()
            for model in _models(name, client, self.queue, config, self._tasks)
        ]
        self.swarms = {model.name: model for model in served if model.parent is None}
        self.models = {model.name: model for model in served} | self.swarms  # should one be called as another's adapter

    def __repr__(self) -> str:
        return f"<Gateway to {', '.join(self.models)}, {self.queue!r}>"

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Load what requests need, in the background; what is under way when the context ends is given up."""
        for name, model in self.swarms.items():
            self._tasks.spawn(model.loader.load(), f"loading of {name}")
        try:
            yield
        finally:
            await self._tasks.close()

    def model(self, name: str) -> ServedModel:
        """The model of that name; that of the only swarm where none is said. Raises ApiError."""
        if not name and len(self.swarms) == 1:
            return next(iter(self.swarms.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            sentence = f"there is no model {name!r} here; there is {known}"
            if not name:
                sentence = f"no model is named, and there are several here: {known}"
            raise ApiError(404, sentence, code="model_not_found", parameter="model")
        return self.models[name]


def _models(name: str, client: SwarmClient, queue: FairQueue, config: GatewayConfig, tasks: Tasks) -> list[ServedModel]:
    """Of one swarm: its model, and what each of its adapters makes of that."""
    loader = TokenizerLoader(client, tasks)
    adapters = [
        ServedModel(f"{name}:{adapter}", client, loader, queue, config, adapter=adapter, parent=name)
        for adapter in client.manifest.adapter_names
    ]
    return [ServedModel(name, client, loader, queue, config), *adapters]


def gateway_of(request: Request) -> Gateway:
    """Whose request it is."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def key_of(request: Request) -> ApiKey:
    """Who asks, as the guard has found."""
    key = request.state.key
    assert isinstance(key, ApiKey)
    return key
