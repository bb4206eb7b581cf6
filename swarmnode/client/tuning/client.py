"""Owner of an adapter: joins a swarm that serves a model, and has its machines tune the adapter on the owner's data."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.client.observer import SwarmObserver
from swarmnode.client.training.client import Listener
from swarmnode.client.tuning.tuning_job import TunedAdapter, TuneSettings, TuningJob, TuningPlan, check_tunes
from swarmnode.codec.tensors import check_compression, codec_named
from swarmnode.codec.tuning_messages import TUNE_PROTOCOL
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.training.adapters.adapter_recipe import NO_METHOD, AdapterRecipe
from swarmnode.compute.training.adapters.held_ends import HeldEnds
from swarmnode.compute.training.adapters.layers import check_targets
from swarmnode.compute.training.adapters.saved_folder import load_adapter, recipe_of
from swarmnode.counting import counted
from swarmnode.errors import UsageError
from swarmnode.ledger import Account
from swarmnode.net.addressing.addresses import without_peer
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining
from swarmnode.peer.questions import board_of
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.router import DirectoryRouter
from swarmnode.swarm.records.announcement import EVERYBODY, State, Trust
from swarmnode.swarm.records.invite import MAX_BOOTSTRAPS, Role
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.adapter_averaging import SharedRun, VectorLayout
from swarmnode.tuning.client.follower import Ticket, TuningFollower
from swarmnode.tuning.client.leader import TuningLeader
from swarmnode.tuning.client.remote_layers import RemoteLayers
from swarmnode.tuning.client.route_opener import AdapterRequest, SwarmRoutes
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.weights.weights import Weights


@dataclass(frozen=True)
class ModuleSettings:
    """Settings of a model that trains in Python.

    Args:
        recipe: Recipe of the adapter.
        holds_ends: Whether the embedding and the head run in this process.
        rows: Most rows of a batch.
        positions: Most tokens of a row.
        window: Most forward passes that wait for their backward pass.
        compress: Codec of activations and gradients between machines.
    """

    recipe: AdapterRecipe
    holds_ends: bool = True
    rows: int = 8
    positions: int = 512
    window: int = 4
    compress: str = "none"

    def check(self) -> None:
        """Raise UsageError if nothing would train, or no pass could wait for its backward pass."""
        if self.window < 1:
            raise UsageError(f"a window of {self.window}: at least one forward pass waits for its backward pass")
        if self.recipe.method == NO_METHOD and not self.holds_ends:
            raise UsageError("without an adapter and with the ends in the swarm nothing would train: give an adapter")


@dataclass(frozen=True)
class ModuleParts:
    """Parts of a model that trains in Python: the swarm's layers, and the ends if they are here.

    `weights` are those to begin with; None for the start of the recipe. `base` is the name of the swarm.
    """

    settings: ModuleSettings
    family: Family
    layers: RemoteLayers
    ends: HeldEnds | None
    base: str
    weights: Mapping[str, Tensor] | None = None

    @property
    def positions(self) -> int:
        """Most tokens of a row: as asked for, and no more than the model's table of positions has."""
        limit = None if self.ends is None else self.ends.front.position_limit
        asked = self.settings.positions
        return asked if limit is None else min(asked, limit - self.settings.recipe.prompt_positions)


def chosen_adapter(adapter: Any) -> tuple[AdapterRecipe, Mapping[str, Tensor] | None]:
    """Return an adapter's recipe, and its weights if it was trained before.

    Args:
        adapter: AdapterRecipe or its fields, peft's config or its fields, a folder that peft saved, or "" or None for no adapter.

    Raises:
        UsageError: If it is none of these, or cannot be trained in a swarm.
        CheckpointError: If the folder is damaged.
    """
    if isinstance(adapter, AdapterRecipe):
        return adapter, None
    if not adapter:
        return AdapterRecipe(method=NO_METHOD), None
    if isinstance(adapter, str | os.PathLike):
        folder = Path(adapter)
        if not folder.is_dir():
            raise UsageError(f"adapter {str(adapter)[:64]!r}: to train it further give the folder that it was saved in")
        return load_adapter(folder)
    fields = dict(adapter.to_dict() if hasattr(adapter, "to_dict") else adapter)
    if "peft_type" in fields:
        return recipe_of(fields, "adapter"), None
    if isinstance(fields.get("targets"), list):
        fields["targets"] = tuple(fields["targets"])
    try:
        return AdapterRecipe(**fields), None
    except TypeError as error:
        raise UsageError(f"adapter: {str(error).removeprefix('AdapterRecipe.__init__() ')}") from None


class TuningClient(SwarmObserver):
    """Client that has a swarm tune adapters. Create it with `join`, end it with `close`."""

    def __init__(self, host: Host, trust: Trust, patience_s: float) -> None:
        super().__init__(host)
        self._trust = trust
        self._patience_s = patience_s
        self._weights = Weights(host)
        self._board = board_of(host, TUNE_PROTOCOL, on_peer_lost=host.lost_neighbour)
        self._ends = host.link_config.ledger.count(Account.WEIGHTS)  # of models that train in Python

    @classmethod
    async def join(
        cls,
        swarm: Swarm,
        home: Path,
        *,
        patience_s: float = 60.0,
        trust: Trust = EVERYBODY,
        platform: Platform = MACHINE,
    ) -> TuningClient:
        """Join the swarm as a client. Raises NetworkDown, NotAdmitted, UsageError if the swarm serves no language model."""
        async with joining(swarm, home, patience_s=patience_s, platform=platform) as host:
            await host.manifest(patience_s=patience_s)
            self = cls(host, trust, patience_s)
            check_tunes(self.manifest)
        return self

    async def close(self) -> None:
        """Leave the swarm."""
        await self.leave()
        await self._host.close()

    async def leave(self) -> None:
        """End all tunings, but stay in the swarm."""
        await self._board.close()
        await self._weights.close()
        self._ends.release()

    async def module_parts(self, settings: ModuleSettings, weights: Mapping[str, Tensor] | None = None) -> ModuleParts:
        """Return the parts of a model that trains in Python, whose adapter begins with `weights` if there are any.

        Raises UsageError if the model cannot have the adapter, NoRoute or CheckpointError if its ends cannot be fetched.
        """
        settings.check()
        check_tunes(self.manifest)
        check_compression(settings.compress, self.manifest.codecs)
        self._host.check_welcome(Role.CLIENT)
        recipe, ledger = settings.recipe, self._host.link_config.ledger
        folder = await self._weights.small_files()
        family = await asyncio.to_thread(lambda: family_of(load_config(folder / CONFIG_FILE)))
        await asyncio.to_thread(check_targets, family, recipe)
        shapes = await asyncio.to_thread(StateShapes.of, family, recipe)
        if weights is not None:
            shapes.check_weights(weights)
        size = (settings.rows, settings.positions + recipe.prompt_positions)
        request = AdapterRequest.of(recipe, size, settings.window + 1, settings.compress)
        ends = None
        if settings.holds_ends:
            ends = await asyncio.to_thread(HeldEnds.load, await self._weights.ends(), recipe)
            self._ends.count(self._ends.size_bytes + ends.weight_bytes)
        span = Span(1, family.units - 1) if ends is not None else Span(0, family.units)
        routes = self._routes(request, shapes, lambda _why, _missing: None, span)
        units = {unit: shapes.units[unit] for unit in range(span.start, span.end)}
        layers = RemoteLayers(routes, units, settings.window, ledger)
        return ModuleParts(settings, family, layers, ends, self.manifest.name, weights)

    async def tune(
        self,
        settings: TuneSettings,
        listener: Listener,
        stop: asyncio.Event,
        on_plan: Callable[[TuningPlan], None] = lambda _plan: None,
        on_news: Callable[[str], None] = lambda _line: None,
    ) -> TunedAdapter:
        """Tune an adapter until its run is over or `stop` is set, and write it to the output folder at the end.

        A checkpoint beside the folder is continued, and removed at the end. `on_plan` gets the plan of each route, and `on_news`
        lines about other trainers, a leader's ticket among them.

        Raises UsageError if data, settings and model do not fit, NotFinite, NoRoute or Busy if the swarm cannot tune, LeaderLost if
        the leader of the trainers goes.
        """
        settings.check()
        check_compression(settings.compress, self.manifest.codecs)
        self._host.check_welcome(Role.CLIENT)
        folder = await self._weights.small_files()
        async with AsyncExitStack() as ends:
            follower = await self._follow(settings.ticket, ends) if settings.ticket else None
            if follower is not None:
                settings = settings.as_led(follower.recipe, follower.averaging.run)
            job = await asyncio.to_thread(TuningJob.prepare, self.swarm, self.manifest, folder, settings)
            shapes = await asyncio.to_thread(StateShapes.of, job.family, settings.recipe)
            leader = await self._lead(job, shapes, on_news, ends) if settings.trainers else None
            if follower is not None:
                follower.layout = VectorLayout.of(shapes)
            request = AdapterRequest.of(settings.recipe, job.size, settings.window, settings.compress)
            routes = self._routes(request, shapes, listener.waiting)
            peers, clock = self._host.directory.peers, self._host.clock.monotonic
            return await self._host.supervisor.watch(
                job.run_on(routes, listener, stop, on_plan, peers, clock, follower or leader)
            )

    async def _follow(self, text: str, ends: AsyncExitStack) -> TuningFollower:
        """Join the leader that gave the ticket. Raises UsageError if it is of another swarm or damaged, LeaderLost."""
        ticket = Ticket.read(text)
        if ticket.swarm != self.swarm.id:
            raise UsageError("this ticket is for a tuning in another swarm: name that swarm")
        follower = await TuningFollower.join(self._host, ticket)
        ends.push_async_callback(follower.close)
        return follower

    async def _lead(
        self, job: TuningJob, shapes: StateShapes, on_news: Callable[[str], None], ends: AsyncExitStack
    ) -> TuningLeader:
        """Open a tuning to other trainers, and tell the ticket."""
        settings = job.settings
        leader = TuningLeader(
            self._host,
            settings.recipe,
            SharedRun(job.run, settings.average_every, codec_named(settings.average_codec)),
            VectorLayout.of(shapes),
            trainers=settings.trainers,
            on_change=lambda count: on_news(f"{counted(count, 'trainer')} of this adapter"),
        )
        ends.push_async_callback(leader.close)
        await leader.start()
        addresses = [without_peer(address) for address in await self._host.network.addresses()][:MAX_BOOTSTRAPS]
        ticket = Ticket(self.swarm.id, self.peer_id, tuple(addresses), leader.adapter, leader.secret)
        on_news(f"Others join with: --join {ticket.as_text()}")
        return leader

    async def founded(self) -> Path:
        """Return a folder with all files that the swarm was founded with."""
        return await self._weights.everything()

    def _routes(
        self,
        request: AdapterRequest,
        shapes: StateShapes,
        on_waiting: Callable[[str, tuple[int, ...]], None],
        span: Span | None = None,
    ) -> SwarmRoutes:
        """Return the routes through the layers of `span`, by default all."""
        units = self.manifest.model.units
        router = DirectoryRouter(self._host, units, span or Span(0, units), ring=False, trust=self._trust)
        return SwarmRoutes(
            self._board,
            router,
            request,
            shapes,
            cannot_tune=self._cannot_tune,
            on_waiting=on_waiting,
            clock=self._host.clock.monotonic,
            patience_s=self._patience_s,
        )

    def _cannot_tune(self) -> Collection[PeerId]:
        """Return the peers that are ready and do not lend themselves to tuning."""
        peers = self._host.directory.peers().items()
        return {peer for peer, told in peers if told.life is State.READY and told.span[1] and not told.tune_percent}
