"""swarmnode: a volunteer-computing node for large neural networks.

A name is loaded on its first use, so `import swarmnode` takes no time:

- `connect`, `aconnect`: use a swarm from Python; `SyncSwarm` and `SwarmClient` are their results.
- `Node`, `NodeConfig`: lend this machine.
- `create`, `host`: found a swarm.
- `train`: train with a swarm.
- `SwarmnodeError` and its subclasses: the errors of all of these.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient, aconnect
    from swarmnode.client.sync_client import SyncStream, SyncSwarm, connect
    from swarmnode.client.text_stream import GeneratedText, TextStream
    from swarmnode.client.tokenizer import Turn
    from swarmnode.config import StageConfig
    from swarmnode.errors import (
        Busy,
        CheckpointError,
        ContextTooLong,
        LocalError,
        NetworkDown,
        NoRoute,
        NotAdmitted,
        NotFinite,
        PeerError,
        StepFailed,
        SwarmnodeError,
        UsageError,
    )
    from swarmnode.node.node import Node
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.peer.host_config import HostConfig
    from swarmnode.programs import StepSummary, TrainingWait, create, host, train
    from swarmnode.serving.client.generation import GenerateOptions, Generation
    from swarmnode.swarm.records.run import Averaging, Compression, Run
    from swarmnode.swarm.storage.swarmfile import Swarm
    from swarmnode.version import __version__

_MODULES = {  # module -> the public names in it
    "client.swarm_client": ("SwarmClient", "aconnect"),
    "client.sync_client": ("SyncStream", "SyncSwarm", "connect"),
    "client.text_stream": ("GeneratedText", "TextStream"),
    "client.tokenizer": ("Turn",),
    "config": ("StageConfig",),
    "errors": (
        *("Busy", "CheckpointError", "ContextTooLong", "LocalError", "NetworkDown", "NoRoute", "NotAdmitted"),
        *("NotFinite", "PeerError", "StepFailed", "SwarmnodeError", "UsageError"),
    ),
    "node.node": ("Node",),
    "node.node_config": ("NodeConfig",),
    "peer.host_config": ("HostConfig",),
    "programs": ("StepSummary", "TrainingWait", "create", "host", "train"),
    "serving.client.generation": ("GenerateOptions", "Generation"),
    "swarm.records.run": ("Averaging", "Compression", "Run"),
    "swarm.storage.swarmfile": ("Swarm",),
    "version": ("__version__",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Averaging",
    "Busy",
    "CheckpointError",
    "Compression",
    "ContextTooLong",
    "GenerateOptions",
    "GeneratedText",
    "Generation",
    "HostConfig",
    "LocalError",
    "NetworkDown",
    "NoRoute",
    "Node",
    "NodeConfig",
    "NotAdmitted",
    "NotFinite",
    "PeerError",
    "Run",
    "StageConfig",
    "StepFailed",
    "StepSummary",
    "Swarm",
    "SwarmClient",
    "SwarmnodeError",
    "SyncStream",
    "SyncSwarm",
    "TextStream",
    "TrainingWait",
    "Turn",
    "UsageError",
    "__version__",
    "aconnect",
    "connect",
    "create",
    "host",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name. Raises AttributeError for any other name."""
    if name not in _HOME:
        raise AttributeError(f"module 'swarmnode' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"swarmnode.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
