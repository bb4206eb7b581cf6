"""Training states that a peer serves to others: those of its stage, if it has one, and its backups of other peers' states."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from swarmnode.checkpoints.backups import BackupServer
from swarmnode.checkpoints.state_server import StateServer
from swarmnode.errors import LocalError
from swarmnode.peer.host import Host
from swarmnode.swarm.storage.backups import OFFERED_SHARE, BackupFolder
from swarmnode.swarm.storage.chunk_folder import disk_error

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedStates:
    """The state server and the backups of one peer, whatever the peer computes. Without a usable disk there are no backups."""

    state_server: StateServer
    backups: BackupFolder | None
    backup_server: BackupServer | None

    def __repr__(self) -> str:
        return f"<SharedStates {self.state_server!r}>"

    @classmethod
    async def start(cls, host: Host, *, share: float = OFFERED_SHARE) -> SharedStates:
        """Start serving states and taking backups; `share` of the lent disk space is for backups."""
        backups = await asyncio.to_thread(_open, host, share)
        backup_server = None if backups is None else BackupServer(host, backups)
        state_server = StateServer(host, backups)
        await state_server.serve()
        if backup_server is not None:
            await backup_server.start()
        return cls(state_server, backups, backup_server)

    async def close(self) -> None:
        """Stop serving states and taking backups."""
        if self.backup_server is not None:
            await self.backup_server.close()
        await self.state_server.close()
        if self.backups is not None:
            self.backups.close()


def _open(host: Host, share: float) -> BackupFolder | None:
    config = host.config
    try:
        return BackupFolder(config.home, host.swarm.id, config.max_cache_bytes, share=share)
    except OSError as error:
        log.warning("your node keeps no training states for others: %s", disk_error(config.home, error))
    except LocalError as error:
        log.warning("your node keeps no training states for others: %s", error)
    return None
