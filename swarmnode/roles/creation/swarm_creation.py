"""Founding a swarm: from its model to a manifest, an invite and the promise of a first bootstrap peer."""

from __future__ import annotations

import time
from dataclasses import replace

from msgspec import UNSET, UnsetType

from swarmnode.errors import UsageError
from swarmnode.net.addressing.addresses import with_peer
from swarmnode.net.identity import Identity
from swarmnode.roles.creation.adapter_source import AdapterSource
from swarmnode.roles.creation.bootstraps import Bootstraps
from swarmnode.roles.creation.model_source import ModelSource, check_vocabulary
from swarmnode.swarm.records.invite import sign_swarm
from swarmnode.swarm.records.manifest import (
    ADAPTERS_FORMAT,
    FORMAT,
    MAX_NAME_CHARS,
    OPEN,
    SERVE,
    SERVING_CODECS,
    TRAIN,
    TRAINING_CODECS,
    Manifest,
    encode_manifest,
    swarm_id,
)
from swarmnode.swarm.records.signing_key import SigningKey
from swarmnode.swarm.storage.content import Progress, describe_files
from swarmnode.swarm.storage.swarmfile import Swarm, new_swarm

MAX_NAME_BYTES = 200  # in UTF-8: files are called after it, with more letters around, and a file's name has at most 255


def check_name(name: str) -> None:
    """Raises UsageError for what cannot be a swarm's name, or is one that commands and files cannot be given."""
    readable = name.isprintable() and "/" not in name and name == name.strip()
    short = len(name) <= MAX_NAME_CHARS and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    if not name or not readable or not short or name.startswith(("-", ".")):
        shown = repr(name) if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]!r}…"
        raise UsageError(
            f"{shown} is not a name for a swarm; use up to {MAX_NAME_CHARS} letters, digits and dashes, a letter or digit first"
        )


def create_swarm(
    name: str,
    model_source: ModelSource,
    bootstraps: Bootstraps,
    *,
    mode: str = SERVE,
    membership: str = OPEN,
    owner: SigningKey | None = None,
    priority: str | UnsetType = UNSET,
    adapters: AdapterSource | None = None,
    progress: Progress | None = None,
) -> Swarm:
    """The new swarm that serves or trains a model, signed by its owner where it has one; a private one needs one.

    Raises UsageError on a bad name or address, or a vocabulary without all bytes.
    """
    check_name(name)
    bootstraps = bootstraps.settled()
    if mode == TRAIN:
        check_vocabulary(model_source.vocabulary, [file.name for file in model_source.files])
    manifest = Manifest(
        name=name,
        model=model_source.model,
        files=describe_files(model_source.files, progress=progress),
        created=int(time.time()),
        kind=model_source.kind,
        mode=mode,
        codecs=TRAINING_CODECS if mode == TRAIN else SERVING_CODECS,
        membership=membership,
        owner=b"" if owner is None else owner.public,
        priority=priority,
        format=FORMAT if adapters is None else ADAPTERS_FORMAT,
        adapters=UNSET if adapters is None else adapters.adapters,
    )
    raw = encode_manifest(manifest)
    signature = b"" if owner is None else sign_swarm(swarm_id(raw), owner)
    swarm = replace(
        new_swarm(raw, signature),
        checkpoint=model_source.folder,
        original=model_source.original,
        adapters=None if adapters is None else adapters.folder,
        bootstraps=tuple(bootstraps.running),
    )
    return swarm if bootstraps.running else _promise_bootstrap(swarm, bootstraps)


def _promise_bootstrap(swarm: Swarm, bootstraps: Bootstraps) -> Swarm:
    """Fix identity and addresses of the first bootstrap peer now, so that the invite is complete before it runs."""
    identity = Identity.generate()
    return replace(
        swarm,
        bootstraps=tuple(with_peer(address, identity.peer_id) for address in bootstraps.announce),
        bootstrap_key=identity.to_bytes(),
        bootstrap_listen=tuple(bootstraps.listen),
    )
