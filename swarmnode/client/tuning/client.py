"""Owner of an adapter: joins a swarm that serves a model, and has its machines tune the adapter on the owner's data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path

from swarmnode.client.observer import SwarmObserver
from swarmnode.client.training.listener import Listener
from swarmnode.client.tuning.job import TunedAdapter, TuneSettings, TuningJob, check_tunes
from swarmnode.client.tuning.plan import TuningPlan
from swarmnode.codec.tensors import check_compression, codec_named
from swarmnode.codec.tuning_messages import TUNE_PROTOCOL
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import family_of
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.targets import check_targets
from swarmnode.counting import counted
from swarmnode.errors import PeerError, UsageError
from swarmnode.net.addressing.addresses import without_peer
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining
from swarmnode.peer.local_peer import board_of
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.directory_router import DirectoryRouter
from swarmnode.swarm.peers.standing import EVERYBODY, Trust
from swarmnode.swarm.records.certificate import Role
from swarmnode.swarm.records.invite import MAX_BOOTSTRAPS
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.averaging import SharedRun, VectorLayout
from swarmnode.tuning.client.follower import Ticket, TuningFollower
from swarmnode.tuning.client.leader import TuningLeader
from swarmnode.tuning.client.remote_gradients import RemoteGradients
from swarmnode.tuning.client.route_opener import AdapterRequest, SwarmRoutes
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.weights.weights import Weights


class TuningClient(SwarmObserver):
    """Client that has a swarm tune adapters. Create it with `join`, end it with `close`."""

    def __init__(self, host: Host, trust: Trust, patience_s: float) -> None:
        super().__init__(host)
        self._trust = trust
        self._patience_s = patience_s
        self._weights = Weights(host)
        self._board = board_of(host, TUNE_PROTOCOL, on_peer_lost=self._suspect)

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

    async def gradients(self, recipe: AdapterRecipe, *, rows: int, positions: int, compress: str) -> RemoteGradients:
        """Return a function that has the swarm compute losses and gradients of an adapter, whose weights stay with the caller.

        Microbatches have at most `rows` rows of `positions` tokens. Raises UsageError if the model cannot have the adapter.
        """
        check_tunes(self.manifest)
        check_compression(compress, self.manifest.codecs)
        self._host.check_welcome(Role.CLIENT)
        folder = await self._weights.small_files()
        family = await asyncio.to_thread(lambda: family_of(load_config(folder / CONFIG_FILE)))
        await asyncio.to_thread(check_targets, family, recipe)
        shapes = await asyncio.to_thread(StateShapes.of, family, recipe)
        request = AdapterRequest.of(recipe, (rows, positions + recipe.prompt_positions), 1, compress)
        return RemoteGradients(self._routes(request, shapes, lambda _why, _missing: None))

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
        self, request: AdapterRequest, shapes: StateShapes, on_waiting: Callable[[str, tuple[int, ...]], None]
    ) -> SwarmRoutes:
        units = self.manifest.model.units
        router = DirectoryRouter(self._host, units, Span(0, units), ring=False, trust=self._trust)
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
        """Return the peers that do not lend themselves to tuning."""
        return {peer for peer, told in self._host.directory.peers().items() if not told.tune_percent}

    def _suspect(self, error: PeerError) -> None:
        if error.peer is not None:
            self._host.directory.suspect(error.peer, error.code.name)
