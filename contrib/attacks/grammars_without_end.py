"""A request's grammar is read for minutes or fills the memory, so that no other grammar of a gateway or node is read."""

from __future__ import annotations

import contextlib
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.compute.serving.grammar import GrammarCompiler, check_grammar
from swarmnode.errors import SwarmnodeError
from tests.gateway.speaking import VOCABULARY, save_speaking_llama

VIRTUAL, FAST = False, False
MOST_S, MOST_MIB = 60.0, 400  # of a thread (on a machine that does much else), and of memory
PATTERNS = [f".*{chr(97 + number % 26)}.{{{number}}}b" for number in range(20)]
MULTIPLES = {"type": "integer", "multipleOf": 10_000_019}
GRAMMARS = {
    "multiples": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(MULTIPLES)),
    "multiples in a call": Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": MULTIPLES}, "required": ["a"]})
    ),
    "multiples behind a token": Grammar(GrammarKind.LARK, f"start: <|im_end|> %json {json.dumps(MULTIPLES)}"),
    "patterns": Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"type": "string", "pattern": one} for one in PATTERNS]})
    ),
    "intersection": Grammar(GrammarKind.LARK, 'start: "q" T\nT: /[01]*1[01]{4000}x/ & /[01]*0[01]{3999}x/'),
    "repetitions": Grammar(GrammarKind.REGEX, "(((a{100}){100}){100}){100}"),
}


def reads(use: Callable[[Grammar], object], grammar: Grammar) -> str:
    """Return what is wrong with how a grammar is read, by `use`; empty if nothing is."""

    def read() -> None:
        with contextlib.suppress(SwarmnodeError):
            use(grammar)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    thread = threading.Thread(target=read, daemon=True)
    began_s = time.monotonic()
    thread.start()
    thread.join(MOST_S)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if thread.is_alive():
        return f"no end after {time.monotonic() - began_s:.0f} s"
    return f"{grown} MiB" if grown > MOST_MIB else ""


async def attack() -> Outcome:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        save_speaking_llama(Path(folder))
        compiler = GrammarCompiler(Path(folder), VOCABULARY)
        compiler.compile(Grammar(GrammarKind.REGEX, "a"))
        for name, grammar in GRAMMARS.items():
            for place, use in (("gateway", check_grammar), ("node", compiler.compile)):
                if told := reads(use, grammar):
                    found.append(f"{name} at the {place}: {told}")
    what = f": {', '.join(found)}" if found else ""
    return Outcome(not found, f"{len(found)} of {2 * len(GRAMMARS)} readings were over a bound{what}")


main(__name__, attack, virtual=VIRTUAL)
