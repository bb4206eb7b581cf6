"""Joining of a swarm as a client that only observes and announces nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.storage.swarmfile import Swarm

JOIN_S = 15.0  # for the first answer of a peer


@contextlib.asynccontextmanager
async def joining(
    swarm: Swarm, home: Path, *, patience_s: float = JOIN_S, platform: Platform = MACHINE
) -> AsyncIterator[Host]:
    """Join a swarm, wait until a peer of it answers, and yield the host. If the context raises, leave the swarm; else the caller
    closes the host.

    The wait is `patience_s`, but at most `JOIN_S` seconds. Raises NetworkDown if no peer answers in time, NotAdmitted if the swarm
    refuses us.
    """
    host = await Host.join(swarm, HostConfig(home, looks_on=True), role="client", platform=platform)
    try:
        await host.wait_joined(min(patience_s, JOIN_S))
        yield host
    except BaseException:
        await host.close()
        raise
