"""Founding of a swarm for `create` and `host`. The swarm's file and its owner's key are written last, after everything else has
succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.owner import NewOwnerOptions
from swarmnode.errors import UsageError
from swarmnode.terminal.option import option

if TYPE_CHECKING:
    from swarmnode.founding.swarm_creation import NewOwner

listen_option = partial(option, [], metavar="MADDR")


@dataclass(frozen=True)
class DoorOptions:
    """Options for the addresses of a new swarm's bootstrap peer."""

    listen: list[str] = listen_option("Where `swarmnode host --door-only` listens; default: a free loopback port.")
    announce: list[str] = option([], "Address at which others reach it, if not --listen's.", metavar="MADDR")


@dataclass(frozen=True)
class MembershipOptions:
    """Options of a new swarm's membership: private, unless another kind is chosen."""

    private: bool = option(False, "Admit only machines that you invite; this is the default.")
    public: bool = option(False, "Let everyone join, not only those that you invite; you can revoke machines.")
    unowned: bool = option(
        False, "Let everyone with the invite join, without an owner's key and revocations.", "--open"
    )

    @property
    def chosen(self) -> str:
        """The chosen flag, without dashes; empty if there is none. Raises UsageError if there are several."""
        flags = {"private": self.private, "public": self.public, "open": self.unowned}
        given = [flag for flag, on in flags.items() if on]
        if len(given) > 1:
            raise UsageError(f"give either --{' or --'.join(given)}, not both")
        return "".join(given)

    @property
    def membership(self) -> str:
        """The membership of a new swarm: "private", "public" or "open". Raises UsageError if several were chosen."""
        return self.chosen or "private"


def _adapters(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Return the adapters' folders by the adapters' names. Raises UsageError if a text is not NAME=DIR, a name is invalid or
    occurs twice, or there are too many."""
    if not texts:
        return {}  # without the imports
    from swarmnode.founding.swarm_creation import check_adapter_names

    for text in texts:
        if not all(text.partition("=")):
            raise UsageError(f"{flag} takes a name and a folder, as in verse=./verse-lora, not {text!r}")
    named = [(name, Path(folder).expanduser()) for name, _, folder in (text.partition("=") for text in texts)]
    check_adapter_names([name for name, _ in named])
    return dict(named)


ADAPTERS = option(
    [],
    "A LoRA adapter that requests can choose by NAME; DIR is a folder saved by peft. Repeatable.",
    "--adapter",
    metavar="NAME=DIR",
    parse=_adapters,
)


def owner_of(path: Path, owner: NewOwnerOptions, *, force: bool = False) -> NewOwner:
    """Return the owner's key: the given one, or a new one beside the .swarm file. Raises UsageError if that exists already."""
    from swarmnode.founding.swarm_creation import NewOwner, new_owner

    if owner.is_given:
        return NewOwner(owner.key_of(path))
    return new_owner(path, owner.new_password, force=force)
