"""Joining a swarm as a client, which looks on and announces nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.storage.swarmfile import Swarm

JOIN_S = 15.0  # for a first answer


@contextlib.asynccontextmanager
async def joining(
    swarm: Swarm, home: Path, *, patience_s: float = JOIN_S, platform: Platform = MACHINE
) -> AsyncIterator[Host]:
    """Join a swarm, and wait until a peer of it answers. The client leaves again if the context raises.

    Raises NetworkDown if nobody answers in time, NotAdmitted.
    """
    host = await Host.join(swarm, HostConfig(home, looks_on=True), role="client", platform=platform)
    try:
        await host.wait_joined(min(patience_s, JOIN_S))
        yield host
    except BaseException:
        await host.close()
        raise
