"""Grammars are compiled beside the loop, in memory that is there, and nobody waits for one for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, ProtocolError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.serving.served_adapters import Grammars

WORD = Grammar(GrammarKind.REGEX, "hens?")
TOKENIZER_BYTES = 1000
MATCHER: GrammarMatcher = object()  # type: ignore[assignment]  # nobody looks into it here


class Compiler:
    """Loads its tokenizer when it is let to, or finds none."""

    tokenizer_bytes = TOKENIZER_BYTES

    def __init__(self, *, has_tokenizer: bool = True) -> None:
        self.loaded = False
        self.compiled = 0
        self.let = threading.Event()
        self._has_tokenizer = has_tokenizer

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        self.let.wait()
        if not self._has_tokenizer:
            raise ProtocolError("no tokenizer", code=ErrorCode.INVALID_REQUEST)
        self.loaded = True
        self.compiled += 1
        return MATCHER


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.let.set()


async def test_the_first_one_brings_the_tokenizer_and_the_others_wait_for_it(compiler: Compiler) -> None:
    ledger = MemoryLedger()
    grammars = Grammars(compiler, ledger, ServerConfig())
    assert ledger.used_bytes == 0
    asking = [asyncio.create_task(grammars.compile(WORD)) for _ in range(3)]
    await asyncio.sleep(0)
    assert ledger.accounts()[Account.TOKENIZER] == TOKENIZER_BYTES and not any(task.done() for task in asking)
    compiler.let.set()
    assert await asyncio.gather(*asking) == [MATCHER] * 3
    assert ledger.used_bytes == TOKENIZER_BYTES, "once, and for good"
    grammars.close()
    assert ledger.used_bytes == 0


async def test_without_room_nothing_is_loaded(compiler: Compiler) -> None:
    grammars = Grammars(compiler, MemoryLedger(TOKENIZER_BYTES - 1), ServerConfig())
    with pytest.raises(Busy):
        await grammars.compile(WORD)
    compiler.let.set()
    grammars.close()
    assert compiler.compiled == 0


async def test_one_that_hangs_is_waited_for_until_its_deadline_and_too_many_are_refused(compiler: Compiler) -> None:
    grammars = Grammars(compiler, MemoryLedger(), ServerConfig(compile_s=0.01, max_compiling=2))
    answers = await asyncio.gather(*(grammars.compile(WORD) for _ in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == [
        "a grammar was not compiled in time",
        "a grammar was not compiled in time",
        "too many grammars wait to be compiled",
    ]
    with pytest.raises(Busy, match="too many"):  # the thread has not done them yet
        await grammars.compile(WORD)
    compiler.let.set()
    grammars.close()


async def test_where_there_is_no_tokenizer_its_memory_is_given_back() -> None:
    compiler, ledger = Compiler(has_tokenizer=False), MemoryLedger()
    compiler.let.set()
    grammars = Grammars(compiler, ledger, ServerConfig())
    with pytest.raises(ProtocolError, match="no tokenizer"):
        await grammars.compile(WORD)
    assert ledger.used_bytes == 0
    grammars.close()
