"""Adapters of a stage: loaded for the first session that asks, and kept in memory until the memory is needed.

An adapter in use stays. Of the others the least recently used goes first, as soon as another adapter or the caches of a
session find no room. A new adapter also displaces sessions kept for another text, as a new session does. All replicas
of the stage have the same adapters, so a session may be opened at any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, CheckpointError, ErrorCode, LocalError, PeerError, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.plan.view import Span

if TYPE_CHECKING:
    from swarmnode.compute.model.adapters.adapter_file import AdapterFile
    from swarmnode.serving.worker import Worker
    from swarmnode.weights.adapter_files import AdapterFiles

FAILED_S = 30.0  # a failed load is not tried again for this time

Place = tuple["Worker", MemoryLedger]
"""Part of the stage: its worker, and the memory ledger of its device."""


@dataclass
class _Held:
    """An adapter in memory, and the keys of the sessions that use it."""

    memory: Sequence[Reservation]
    users: set[int] = field(default_factory=set)


@dataclass(eq=False)
class StageAdapters:
    """Adapters of one stage, from `bring` to `close`. Used on the event loop. `files` is None in a swarm without
    adapters."""

    files: AdapterFiles | None
    places: Sequence[Place]
    config: ServerConfig
    _: KW_ONLY
    on_crash: OnCrash

    def __post_init__(self) -> None:
        self._held: dict[str, _Held] = {}  # the least recently used first
        self.free_cache: Callable[[], bool] = lambda: False  # frees a session kept for another text, if any
        self._tasks = Tasks("adapters", on_crash=self.on_crash)
        self._loading: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<StageAdapters: {', '.join(self._held) or 'none'} of {self.files!r}>"

    def __contains__(self, name: str) -> bool:
        """Return whether the adapter is loaded."""
        return name in self._held

    async def bring(self, name: str) -> None:
        """Load an adapter, if it is not here yet.

        Raises ProtocolError if the swarm has no adapter of that name, or it cannot be fetched or used; Busy if it is
        still loading after `adapter_s` or there is no memory for it.
        """
        if self.files is None or name not in self.files:
            raise ProtocolError("the swarm has no such adapter", code=ErrorCode.INVALID_REQUEST)
        if name in self._held:
            return
        if name not in self._loading:
            self._loading[name] = self._tasks.spawn(self._load(self.files, name), f"load {name}", awaited=True)
            self._loading[name].add_done_callback(partial(self._loaded, name))
        loading = self._loading[name]
        await asyncio.wait([loading], timeout=self.config.adapter_s)
        if not loading.done():
            raise Busy("the adapter is still being fetched", retry_s=self.config.retry_s)
        try:
            loading.result()
        except Full as error:
            raise Busy(str(error), retry_s=self.config.retry_s) from error
        except CheckpointError as error:
            raise ProtocolError(f"the adapter cannot be used: {error}", code=ErrorCode.INVALID_REQUEST) from error
        except (PeerError, LocalError) as error:
            raise ProtocolError(f"the adapter could not be fetched: {error}", code=ErrorCode.NOT_FOUND) from error

    async def _load(self, files: AdapterFiles, name: str) -> None:
        spans = [worker.runner.span for worker, _ in self.places]
        file = await files.bring(name, Span(min(span.start for span in spans), max(span.end for span in spans)))
        memory = await self._reserve(file)
        try:
            for worker, _ in self.places:
                span = worker.runner.span
                where, kind, units = span.device, span.dtype, (span.start, span.end)
                loras = await asyncio.to_thread(file.load, span.family, span.model, *units, device=where, dtype=kind)
                await worker.call("load an adapter", partial(span.adapters.add, name, loras))
        except BaseException:
            self._let_go(name, memory)
            raise
        self._held[name] = _Held(memory)

    def _loaded(self, name: str, task: asyncio.Task[None]) -> None:
        """Forget a finished load. A failure is kept for FAILED_S, so that requests in that time get the same error."""
        if task.cancelled() or task.exception() is None:
            del self._loading[name]
        else:
            asyncio.get_running_loop().call_later(FAILED_S, self._loading.pop, name, None)

    async def _reserve(self, file: AdapterFile) -> list[Reservation]:
        """Reserve memory on each device. Raises Full if there is none even without unused adapters and unused caches."""
        with contextlib.ExitStack() as undo:
            memory: list[Reservation] = []
            for worker, ledger in self.places:
                span = worker.runner.span
                size_bytes = file.bytes_of(span.family, span.start, span.end, span.dtype)
                memory.append(undo.enter_context(await self._room(worker, ledger, size_bytes)))
            undo.pop_all()
        return memory

    async def _room(self, worker: Worker, ledger: MemoryLedger, size_bytes: int) -> Reservation:
        while True:
            try:
                return ledger.reserve(Account.ADAPTERS, size_bytes)
            except Full:
                if not self.make_room() and not self.free_cache():
                    raise
                await worker.call("give memory back", lambda: None)  # wait: the compute thread frees the cache first

    # -- sessions

    def use(self, name: str, key: int) -> None:
        """Note that the session with this key uses the loaded adapter `name`, or none ("")."""
        if not name:
            return
        held = self._held[name] = self._held.pop(name)
        held.users.add(key)

    def leave(self, key: int) -> None:
        """Record that the session `key` has ended and uses no adapter any more."""
        for held in self._held.values():
            held.users.discard(key)

    def make_room(self) -> bool:
        """Drop the unused adapter that was used least recently. Returns False if all are in use."""
        name = next((name for name, held in self._held.items() if not held.users), None)
        if name is None:
            return False
        self._let_go(name, self._held.pop(name).memory)
        return True

    def _let_go(self, name: str, memory: Sequence[Reservation]) -> None:
        """Remove an adapter from the spans, before any later job is computed, and free its memory."""
        for worker, _ in self.places:
            worker.call("let an adapter go", partial(worker.runner.span.adapters.remove, name))
        for reservation in memory:
            reservation.release()

    async def close(self) -> None:
        """Stop loading, and give the memory back. The adapters themselves go with the stage's spans."""
        await self._tasks.close()
        for held in self._held.values():
            for reservation in held.memory:
                reservation.release()
        self._held.clear()
