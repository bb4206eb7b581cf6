"""Common parts of the attacks of this folder.

The script of an attack has

- a docstring, whose first line says what the attacker does and why;
- `async def attack() -> Outcome`, which founds a swarm, attacks it, and returns the result;
- `VIRTUAL`: True if it runs on the in-memory network in virtual time, False if it runs in real time, on loopback only;
- `FAST`: whether the test suite runs it (attacks of a second or two);
- a last line `main(__name__, attack, virtual=VIRTUAL)`, so that the script runs alone.

An outcome gives figures, such as the number of blinded peers or the seconds that others waited. Swarms in virtual time, with
nodes, trainers and clients, come from the tests: `from tests.node.virtual_swarm import VirtualSwarm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from swarmnode.net.memory.virtual_time import run_virtual

sys.path.append(str(Path(__file__).parents[2]))  # swarms in virtual time belong to the tests


@dataclass(frozen=True)
class Outcome:
    """Result of an attack. `held`: the attack had no effect on its victims. `known`: `docs/security.md` says that it succeeds.
    `happened` tells the result in words."""

    held: bool
    happened: str
    known: bool = False

    @property
    def verdict(self) -> str:
        """Verdict in a word or two: "held", "known" or "NOT HELD"."""
        return "held" if self.held else "known" if self.known else "NOT HELD"


AttackFunction = Callable[[], Coroutine[Any, Any, Outcome]]


def perform(attack: AttackFunction, *, virtual: bool) -> Outcome:
    """Run `attack` and return its outcome, in virtual time if `virtual`, else in real time."""
    return run_virtual(attack()) if virtual else uvloop.run(attack())


def main(name: str, attack: AttackFunction, *, virtual: bool) -> None:
    """Run `attack`, print its outcome and exit, with status 1 if it succeeded and is not known. Does nothing if `name` is not
    "__main__"."""
    if name == "__main__":
        outcome = perform(attack, virtual=virtual)
        print(f"{outcome.verdict}: {outcome.happened}")
        sys.exit(not outcome.held and not outcome.known)
