"""What an attack is, and how one is carried out. A script of this folder whose name is that of an attack has

- a docstring, whose first line says what the attacker does, and what for;
- `async def attack() -> Outcome`, which founds the swarm that is attacked, attacks it, and says what came of it;
- `VIRTUAL`: True where it lives on the in-memory network in virtual time, False where it starts p2pd or other processes, on
  loopback only; and `FAST`: whether the suite carries it out (those that take a second or two);
- a last line `main(__name__, attack, virtual=VIRTUAL)`, by which it runs alone, too.

An outcome tells figures: how many were blinded, how long the others waited. Swarms in virtual time, with nodes, trainers and
clients, are those of the tests: `from tests.node.virtual_swarm import VirtualSwarm`.
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
    """What came of an attack. `held`: those who were attacked went on as if it had not been. `known`: it succeeds, as
    `docs/security.md` says."""

    held: bool
    happened: str
    known: bool = False

    @property
    def verdict(self) -> str:
        """In a word."""
        return "held" if self.held else "known" if self.known else "NOT HELD"


AttackFunction = Callable[[], Coroutine[Any, Any, Outcome]]


def perform(attack: AttackFunction, *, virtual: bool) -> Outcome:
    """Carry it out, in virtual time or on this machine's."""
    return run_virtual(attack()) if virtual else uvloop.run(attack())


def main(name: str, attack: AttackFunction, *, virtual: bool) -> None:
    """The last line of every script: does nothing where it is imported."""
    if name == "__main__":
        outcome = perform(attack, virtual=virtual)
        print(f"{outcome.verdict}: {outcome.happened}")
        sys.exit(not outcome.held and not outcome.known)
