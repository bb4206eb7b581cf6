"""Founding a swarm: from a checkpoint to a manifest, an invite and the promise of a first bootstrap peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.compute.checkpoint import Checkpoint
from swarmnode.compute.hub import HubCheckpoint, open_checkpoint
from swarmnode.compute.selfcheck import check_family
from swarmnode.errors import UsageError
from swarmnode.net.addresses import free_port, is_loopback, with_peer
from swarmnode.net.identity import Identity
from swarmnode.swarm.content import Progress, checkpoint_files, describe_files
from swarmnode.swarm.manifest import Manifest, ModelInfo, encode_manifest
from swarmnode.swarm.swarmfile import Swarm, new_swarm


@dataclass(frozen=True)
class Bootstraps:
    """Where newcomers shall find the swarm: peers that run already, or the one that `swarmnode bootstrap` will start.

    `listen` and `announce` are multiaddrs without /p2p/; an empty `listen` means a free port on loopback.
    """

    running: Sequence[str] = ()
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()


def found_swarm(name: str, model: str, bootstraps: Bootstraps, *, progress: Progress | None = None) -> Swarm:
    """The new swarm of a checkpoint (a local folder or a hub id, which is downloaded).

    Raises CheckpointError where the checkpoint is damaged or its family cannot be split, UsageError on a bad name.
    """
    if not name or not name.isprintable() or "/" in name:
        raise UsageError(f"{name!r} is not a name for a swarm; use letters, digits and dashes")
    checkpoint = _whole_checkpoint(model)
    check_family(checkpoint.family)
    folder = Path(checkpoint.path)
    manifest = Manifest(
        name=name,
        model=ModelInfo(
            family=checkpoint.config.model_type,
            units=checkpoint.units,
            hidden=checkpoint.config.hidden_size,
            hub_id=model if isinstance(checkpoint, HubCheckpoint) else None,
            revision=getattr(checkpoint, "revision", None),
        ),
        files=describe_files(checkpoint_files(folder), progress=progress),
        created=int(time.time()),
    )
    swarm = replace(new_swarm(encode_manifest(manifest)), checkpoint=folder, bootstraps=tuple(bootstraps.running))
    return swarm if bootstraps.running else _promise_bootstrap(swarm, bootstraps)


def _whole_checkpoint(model: str) -> Checkpoint:
    """The checkpoint with all its files on this machine. Raises UsageError where `model` is neither a folder nor a hub id."""
    if not Path(model).expanduser().is_dir() and (model.count("/") != 1 or model.startswith(("/", ".", "~"))):
        raise UsageError(f"{model}: no such folder (and a hub id has the form organisation/model)")
    checkpoint = open_checkpoint(model)
    if isinstance(checkpoint, HubCheckpoint):
        checkpoint.open_slices(checkpoint.tensor_names)  # fetches every shard, with a progress bar
    return checkpoint


def _promise_bootstrap(swarm: Swarm, bootstraps: Bootstraps) -> Swarm:
    """Fix identity and addresses of the first bootstrap peer now, so that the invite is complete before it runs."""
    identity = Identity.generate()
    listen = tuple(bootstraps.listen) or (f"/ip4/127.0.0.1/tcp/{free_port()}",)
    announce = tuple(bootstraps.announce) or listen
    return replace(
        swarm,
        bootstraps=tuple(with_peer(address, identity.peer_id) for address in announce),
        bootstrap_key=identity.to_bytes(),
        bootstrap_listen=listen,
    )


def reaches_others(swarm: Swarm) -> bool:
    """Whether the invite is of use on other machines."""
    return not all(is_loopback(address) for address in swarm.bootstraps)
