"""Founding of a swarm: from its model to a manifest, an invite, and the identity of its first bootstrap peer.

Bootstrap peers of a new swarm: their addresses are checked, and made such that newcomers can dial them, before anything
is written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from msgspec import UNSET, UnsetType

from swarmnode.codec.body import MAX_ADAPTER_CHARS
from swarmnode.config import EQUAL
from swarmnode.errors import LocalError, UsageError
from swarmnode.files import may_write
from swarmnode.founding.model_source import ModelSource, check_vocabulary
from swarmnode.membership.owner import with_host_grant
from swarmnode.net.addressing.addresses import (
    check_all,
    free_port,
    host_of,
    is_link_local,
    is_loopback,
    is_wildcard,
    peer_of,
    port_of,
    with_host,
    with_peer,
    with_port,
)
from swarmnode.net.addressing.reachability import own_interfaces
from swarmnode.net.identity import Identity, SigningKey
from swarmnode.swarm.records.invite import sign_swarm
from swarmnode.swarm.records.manifest import (
    ADAPTERS_FORMAT,
    ANCHOR_FORMAT,
    ANY_PACKED,
    BOTTLENECK_FORMAT,
    CAUSAL_LM,
    CREDIT,
    EQUAL_FORMAT,
    FORMAT,
    GRAPH,
    MAX_ADAPTERS,
    MAX_NAME_CHARS,
    MAX_WEIGHTS_BYTES,
    OPEN,
    PACKED_FORMAT,
    PRIVATE,
    QUANTISED_FORMAT,
    SERVE,
    SERVING_CODECS,
    TRAIN,
    TRAINING_CODECS,
    AdapterInfo,
    Manifest,
    encode_manifest,
    file_names,
    is_adapter_name,
    swarm_id,
)
from swarmnode.swarm.storage.content import GGUF_SUFFIX, PACKED_NAME, Progress, describe_files
from swarmnode.swarm.storage.owner_files import IssuedInvites, issued_invites_path
from swarmnode.swarm.storage.small_files import new_folder
from swarmnode.swarm.storage.swarmfile import Swarm, new_swarm, save_swarm


@dataclass(frozen=True)
class Bootstraps:
    """The bootstrap peers of a new swarm: peers that already run (`running`), or the peer that `swarmnode host --door-only` will
    start.

    `listen` and `announce` are multiaddrs without /p2p/. If `running` and `listen` are empty, the new peer gets a free port
    on loopback.
    """

    running: Sequence[str] = ()
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()

    def settled(self, interfaces: Collection[str] | None = None) -> Bootstraps:
        """Return a copy whose addresses newcomers can dial: ports are chosen, and wildcards replaced by this machine's
        addresses.

        `interfaces` are this machine's addresses; None looks them up. Raises UsageError if an address is invalid or the
        options contradict each other.
        """
        running = check_all("--bootstrap", self.running, needs_peer=True)
        if running and (self.listen or self.announce):
            raise UsageError("--bootstrap names peers that run already; --listen and --announce are for a new one")
        # A free port instead of port 0: the invite outlives the process that listens.
        chosen = _bootstrap_addresses("--listen", check_all("--listen", self.listen))
        listen = tuple(with_port(each, free_port()) if port_of(each) == 0 else each for each in chosen)
        announce = _bootstrap_addresses("--announce", check_all("--announce", self.announce, dialled=True))
        if announce and not listen:
            raise UsageError("--announce says where others reach the bootstrap peer; --listen says where it listens")
        if unknown := [address for address in announce if port_of(address) == 0]:
            raise UsageError(f"--announce {unknown[0]}: port 0 cannot be dialled; give the port that others reach")
        if not running and not listen:
            listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
        return replace(self, running=running, listen=listen, announce=announce or _reached(listen, interfaces))


def _bootstrap_addresses(option: str, addresses: Sequence[str]) -> Sequence[str]:
    """Check the addresses of a bootstrap peer that is still to be started, and return them.

    Raises UsageError if one lacks a port, contains /p2p/ or is link-local.
    """
    for address in addresses:
        if port_of(address) is None:
            raise UsageError(f"{option} {address}: it names no port; give one like /ip4/203.0.113.7/tcp/4001")
        if peer_of(address) is not None:
            raise UsageError(f"{option} {address}: leave out /p2p/; a new bootstrap peer gets an identity of its own")
        if is_link_local(address):
            raise UsageError(
                f"{option} {address}: a link-local address leads elsewhere on each machine; give another one"
            )
    return addresses


def _reached(listen: Sequence[str], interfaces: Collection[str] | None) -> tuple[str, ...]:
    """Return the addresses in `listen` as others dial them; those on loopback only if there are no others."""
    known = own_interfaces() if interfaces is None else interfaces
    reached = list[str]()
    for address in listen:
        if not is_wildcard(address):
            reached.append(address)
            continue
        # Each interface's address of the wildcard's IP version; link-local ones mean nothing elsewhere.
        hosts = [host for host in sorted(known) if (":" in host) == (host_of(address) == "::")]
        reached += [each for host in hosts if not is_link_local(each := with_host(address, host))]
    return tuple(address for address in reached if not is_loopback(address)) or tuple(reached)


SUFFIX = ".swarm"
MAX_NAME_BYTES = 200  # in UTF-8: file names contain it with a suffix, and have at most 255 bytes


@dataclass(frozen=True)
class AdapterSource:
    """The folder with the files of all adapters, and their entries in the manifest."""

    folder: Path
    adapters: tuple[AdapterInfo, ...]


def check_adapter_names(names: list[str]) -> None:
    """Raise UsageError if a name is invalid or occurs twice, or if there are too many."""
    for name in names:
        if not is_adapter_name(name):
            raise UsageError(
                f"{name[:MAX_ADAPTER_CHARS]!r} is not a name for an adapter; use up to {MAX_ADAPTER_CHARS} letters, digits, "
                "dots and dashes, a letter or digit first"
            )
    if len({name.casefold() for name in names}) < len(names):
        raise UsageError("two adapters have the same name; give each a name of its own")
    if len(names) > MAX_ADAPTERS:
        raise UsageError(f"a swarm has at most {MAX_ADAPTERS} adapters, not {len(names)}")


def from_folders(folders: Mapping[str, Path], source: ModelSource, out: Path, *, force: bool = False) -> AdapterSource:
    """Copy adapters, each from a folder that peft has saved, into the folder `out`. `folders` maps the adapters' names to
    their folders.

    Raises UsageError if the model generates no text or a name is invalid. Raises CheckpointError if an adapter is not a
    LoRA adapter of the model, and LocalError if the folder cannot be written.
    """
    import torch

    from swarmnode.compute.model.adapters.adapter_file import adapter_in, chat_of
    from swarmnode.compute.model.assemble import outline
    from swarmnode.compute.model.checkpoint import Checkpoint

    check_adapter_names(list(folders))
    if source.kind != CAUSAL_LM:
        raise UsageError("adapters are for models that generate text; leave --adapter out")
    checkpoint = Checkpoint(source.folder)
    family = checkpoint.family
    model = outline(family, 0, family.units, dtype=torch.float32)
    with new_folder(out, force=force) as partial:
        for name, folder in folders.items():
            adapter = adapter_in(folder)
            adapter.check(family, model, 0, family.units)
            adapter.check_numbers()
            adapter.check_base_layers(checkpoint)
            if adapter.weights.stat().st_size > MAX_WEIGHTS_BYTES:
                raise UsageError(f"{adapter.weights} is over {MAX_WEIGHTS_BYTES >> 30} GiB: an adapter is smaller")
            config_name, weights_name, chat_name = file_names(name)
            shutil.copyfile(adapter.config_file, partial / config_name)
            shutil.copyfile(adapter.weights, partial / weights_name)
            if (chat := chat_of(folder, source.folder)) is not None:
                (partial / chat_name).write_bytes(chat.encode())
    described = []
    for name in folders:
        files = [out / file for file in file_names(name) if (out / file).is_file()]
        described.append(AdapterInfo(name, *describe_files(files)))
    return AdapterSource(out, tuple(described))


def check_name(name: str) -> None:
    """Raise UsageError if `name` is not a valid name for a swarm: too long, unprintable, or impractical in commands and
    file names."""
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
    products: str = "",
    progress: Progress | None = None,
) -> Swarm:
    """Create a swarm that serves or trains a model.

    Args:
        name: name of the swarm (see `check_name`).
        model_source: the model and its files.
        bootstraps: its bootstrap peers, running ones or one that is still to be started.
        mode: SERVE or TRAIN.
        membership: who may join; a private swarm needs an owner.
        owner: the key that signs the swarm; None for a swarm without an owner.
        priority: rule of the shares of devices' time; UNSET for none.
        adapters: LoRA adapters of the model; None for none.
        products: least kind of products of packed weights, "exact" or "fast"; "equal" for plain ones with equal bits; empty
        for any. progress: is called while files are hashed.

    Returns:
        The swarm, ready to be saved.

    Raises:
        UsageError: if the name or an address is invalid, if a model to be trained has no tokenizer and fewer than 256 tokens, if a
            model with a bottleneck is to be served only, or if `products` are asked of a model without packed weights.
    """
    check_name(name)
    bootstraps = bootstraps.settled()
    if mode == TRAIN:
        check_vocabulary(model_source.vocabulary, [file.name for file in model_source.files])
    elif model_source.bottleneck:
        raise UsageError(
            "the model has a bottleneck: it is served by the swarm that trains it; for a swarm that only serves, give another model"
        )
    number = _format(model_source, adapters)
    if products == EQUAL:
        if number != FORMAT or mode == TRAIN or model_source.kind == GRAPH:
            raise UsageError(
                "--equal-bits is for a language model with plain weights and without adapters that is served: the fast products of "
                "packed weights have equal bits by themselves; leave it out"
            )
        number = EQUAL_FORMAT
    elif products and number not in ANY_PACKED:
        raise UsageError(
            f"--products {products} is for packed weights (a GGUF file), and {model_source.folder.name} has none"
        )
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
        format=number,
        products=products or UNSET,
        bottleneck=model_source.bottleneck or UNSET,
        anchor=model_source.anchor or UNSET,
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


def _format(source: ModelSource, adapters: AdapterSource | None) -> int:
    """Return the lowest number of a manifest's format that has what this swarm needs."""
    if any(file.name == PACKED_NAME for file in source.files):
        return PACKED_FORMAT
    if source.quantised:
        return QUANTISED_FORMAT
    if source.bottleneck:
        return ANCHOR_FORMAT if source.anchor else BOTTLENECK_FORMAT
    return FORMAT if adapters is None else ADAPTERS_FORMAT


def _promise_bootstrap(swarm: Swarm, bootstraps: Bootstraps) -> Swarm:
    """Create the first bootstrap peer's identity and addresses now, so that the invite is complete before that peer runs."""
    identity = Identity.generate()
    return replace(
        swarm,
        bootstraps=tuple(with_peer(address, identity.peer_id) for address in bootstraps.announce),
        bootstrap_key=identity.to_bytes(),
        bootstrap_listen=tuple(bootstraps.listen),
    )


@dataclass(frozen=True)
class NewOwner:
    """The owner's key; a new one has a `file` to be written, once everything else is known to be right."""

    key: SigningKey
    file: Path | None = None
    password: str = field(default="", repr=False)

    @property
    def advice(self) -> str:
        """Sentence for the owner about the key."""
        if self.file is None:
            return "Keep the given key secret and back it up: only it can invite and revoke."
        if self.password:
            return f"Back up {self.file} and remember its password: only they can invite and revoke."
        return f"Keep {self.file} secret and back it up: only it can invite and revoke."

    def save(self) -> None:
        """Write a new key, under its password if there is one. Raises LocalError if it cannot be written."""
        from swarmnode.swarm.storage.owner_files import save_owner_key

        if self.file is not None:
            save_owner_key(self.key, self.file, self.password)


def new_swarm_file(name: str, *, force: bool = False) -> Path:
    """Return the path of the .swarm file to write: `name` with its suffix.

    Raises UsageError for an impossible name, a missing folder, or an existing file without `force`; LocalError if the folder is
    read-only.
    """
    stem = Path(name).name.removesuffix(SUFFIX)
    check_name(stem)
    path = Path(name).with_name(stem + SUFFIX)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path.parent}: no such folder for {path.name}; create it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; choose another name")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists; choose another name, or overwrite it with --force")
    if not may_write(folder):
        raise LocalError(f"{path.parent} cannot be written to; choose a folder of yours")
    return path


@contextmanager
def new_beside(path: Path, what: str = "weights") -> Iterator[Path]:
    """Yield the folder beside the .swarm file for new files; if the block fails, a new folder is removed."""
    folder = path.with_name(f"{path.stem}-{what}").absolute()
    was_there = folder.exists()
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def new_owner(path: Path, new_password: Callable[[], str], *, force: bool = False) -> NewOwner:
    """Return a new owner's key, to be written beside the .swarm file `path` under the password that `new_password` returns.

    Raises UsageError if the file exists already, without `force`.
    """
    from swarmnode.swarm.storage.owner_files import OWNER_SUFFIX

    file = path.with_suffix(OWNER_SUFFIX)
    if file.exists() and not force:
        raise UsageError(f"{file} already exists; to use this key for the new swarm, give --owner-key {file}")
    return NewOwner(SigningKey.generate(), file, new_password())


def create_and_save(
    path: Path,
    source: ModelSource,
    bootstraps: Bootstraps,
    owner: NewOwner | None,
    *,
    mode: str,
    private: bool,
    by_credit: bool = False,
    products: str = "",
    adapters: Mapping[str, Path] = MappingProxyType({}),
    force: bool = False,
    progress: Progress | None = None,
) -> Swarm:
    """Found a swarm for a model and write its file `path`; file and owner's key are written at the very end.

    `adapters` are folders by the names of the adapters, `products` as in `create_swarm`.

    Raises UsageError, CheckpointError, LocalError.
    """
    with new_beside(path, "adapters") as folder:
        adapter_source = from_folders(adapters, source, folder, force=force) if adapters else None
        swarm = create_swarm(
            path.stem,
            source,
            bootstraps,
            mode=mode,
            membership=PRIVATE if private else OPEN,
            owner=owner.key if owner else None,
            priority=CREDIT if by_credit else UNSET,
            adapters=adapter_source,
            products=products,
            progress=progress,
        )
        return _save(swarm, owner, path)


def _save(swarm: Swarm, owner: NewOwner | None, path: Path) -> Swarm:
    """Write the swarm, its owner's key, and for a private swarm the grant for the host's own machines. Raises LocalError."""
    if owner is not None:
        owner.save()
    if owner is not None and swarm.private:
        book = IssuedInvites(issued_invites_path(path))
        swarm = with_host_grant(swarm, owner.key, book)
        book.save()
    save_swarm(swarm, path)
    return replace(swarm, file=path)


def link_moved(swarm: Swarm, path: Path, model: Path, progress: Progress | None = None) -> Swarm | None:
    """Let the swarm in the file `path` use its GGUF file at its new place `model`, for a split one the place of any part.

    Returns the swarm as its file now has it; None if the swarm uses no GGUF file, or `model` differs from it. Reads the whole model
    if its size is right. Raises CheckpointError if a part of a split model is missing, LocalError if the file cannot be written.
    """
    from swarmnode.compute.gguf.gguf import find_gguf, parts_of

    assert swarm.manifest is not None
    linked = sorted(
        (file for file in swarm.manifest.files if file.name.endswith(GGUF_SUFFIX)), key=lambda file: file.name
    )
    if swarm.checkpoint is None or not linked or (found := find_gguf(model)) is None:
        return None
    parts = parts_of(found)
    links = [swarm.checkpoint / file.name for file in linked]
    if [part.stat().st_size for part in parts] != [file.size for file in linked]:
        return None
    if not all(link.parent.is_dir() and (link.is_symlink() or not link.exists()) for link in links):
        return None  # a file would be lost
    if [file.root for file in describe_files(parts, progress=progress)] != [file.root for file in linked]:
        return None
    for link, part in zip(links, parts, strict=True):
        link.unlink(missing_ok=True)
        link.symlink_to(part.absolute())
    moved = replace(swarm, original=str(model.absolute()))
    save_swarm(moved, path)
    return moved
