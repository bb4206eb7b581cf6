"""Owner of an adapter: joins a swarm that serves a model, and has its machines tune the adapter on the owner's data."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from swarmnode.checkpoints.export import check_free
from swarmnode.client.observer import SwarmObserver
from swarmnode.client.training.listener import Listener
from swarmnode.client.training.preparation import prepare_text
from swarmnode.client.tuning.plan import TuningPlan, plan_of
from swarmnode.codec.body import SESSION_ID_BYTES
from swarmnode.codec.tensors import Codec, check_compression
from swarmnode.codec.tuning_messages import TUNE_PROTOCOL
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.targets import check_targets
from swarmnode.compute.training.datasets.batches import Batches
from swarmnode.data.rules import DataRules
from swarmnode.errors import PeerError, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining
from swarmnode.peer.local_peer import board_of
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.client.directory_router import DirectoryRouter
from swarmnode.swarm.peers.standing import EVERYBODY, Trust
from swarmnode.swarm.records.certificate import Role
from swarmnode.swarm.records.manifest import CAUSAL_LM, SERVE, Manifest
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.tuning.client.route_opener import AdapterRequest, SwarmRoutes
from swarmnode.tuning.client.saved_tuning import SavedTuning
from swarmnode.tuning.client.tuned_route import AdapterState
from swarmnode.tuning.client.tuner import AdapterRoute, AdapterTuner
from swarmnode.weights.weights import Weights


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a tuning. `run` counts steps and sizes and has the learning rate; `window` microbatches are in flight at once."""

    data: Path
    recipe: AdapterRecipe
    run: Run
    rules: DataRules
    out: Path
    window: int = 4
    compress: str = "none"  # of values between hops
    force: bool = False

    def check(self) -> None:
        """Raise UsageError if the output folder holds something else."""
        check_free(self.out, force=self.force)

    @property
    def state_file(self) -> Path:
        """File of the last checkpoint, beside the output folder."""
        return self.out.with_name(f"{self.out.name}.tuning")


@dataclass(frozen=True)
class TunedAdapter:
    """Result of a tuning: the number of steps that are done, and how many were computed again after faults."""

    steps: int
    rewinds: int
    steps_lost: int


def check_tunes(manifest: Manifest) -> None:
    """Raise UsageError if the swarm serves no language model."""
    if manifest.kind != CAUSAL_LM or manifest.mode != SERVE:
        raise UsageError(
            f"the swarm {manifest.name} serves no language model: adapters are tuned in a swarm that serves one; to train all "
            "weights use `swarmnode train`"
        )


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
        await self._board.close()
        await self._weights.close()
        await self._host.close()

    async def tune(
        self, settings: TuneSettings, listener: Listener, stop: asyncio.Event, on_plan: Callable[[TuningPlan], None]
    ) -> TunedAdapter:
        """Tune an adapter until its run is over or `stop` is set, and write it to the output folder.

        A checkpoint beside the folder is continued, and removed at the end. `on_plan` gets the plan of each route.

        Raises UsageError if data, settings and model do not fit, NotFinite, NoRoute or Busy if the swarm cannot tune.
        """
        settings.check()
        check_compression(settings.compress, self.manifest.codecs)
        self._host.check_welcome(Role.CLIENT)
        folder = await self._weights.small_files()
        run, batches = await asyncio.to_thread(prepared, self.manifest, folder, settings)
        saved = SavedTuning(settings.state_file, self._host.swarm.id, settings.recipe, run)
        state = await asyncio.to_thread(saved.load)
        listener.begun(run, batches.summary(run))
        tuner = AdapterTuner(
            self._routes(settings, run, listener),
            settings.recipe,
            run,
            batches,
            on_step=listener.step,
            on_open=self._planned(settings, run, on_plan),
            on_state=lambda state: asyncio.to_thread(saved.save, state),
            clock=self._host.clock.monotonic,
            state=state,
        )
        steps = await self._host.supervisor.watch(tuner.tune(stop))
        if steps == run.steps and tuner.state is not None:
            await asyncio.to_thread(write_out, self.manifest, folder, settings, tuner.state)
            settings.state_file.unlink(missing_ok=True)
        return TunedAdapter(steps, tuner.rewinds, tuner.steps_lost)

    def _routes(self, settings: TuneSettings, run: Run, listener: Listener) -> SwarmRoutes:
        extra = settings.recipe.prompt_tokens if settings.recipe.method == "prompt" else 0
        request = AdapterRequest(
            secrets.token_bytes(SESSION_ID_BYTES),
            encode_recipe(settings.recipe),
            rows=run.microbatch,
            positions=run.sequence + extra,
            window=settings.window,
            codec=Codec.NONE if settings.compress in ("none", "auto") else Codec[settings.compress.upper()],
        )
        units = self.manifest.model.units
        router = DirectoryRouter(self._host, units, Span(0, units), ring=False, trust=self._trust)
        return SwarmRoutes(
            self._board,
            router,
            request,
            cannot_tune=self._cannot_tune,
            on_waiting=listener.waiting,
            clock=self._host.clock.monotonic,
            patience_s=self._patience_s,
        )

    def _cannot_tune(self) -> Collection[PeerId]:
        """Return the peers that do not lend themselves to tuning."""
        return {peer for peer, told in self._host.directory.peers().items() if not told.tune_percent}

    def _planned(self, settings: TuneSettings, run: Run, on_plan: Callable[[TuningPlan], None]) -> Callable[[AdapterRoute], None]:
        """Return a function that describes each route as it is opened."""

        def opened(route: AdapterRoute) -> None:
            on_plan(plan_of(settings.recipe, run, route.sizes, self._host.directory.peers(), window=settings.window))

        return opened

    def _suspect(self, error: PeerError) -> None:
        if error.peer is not None:
            self._host.directory.suspect(error.peer, error.code.name)
