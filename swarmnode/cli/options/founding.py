"""Founding a swarm, for `create` and `host`: its file and its owner's key are written at the very end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import option
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.founding.swarm_creation import NewOwner

listen_option = partial(option, [], metavar="MADDR")


@dataclass(frozen=True)
class DoorOptions:
    """Addresses of a new swarm's bootstrap peer."""

    listen: list[str] = listen_option("Where `swarmnode bootstrap` will listen; default: a free port on loopback.")
    announce: list[str] = option(
        [], "Address under which others reach it, where that differs from --listen.", metavar="MADDR"
    )


def _adapters(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Return folders by the names of the adapters in them. Raises UsageError."""
    from swarmnode.founding.swarm_creation import check_adapter_names

    for text in texts:
        if not all(text.partition("=")):
            raise UsageError(f"{flag} takes a name and a folder, as in verse=./verse-lora, not {text!r}")
    named = [(name, Path(folder).expanduser()) for name, _, folder in (text.partition("=") for text in texts)]
    check_adapter_names([name for name, _ in named])
    return dict(named)


ADAPTERS = option(
    [],
    "A LoRA adapter that who asks may choose by this name: a folder that peft has saved it into. Repeatable.",
    "--adapter",
    metavar="NAME=DIR",
    parse=_adapters,
)


def owner_of(path: Path, owner: OwnerOptions, *, force: bool = False) -> NewOwner:
    """Return the owner's key: the given one, or a new one beside the .swarm file. Raises UsageError if that exists already."""
    from swarmnode.founding.swarm_creation import NewOwner, new_owner

    if owner.is_given:
        return NewOwner(owner.key_of(path))
    return new_owner(path, owner.new_password, force=force)
