"""Session stats: what a client's session goes through while it generates one text."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.net.interfaces import PeerId


@dataclass
class SessionStats:
    """What a session went through, for whoever watches."""

    reroutes: int = 0
    longest_stall_s: float = 0.0
    faults: list[tuple[PeerId, str]] = field(default_factory=list)
