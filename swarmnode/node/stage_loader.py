"""Stage loader: loads the weights of a span into a stage that serves or trains it. Crash log: remembers models that ended the
process."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import LocalError, UsageError
from swarmnode.files import read_bounded, write_private
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.node.description import Tell
from swarmnode.plan.view import Span
from swarmnode.serving.stage import Stage
from swarmnode.weights.chunk_server import Seeder

if TYPE_CHECKING:
    from swarmnode.checkpoints.checkpoint_manager import SharedStates
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.measuring.hardware import StageResources
    from swarmnode.serving.serving_stage import ServingStage
    from swarmnode.serving.span_part import RetainedSpan
    from swarmnode.weights.weights import Weights


PROGRESS_S = 15.0
HEAD_PATIENCE_S = 60.0  # for a peer that has the tensors of the layer that guesses beside the head
MOST_CRASHES = 2  # of one model, without a completed pass between them
MAX_LOG_BYTES = 1 << 20
RUN = "== run: "  # begins the log of a process; no line of `faulthandler` begins so
CRASH = re.compile(r"^Fatal Python error: (.+)", re.M)
FRAME = re.compile(r'^  File "(?:.*/)?(.+)", line (\d+) in (.+)', re.M)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageLoader:
    """Loader of a node's layers, one range after another.

    `states` is None unless the swarm trains. `awaits_others` returns whether a new stage should wait until other peers hold the
    layers that they are meant to hold.
    """

    place: StageResources
    seeder: Seeder
    weights: Weights
    states: SharedStates | None
    tell: Tell
    awaits_others: Callable[[], bool]

    async def load(self, span: Span) -> Stage:
        """Fetch the weights of `span`, seed them to other peers from now on, and load them into a stage.

        Raises LocalError, CheckpointError, ExecutorDied.
        """
        checkpoint, swarm = await self._fetch(span), self.place.host.swarm
        if self.weights.cache is not None:
            self.seeder.add_cache(self.weights.cache, (span.start, span.end))
        elif swarm.checkpoint is not None:
            self.seeder.add_folder(swarm.checkpoint, self.weights.verified)
        if swarm.adapters is not None:
            self.seeder.add_adapters(swarm.adapters)
        return await (self._train(checkpoint, span) if self.place.hardware.trains else self._serve(checkpoint, span))

    async def restore(self, retained: RetainedSpan) -> Stage:
        """Return a stage that serves `retained` again: layers whose weights were kept in memory during a pause."""
        from swarmnode.serving.serving_stage import ServingStage

        return await self._with_tuning(await ServingStage.restore(self.place, retained))

    async def _fetch(self, span: Span) -> Checkpoint:
        """Fetch the weights of `span`. Meanwhile prepare the hardware for serving."""
        outline = await self.weights.outline()
        clock = self.place.host.clock.monotonic
        told, told_s = -1, clock()

        def progress(done_bytes: int, total_bytes: int) -> None:
            """Report each tenth of the download, and a slow download every `PROGRESS_S` seconds."""
            nonlocal told, told_s
            tenth = 10 * done_bytes // max(1, total_bytes)
            if tenth > told or clock() - told_s >= PROGRESS_S:
                told, told_s = tenth, clock()
                text = f"Fetching weights: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
                self.tell("fetching", text, done_bytes=done_bytes, total_bytes=total_bytes)

        fetching = asyncio.ensure_future(self.weights.span(span, progress))
        try:
            if not self.place.hardware.trains:
                await asyncio.to_thread(self.place.hardware.prepare, outline, span)
            checkpoint = await fetching
        finally:
            await cancel_and_wait(fetching)
        if copied_bytes := self.weights.copied_bytes:
            text = f"Copied {copied_bytes / 1e6:.0f} MB of the weights from files on this machine"
            self.tell("copied", text, copied_bytes=copied_bytes)
        return checkpoint

    async def _serve(self, checkpoint: Checkpoint, span: Span) -> Stage:
        from swarmnode.compute.graph.serialise import GraphCheckpoint
        from swarmnode.graph_serving.graph_stage import InferenceStage
        from swarmnode.serving.serving_stage import ServingStage

        if isinstance(checkpoint, GraphCheckpoint):
            return await InferenceStage.load(self.place, checkpoint, span)
        place = self.place
        head = place.hardware.head
        # The layer that guesses beside the head may need tensors of the model that this span has not.
        if (
            head is not None
            and span.end == checkpoint.units
            and not await self.weights.tensors(head.tensors(checkpoint), span, HEAD_PATIENCE_S)
        ):
            log.warning("no peer has the model's tensors that --draft-model needs: this node guesses nothing with it")
            place = replace(place, hardware=replace(place.hardware, head=None))
        serving = await ServingStage.load(place, checkpoint, span)
        for cost in serving.costs_of_equal_bits:
            self.tell("equal bits", cost)
        return await self._with_tuning(serving)

    async def _with_tuning(self, serving: ServingStage) -> Stage:
        """Return the stage with a tuning server beside it, if the owner of this node lends a share for tuning."""
        from swarmnode.tuning.server import TuningStage, tune_share

        share = tune_share(self.place.hardware.config.tune_share, self.place.host.swarm.manifest)
        return await TuningStage.beside(self.place, serving, share) if share else serving

    async def _train(self, checkpoint: Checkpoint, span: Span) -> Stage:
        from swarmnode.training.worker.training_worker import TrainingWorker

        assert self.states is not None
        worker = await TrainingWorker.load(self.place, checkpoint, span, self.states, self.awaits_others)
        worker.listen(self.tell)
        return worker


class CrashLog:
    """Log of the fatal signals (SIGABRT, SIGSEGV, SIGFPE, SIGILL, SIGBUS) that ended a node's process before it completed a pass.

    `faulthandler` writes it, and prints nothing then. It does not see Ctrl-C, nor SIGKILL for want of memory. If the process uses
    `faulthandler` already (PYTHONFAULTHANDLER, another node), nothing is written.
    """

    def __init__(self, path: Path, model: str, crashed: list[str]) -> None:
        self._path, self._model, self._crashed = path, model, crashed
        write_private(path, "".join(f"{RUN}{run}" for run in (*crashed, f"{model}\n")).encode(), make_folder=True)
        self._file = path.open("ab", buffering=0)
        faulthandler.enable(self._file, all_threads=False)

    @classmethod
    def start(cls, path: Path, model: str) -> CrashLog | None:
        """Watch this process from now on, and keep what `path` says of earlier ones with the same `model`: one line that names the
        model, its number format and the version. Others are forgotten.

        Returns None if nothing is written. Raises UsageError if `MOST_CRASHES` processes have crashed.
        """
        try:
            runs = (read_bounded(path, MAX_LOG_BYTES) or b"").decode(errors="replace").split(RUN)
        except OSError:
            runs = []
        crashed = [run for run in runs if run.startswith(f"{model}\n") and CRASH.search(run)]
        if len(crashed) >= MOST_CRASHES:
            # The signal, the last thing that the process did before, and the Python function if one is known
            (before, signal, after), frame = CRASH.split(crashed[-1], maxsplit=1), FRAME.search(crashed[-1])
            doing = before.splitlines()[1:] or ["it measured this machine"]
            where = f" in {frame[3]} ({frame[1]}, line {frame[2]})" if frame and after else ""
            raise UsageError(
                f"this model has ended the process {len(crashed)} times before a pass was done: "
                f"{signal}{where}, while {doing[-1]}. "
                "It is not loaded again. Update swarmnode, choose another --device (`run` also takes --products and --dtype), or "
                f"remove {path} to try again, as after an update of the library"
            )
        try:
            return None if faulthandler.is_enabled() else cls(path, model, crashed)
        except (OSError, LocalError) as error:
            log.warning("a crash of this process would not be remembered: %s", error)
            return None

    def record(self, doing: str) -> None:
        """Write down what the process does from now on, in one line. On a full disk nothing is written."""
        with contextlib.suppress(OSError):
            self._file.write(f"{doing}\n".encode())

    def forget(self) -> None:
        """Forget the earlier crashes: this process has computed, or ends as it should."""
        if self._crashed:
            self._crashed = []
            self._file.truncate(0)
            self.record(f"{RUN}{self._model}")

    def close(self) -> None:
        """Watch no longer. Without earlier crashes the file goes."""
        faulthandler.disable()
        self._file.close()
        if not self._crashed:
            with contextlib.suppress(OSError):
                self._path.unlink()
