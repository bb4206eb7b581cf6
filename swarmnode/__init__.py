"""swarmnode: a volunteer-computing node for large neural networks.

The public names are loaded on first use, so that `import swarmnode` costs nothing:

- `connect`, `aconnect`: join a swarm as a client and generate with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["__version__", "aconnect", "connect"]

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import aconnect
    from swarmnode.client.sync_client import connect
    from swarmnode.version import __version__


def __getattr__(name: str) -> Any:
    if name == "connect":
        from swarmnode.client.sync_client import connect

        return connect
    if name == "aconnect":
        from swarmnode.client.swarm_client import aconnect

        return aconnect
    if name == "__version__":
        from swarmnode.version import __version__

        return __version__
    raise AttributeError(f"module 'swarmnode' has no attribute {name!r}")
