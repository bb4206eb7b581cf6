"""A file that a user is given is nested so deeply that its reader ends with a stack trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.cli.train.recipe import read_recipe
from swarmnode.client.tokenizer import read_config
from swarmnode.errors import SwarmnodeError
from swarmnode.swarm.storage.small_files import VersionedFile, parse_user_file

VIRTUAL, FAST = True, True
BRACKETS = "[" * 10_000 + "]" * 10_000


def breaks(reads: object, text: str) -> bool:
    """Return whether a reader of a file with `text` ends with a stack trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_text(text)
        try:
            reads(path)  # type: ignore[operator]
        except SwarmnodeError:
            return False
        except RecursionError:
            return True
    return False


async def attack() -> Outcome:
    tables = ".".join("a" * 5000)
    tries = [
        (read_recipe, f"x = {BRACKETS}"),
        (read_recipe, f"x = {'{a=' * 5000}1{'}' * 5000}"),
        (read_recipe, f"[{tables}]"),
    ]
    tries.append((read_config, f'{{"a": {BRACKETS}}}'))
    tries.append((lambda path: parse_user_file(path.read_bytes(), VersionedFile, source=path, what="x"), BRACKETS))
    broken = sum(breaks(reads, text) for reads, text in tries)
    return Outcome(not broken, f"{broken} of {len(tries)} files ended their reader with a stack trace")


main(__name__, attack, virtual=VIRTUAL)
