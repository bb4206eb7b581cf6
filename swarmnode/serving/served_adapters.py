"""Adapters of a stage: loaded for the first session that asks, and kept in memory until the memory is needed.

An adapter in use stays. Of the others the least recently used leaves the device first, as soon as another adapter or the
caches of a session find no room. Beside a card it goes into the host's memory, if there is room, and from there it is dropped;
its files stay on the disk. A new adapter also displaces sessions kept for another text, as a new session does. All replicas
of the stage have the same adapters, so a session may be opened at any of them.

Grammars of the sessions whose tokens are drawn here: compiled on a thread, with a tokenizer that only grammars need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from swarmnode.codec.messages import Open
from swarmnode.codec.sampling import Grammar
from swarmnode.compute.model.adapters.span_adapters import Change, moved_to
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, CheckpointError, ErrorCode, LocalError, PeerError, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.plan.view import Span

if TYPE_CHECKING:
    from swarmnode.compute.model.span import ModelSpan
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


@dataclass
class _Parked:
    """An adapter in the host's memory: its matrices, one mapping per part of the stage, their bytes on the devices, and the
    reservation."""

    pages: Sequence[Awaitable[Mapping[str, Change]]]
    sizes: Sequence[int]
    memory: Reservation


@dataclass(eq=False)
class StageAdapters:
    """Adapters of one stage, from `bring` to `close`. Used on the event loop. `files` is None if the model takes none. `host` is
    the ledger of the host's memory, where unused adapters wait before they are dropped."""

    files: AdapterFiles | None
    places: Sequence[Place]
    config: ServerConfig
    _: KW_ONLY
    on_crash: OnCrash
    host: MemoryLedger | None = None

    def __post_init__(self) -> None:
        if self.files is not None:
            self.files.tell(is_used=self.is_used, on_gone=self.expel)
        self.end_sessions: Callable[[str, ErrorCode], None] = lambda _name, _code: None  # of an adapter that must go
        self._held: dict[str, _Held] = {}  # the least recently used first
        self._parked: dict[str, _Parked] = {}  # the one that was parked first comes first
        self.free_cache: Callable[[], bool] = lambda: False  # frees a session kept for another text, if any
        self._tasks = Tasks("adapters", on_crash=self.on_crash)
        self._loading: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<StageAdapters: {', '.join(self._held) or 'none'} of {self.files!r}>"

    def __contains__(self, name: str) -> bool:
        """Return whether the adapter is loaded."""
        return name in self._held

    def admit(self, opened: Open, sender: PeerId) -> None:
        """Check that a session from `sender` may use its adapter, if it names one.

        Raises ProtocolError or Busy if not; see `AdapterFiles.admit`.
        """
        if opened.adapter:
            if self.files is None:
                raise ProtocolError("the model takes no adapters", code=ErrorCode.INVALID_REQUEST)
            self.files.admit(opened, sender)

    def is_used(self, name: str) -> bool:
        """Return whether a session uses the adapter, or waits for it."""
        return name in self._loading or (name in self._held and bool(self._held[name].users))

    def expel(self, name: str, code: ErrorCode) -> None:
        """End the sessions of an adapter with `code`, and free its memory."""
        self.end_sessions(name, code)
        if name in self._held:
            self._let_go(name, self._held.pop(name).memory)
        if name in self._parked:
            self._parked.pop(name).memory.release()

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
        """Load an adapter from the host's memory, else from its files, which are fetched if they are not here.

        Raises ProtocolError (ADAPTER_EXPIRED), and releases its memory, if it expired or was blocked meanwhile; Busy if there is no
        memory, PeerError if nobody has the files, LocalError if the disk is full.
        """
        parked = self._parked.pop(name, None)
        if parked is None:
            spans = [worker.runner.span for worker, _ in self.places]
            units = Span(
                min(span.start for span in spans), max(span.end for span in spans)
            )  # of all parts of the stage
            file = await files.bring(name, units)

            def load(span: ModelSpan) -> Mapping[str, Change]:
                return file.load(span.family, span.model, span.start, span.end, device=span.device, dtype=span.dtype)

            async def changes(_place: int, span: ModelSpan) -> Mapping[str, Change]:
                return await asyncio.to_thread(load, span)

            sizes = [file.bytes_of(span.family, span.start, span.end, span.dtype) for span in spans]
            await self._put(name, await self._reserve(sizes), changes)
        else:
            await self._load_parked(parked, name)
        if name not in files:  # it has expired, or was blocked, meanwhile
            self._let_go(name, self._held.pop(name).memory)
            raise ProtocolError("the adapter is over", code=ErrorCode.ADAPTER_EXPIRED)

    async def _load_parked(self, parked: _Parked, name: str) -> None:
        async def changes(place: int, span: ModelSpan) -> Mapping[str, Change]:
            kept = await parked.pages[place]
            return await asyncio.to_thread(moved_to, kept, span.device)

        try:
            await self._put(name, await self._reserve(parked.sizes), changes)
        finally:
            parked.memory.release()

    async def _put(
        self,
        name: str,
        memory: Sequence[Reservation],
        changes: Callable[[int, ModelSpan], Awaitable[Mapping[str, Change]]],
    ) -> None:
        """Add an adapter to all parts of the stage. `changes` returns its matrices for the part with this number."""
        try:
            for place, (worker, _) in enumerate(self.places):
                span = worker.runner.span
                loras = await changes(place, span)
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

    async def _reserve(self, sizes: Sequence[int]) -> list[Reservation]:
        """Reserve these bytes, one number per part. Raises Full if there is no room even without unused adapters and caches."""
        with contextlib.ExitStack() as undo:
            memory: list[Reservation] = []
            for (worker, ledger), size_bytes in zip(self.places, sizes, strict=True):
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
        """Take the unused adapter that was used least recently off the device. Returns False if all are in use."""
        name = next((name for name, held in self._held.items() if not held.users), None)
        if name is None:
            return False
        held = self._held.pop(name)
        self._park(name, held)
        self._let_go(name, held.memory)
        return True

    def _park(self, name: str, held: _Held) -> None:
        """Copy an adapter into the host's memory, if the device has memory of its own. Adapters that were parked earlier make room;
        without room the adapter stays on the disk alone."""
        if self.host is None or all(ledger is self.host for _, ledger in self.places):
            return
        sizes = [reservation.size_bytes for reservation in held.memory]
        while (memory := self._host_room(sum(sizes))) is None:
            if not self._parked:
                return
            self._parked.pop(next(iter(self._parked))).memory.release()
        spans = [(worker, worker.runner.span) for worker, _ in self.places]
        pages = [worker.call("park an adapter", partial(span.adapters.copied, name)) for worker, span in spans]
        self._parked[name] = _Parked(pages, sizes, memory)

    def _host_room(self, size_bytes: int) -> Reservation | None:
        assert self.host is not None
        with contextlib.suppress(Full):
            return self.host.reserve(Account.ADAPTERS, size_bytes)
        return None

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
        for parked in self._parked.values():
            parked.memory.release()
        self._held.clear()
        self._parked.clear()


class Compiler(Protocol):
    """Compiler of grammars, like `compute.serving.grammar.GrammarCompiler`. Used from one thread."""

    @property
    def loaded(self) -> bool:
        """Whether the compiler's tokenizer is in memory."""

    @property
    def tokenizer_bytes(self) -> int:
        """Bytes of memory that the compiler's tokenizer takes."""

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher for the text of one session. Raises ProtocolError (INVALID_REQUEST) if the grammar is
        invalid."""


class Grammars:
    """Compiler of grammars beside the event loop, with limits.

    The first grammar loads the tokenizer, which takes seconds for a large vocabulary. Its memory is reserved before,
    and sessions without a grammar are not delayed. The compiler has its own thread, so a grammar that hangs delays only
    other grammars. `compiler` is None if no tokens are drawn here or the checkpoint has no tokenizer.
    """

    def __init__(self, compiler: Compiler | None, ledger: MemoryLedger, config: ServerConfig) -> None:
        self._compiler = compiler
        self._ledger = ledger
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarmnode-grammars")
        self._tokenizer: Reservation | None = None
        self._waiting = 0

    async def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar to a matcher for one session.

        Raises ProtocolError (INVALID_REQUEST) if it is invalid or there is no tokenizer. Raises Busy if too many
        grammars wait, there is no memory for the tokenizer, or it is not compiled in time.
        """
        if self._compiler is None:
            raise ProtocolError("this node has no tokenizer, which a grammar needs", code=ErrorCode.INVALID_REQUEST)
        if self._waiting >= self._config.max_compiling:
            raise Busy("too many grammars wait to be compiled", retry_s=self._config.retry_s)
        if self._tokenizer is None:
            self._tokenizer = self._ledger.reserve(Account.TOKENIZER, self._compiler.tokenizer_bytes)
        self._waiting += 1  # until it is compiled, even if its session no longer waits
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compiler.compile, grammar)
        compiling.add_done_callback(partial(self._compiled, self._compiler))
        try:
            return await asyncio.wait_for(asyncio.shield(compiling), self._config.compile_s)
        except asyncio.TimeoutError:
            raise Busy("a grammar was not compiled in time", retry_s=self._config.retry_s) from None

    def _compiled(self, compiler: Compiler, done: asyncio.Future[GrammarMatcher]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # marks the exception as retrieved: the waiting session may be gone
        if not self._waiting and not compiler.loaded:
            self._release()

    def close(self) -> None:
        """Compile nothing more; a grammar that is being compiled is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._release()

    def _release(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.release()
            self._tokenizer = None
