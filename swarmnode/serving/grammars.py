"""Grammars of the sessions whose tokens are drawn here: compiled on a thread, with a tokenizer that only grammars need."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from swarmnode.codec.sampling import Grammar
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, ProtocolError
from swarmnode.ledger import Account, MemoryLedger, Reservation


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
