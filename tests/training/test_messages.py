"""The table of messages of `docs/training-step.md` is what the code handles."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from swarmnode.codec.body import Body
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import KIND_OF
from swarmnode.codec.training_messages import TRAINING_BODIES, Lead, Work
from swarmnode.plan.training.coordination import Phase
from swarmnode.training import trainer
from swarmnode.training.averaging import all_reduce, partner
from swarmnode.training.coordinator.coordinator import FROM_TRAINERS
from swarmnode.training.coordinator.step_loop import FROM_WORKERS
from swarmnode.training.trainer import FROM_COORDINATOR
from swarmnode.training.worker import microbatch_in_flight
from swarmnode.training.worker.training_stage import COMMANDS, OPENINGS

PAGE = Path(__file__).parents[2] / "docs" / "training-step.md"
IN = {*(phase.name for phase in Phase), "any"}

Way = tuple[str, str, str]
"""Kind, sender, receiver"""


def written() -> list[Way]:
    """The rows of the page, one for each sender and receiver."""
    section = PAGE.read_text().split("## Messages")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    found = []
    for kind, senders, receivers, phases, says in rows[1:]:
        assert set(phases.split(", ")) <= IN and says
        found += [(kind, sender, receiver) for sender in senders.split(", ") for receiver in receivers.split(", ")]
    return found


def names(bodies: Iterable[type[Body]]) -> set[str]:
    """Kinds of bodies, of those that are of trainings alone."""
    return {FrameKind(KIND_OF[body]).name for body in bodies if KIND_OF[body] in TRAINING_BODIES}


def heard_in(module: ModuleType, *functions: str) -> set[str]:
    """Kinds of the bodies that these functions take apart, by the classes that `isinstance` asks for; and that they are given."""
    assert module.__file__ is not None
    classes: Mapping[str, type[Body]] = {body.__name__: body for body in TRAINING_BODIES.values()}
    asked = {
        name.id
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in functions
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance"
        for name in ast.walk(call.args[1])
        if isinstance(name, ast.Name)
    }
    return names(classes[name] for name in asked if name in classes)


HEARD: dict[str, set[str]] = {
    "coordinator": names([Work, *FROM_TRAINERS, *FROM_WORKERS]),
    "trainer": names(FROM_COORDINATOR) | heard_in(trainer, "receive", "receive_last"),
    "worker": names([*OPENINGS, *COMMANDS])
    | heard_in(microbatch_in_flight, "_receive_from_sender", "_receive_from_next")
    | heard_in(partner, "_receive", "_receive_incoming", "_receive_outgoing", "_receive_other")
    | heard_in(all_reduce, "receive"),
}


def test_every_message_of_a_training_is_in_the_table() -> None:
    assert {kind for kind, _, _ in written()} == names(TRAINING_BODIES.values())


def test_what_each_side_hears_is_what_the_table_says() -> None:
    for side, heard in HEARD.items():
        told = {kind for kind, _, receiver in written() if receiver == side}
        if side == "worker":
            told.add("WORK")  # which may come to whoever does not coordinate, and is told who does
        assert heard == told, side


def test_a_coordinators_words_are_its_workers_commands() -> None:
    commands = {kind for kind, sender, receiver in written() if (sender, receiver) == ("coordinator", "worker")}
    assert commands == names([Lead, *COMMANDS])
    assert names(FROM_WORKERS) == {kind for kind, *way in written() if way == ["worker", "coordinator"]}
    assert names([Work, *FROM_TRAINERS]) == {kind for kind, *way in written() if way == ["trainer", "coordinator"]}
