"""Adapters that a client can use: those of the manifest, those of its home folder, those that other members share, and folders."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from swarmnode.client.model_files import ModelFiles
from swarmnode.client.tokenizer import AdapterTokenizer, ByteTokenizer, Tokenizer
from swarmnode.codec.body import MAX_ADAPTER_CHARS
from swarmnode.codec.messages import AdapterTicket, Open
from swarmnode.data.conversation import ConfinedRenderer, render_chat
from swarmnode.errors import LocalError, NetworkDown, NoRoute, PeerRefused, SwarmnodeError, UsageError
from swarmnode.membership.access_control import load_home_key
from swarmnode.net.identity import Identity
from swarmnode.peer.host import Host
from swarmnode.plan.view import Span
from swarmnode.swarm.records.adapter_record import MAX_LIFE_S, AdapterRecord, Share, sign_adapter, signed_ticket
from swarmnode.swarm.records.manifest import MAX_WEIGHTS_BYTES, AdapterInfo, Manifest, is_adapter_name
from swarmnode.swarm.storage.content import verify_file
from swarmnode.swarm.storage.own_adapters import (
    CONFIG_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    AdapterChat,
    AdapterTerms,
    OwnAdapter,
    OwnAdapters,
    adapter_in_folder,
    decode_chat,
)
from swarmnode.weights.adapter_offers import AdapterGiver, SharedAdapter, list_adapters, shared_adapters

if TYPE_CHECKING:
    from swarmnode.compute.model.adapters.adapter_file import AdapterFile
    from swarmnode.compute.model.checkpoint import Checkpoint

SHARED_S = 10.0
MAX_OFFERED = 64
MAX_TOKENIZERS = 64  # of adapters, kept by one client
SHOWN_CHARS = 8  # of an id, in messages and at least from users
UNNAMED = "adapter"  # a folder whose own name is no name for an adapter


@dataclass(frozen=True)
class _Chosen:
    """An adapter that sessions of this client use: one of its own, else one that another member shares."""

    own: OwnAdapter | None = None
    shared: SharedAdapter | None = None


class ClientAdapters:
    """Adapters of one client. `files` gives the model that folders are checked with."""

    def __init__(self, host: Host, files: ModelFiles) -> None:
        assert host.swarm.manifest is not None
        self._host = host
        self._files = files
        self._manifest: Manifest = host.swarm.manifest
        self._chosen: dict[str, _Chosen] = {}  # by id
        self._folders: dict[tuple[str | int, ...], OwnAdapter] = {}  # checked ones, by path and times of the files
        self._owned = OwnAdapters(host.config.home, host.swarm.id)
        self._shared: list[SharedAdapter] | None = None
        self._shared_until_s = 0.0
        self._giver: AdapterGiver | None = None
        self._home_key: Identity | None = None
        self._tokenizers: dict[object, Tokenizer] = {}  # of adapters, by their files
        self._confined = ConfinedRenderer()

    async def close(self) -> None:
        """End the conversations with hops about this client's adapters, and the process that renders chats of others' templates."""
        await asyncio.to_thread(self._confined.close)
        if self._giver is not None:
            await self._giver.close()

    async def own(self) -> list[OwnAdapter]:
        """Return the adapters that were added in this home folder."""
        return await asyncio.to_thread(self._owned.all)

    async def shared(self) -> list[SharedAdapter]:
        """Return the adapters that other members share, as they were at most SHARED_S ago.

        Raises NetworkDown; LocalError if the table does not answer.
        """
        now_s = self._host.clock.monotonic()
        if self._shared is None or now_s >= self._shared_until_s:
            owner = (await self._key()).peer_id
            self._shared = [one for one in await shared_adapters(self._host) if one.record.owner != owner]
            self._shared_until_s = now_s + SHARED_S
        return self._shared

    async def add(self, folder: Path, *, name: str, share: Share, life_s: float) -> OwnAdapter:
        """Add the adapter in `folder` to this home's, under `name`, for `life_s` seconds from now. A shared one is listed at once.

        Raises UsageError if the name is taken or no name for an adapter; CheckpointError if the folder has no adapter of the model;
        LocalError if the disk cannot be written.
        """
        from swarmnode.founding.swarm_creation import check_adapter_names  # it takes long to import

        check_adapter_names([name])
        if name in self._manifest.adapter_names:
            raise UsageError(f"the swarm itself has an adapter {name!r}; choose another --name")
        ends = int(self._host.clock.unix() + life_s)
        terms = AdapterTerms(name, share, ends, await self.check(folder))
        own = await asyncio.to_thread(self._owned.add, folder, terms, await self._chat_in(folder))
        if share is not Share.PRIVATE:
            with contextlib.suppress(NetworkDown, LocalError):  # this home's nodes list it again
                await list_adapters(self._host, [own])
        return own

    async def id_of(self, own: OwnAdapter) -> str:
        """Return the id of an adapter of this home."""
        return (await self._signed(own))[0].id

    async def offered(self) -> list[str]:
        """Return the names of all adapters that a gateway offers to its users: the manifest's, own ones, and those shared with all.

        A shared one whose name means several adapters has the beginning of its id instead. At most MAX_OFFERED shared ones are
        offered, and none if the table does not answer.
        """
        try:
            shared = [one.record for one in await self.shared()]
        except SwarmnodeError:
            shared = []
        own = [one.terms.name for one in await self.own() if not self._is_over(one)]
        names = [*self._manifest.adapter_names, *own, *(record.name for record in shared)]
        offered = [
            record.name if names.count(record.name) == 1 else record.id[:SHOWN_CHARS]
            for record in shared
            if record.allows is Share.ALL
        ]
        return list(dict.fromkeys([*self._manifest.adapter_names, *own, *offered[:MAX_OFFERED]]))

    async def listing(self) -> list[dict[str, Any]]:
        """Return all adapters that this client can use, as `adapter list --json` prints them.

        Sizes are in bytes, times in unix seconds, None for ever. Raises NetworkDown; LocalError if the table does not answer.
        """
        keys = ("name", "of", "share", "rank", "bytes", "expires_at", "id")
        rows: list[tuple[Any, ...]] = [
            (one.name, "the swarm", "all", None, sum(file.size for file in one.files), None, "")
            for one in self._manifest.adapters or ()
        ]
        own = [((await self._signed(one))[0], one.terms.expires_at, "you") for one in await self.own()]
        shared = [(one.record, one.record.expires_at, one.record.owner) for one in await self.shared()]
        for record, expires_at, owner in (*own, *shared):
            share = record.allows.name.lower()
            rows.append((record.name, owner, share, record.rank, record.size_bytes, expires_at, record.id))
        return [dict(zip(keys, row, strict=True)) for row in rows]

    # -- choosing

    async def resolve(self, name: str) -> str:
        """Return the name that an OPEN has for an adapter: the manifest's name, or the id of another one.

        `name` is a folder if it contains a slash; else a name of the manifest, of the home folder or of a shared adapter, or the
        beginning of an id. "" is the model alone. Raises UsageError if there is none, or several; CheckpointError if a folder has
        no adapter of the model.
        """
        if not name or name in self._manifest.adapter_names:
            return name
        if "/" in name or os.sep in name:
            return await self._choose_own(await self._in_folder(Path(name)))
        own = await self.own()
        for one in own:
            if one.terms.name == name:
                return await self._choose_own(one)
        shared = await self.shared()
        fits = [one for one in shared if one.record.name == name or _is_beginning(name, one.record.id)]
        if len(fits) > 1:
            ids = ", ".join(one.record.id[:SHOWN_CHARS] for one in fits)
            raise UsageError(f"several members share an adapter {name!r}: choose one by its id ({ids})")
        if not fits:
            names = dict.fromkeys([*self._manifest.adapter_names, *(one.terms.name for one in own)])
            names |= dict.fromkeys(one.record.name for one in shared)
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"the swarm has no adapter {name[:MAX_ADAPTER_CHARS]!r}: {known}")
        self._chosen[fits[0].record.id] = _Chosen(shared=fits[0])
        return fits[0].record.id

    async def _choose_own(self, own: OwnAdapter) -> str:
        if self._is_over(own):
            when = datetime.datetime.fromtimestamp(own.terms.expires_at)
            raise UsageError(f"your adapter {own.terms.name!r} expired on {when:%Y-%m-%d}; remove it and add it again")
        record, _ = await self._signed(own)
        self._chosen[record.id] = _Chosen(own=own)
        return record.id

    def _is_over(self, own: OwnAdapter) -> bool:
        return own.terms.expires_at <= self._host.clock.unix()

    async def _in_folder(self, folder: Path) -> OwnAdapter:
        """Return the adapter in a folder, after a check against the model. It is private."""
        names = (CONFIG_NAME, WEIGHTS_NAME, TEMPLATE_NAME, TOKENIZER_NAME)
        key: tuple[str | int, ...] = (str(folder), *(_changed_at(folder / name) for name in names))
        if key not in self._folders:
            rank = await self.check(folder)
            name = folder.name if is_adapter_name(folder.name) else UNNAMED
            ends = int(self._host.clock.unix()) + MAX_LIFE_S
            self._folders[key] = await asyncio.to_thread(
                adapter_in_folder, folder, AdapterTerms(name, Share.PRIVATE, ends, rank)
            )
        return self._folders[key]

    async def check(self, folder: Path) -> int:
        """Check the adapter in a folder that peft saved against the model, and return its largest rank.

        Raises CheckpointError if it is none, has a layer that the model lacks, is of another model, or holds NaN; UsageError if it
        is too large.
        """
        weights, units = await self._files.weights(), self._manifest.model.units
        checkpoint = await weights.outline()
        adapter = await asyncio.to_thread(_checked, checkpoint, folder)
        if adapter.base_layers:
            checkpoint = await weights.with_tensors(adapter.base_tensors(checkpoint).values(), [Span(0, units)])
            await asyncio.to_thread(adapter.check_base_layers, checkpoint)
        return adapter.config.largest_rank

    async def _chat_in(self, folder: Path) -> AdapterChat | None:
        from swarmnode.compute.model.adapters.adapter_file import chat_of  # it takes long to import

        return await asyncio.to_thread(chat_of, folder, await self._files.folder())

    # -- chats

    async def tokenizer(self, name: str, patience_s: float | None = None) -> Tokenizer | ByteTokenizer | None:
        """Return the model's tokenizer as the chats of an adapter use it: with the adapter's chat template if it has one of its
        own. `name` is as in `resolve`, which raises the same errors; "" is the model alone. `patience_s` is for peers that have the
        template; None is the client's.

        Raises NoRoute if no peer provides the model's files or the adapter's template; CheckpointError if one of them is damaged.
        """
        base = await self._files.tokenizer()
        if not name or not isinstance(base, Tokenizer):
            return base
        chosen = self._chosen.get(found := await self.resolve(name), _Chosen())
        own, shared = chosen.own, chosen.shared
        render = render_chat if shared is None else self._confined.render
        info = self._manifest.adapter(found) if shared is None else shared.record.info
        key: object = own if own is not None else (shared is None, None if info is None else info.chat)
        if key not in self._tokenizers:
            if own is not None:
                chat = await self._own_chat(own)
            else:
                assert info is not None
                chat = await self._fetched_chat(info, patience_s)
            while len(self._tokenizers) >= MAX_TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
            self._tokenizers[key] = base if chat is None else AdapterTokenizer(base, chat, render)
        return self._tokenizers[key]

    async def _own_chat(self, own: OwnAdapter) -> AdapterChat | None:
        if own.chat is not None:
            return decode_chat(await asyncio.to_thread(own.paths[own.chat.root].read_bytes))
        return await self._chat_in(own.folder) if own in self._folders.values() else None

    async def _fetched_chat(self, info: AdapterInfo, patience_s: float | None) -> AdapterChat | None:
        if info.chat is UNSET:
            return None
        folder = self._host.swarm.adapters
        if folder is not None:
            with contextlib.suppress(OSError):  # the founder's folder is not on this machine, or has changed
                if verify_file(folder / info.chat.name, info.chat):
                    return decode_chat((folder / info.chat.name).read_bytes())
        try:
            weights, patience_s = await self._files.weights(), patience_s or self._files.patience_s()
            return decode_chat(await weights.file_of_adapter(info.chat, patience_s))
        except PeerRefused:
            raise NoRoute(
                f"no machine sent the adapter's chat template within {patience_s:.0f} s: try again when its owner is online"
            ) from None

    # -- sessions

    async def with_adapter(self, opened: Open) -> Open:
        """Return an OPEN with the ticket of its adapter. Hops of its route are offered the files if the adapter is this home's."""
        chosen = self._chosen.get(opened.adapter)
        if chosen is None:
            return opened
        if chosen.own is None:
            assert chosen.shared is not None
            return msgspec.structs.replace(opened, ticket=AdapterTicket(chosen.shared.raw))
        record, raw = await self._signed(chosen.own)
        if self._giver is None:
            self._giver = AdapterGiver(self._host)
        await self._giver.offer([hop.peer for hop in opened.route], chosen.own, record, raw)
        ticket = AdapterTicket(raw)
        if record.allows is Share.PRIVATE:
            sign, now = (await self._key()).sign, self._host.clock.unix()
            ticket = signed_ticket(opened, raw, record, sign, self._host.peer_id, now)
        return msgspec.structs.replace(opened, ticket=ticket)

    async def _signed(self, own: OwnAdapter) -> tuple[AdapterRecord, bytes]:
        key = await self._key()
        record = own.record(self._host.swarm.id, key.peer_id, self._host.clock.unix())
        return record, sign_adapter(record, key.sign)

    async def _key(self) -> Identity:
        if self._home_key is None:
            self._home_key = await asyncio.to_thread(load_home_key, self._host.config.home)
        return self._home_key


def _is_beginning(text: str, adapter: str) -> bool:
    return len(text) >= SHOWN_CHARS and adapter.startswith(text.lower())


def _changed_at(file: Path) -> int:
    """Return the time of a file's last change in nanoseconds; 0 if it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _checked(checkpoint: Checkpoint, folder: Path) -> AdapterFile:
    """Return the adapter in `folder` after a check of its layers. The imports are here because few clients need torch."""
    import torch

    from swarmnode.compute.model.adapters.adapter_file import adapter_in
    from swarmnode.compute.model.assemble import outline

    adapter, family = adapter_in(folder), checkpoint.family
    adapter.check(family, outline(family, 0, family.units, dtype=torch.float32), 0, family.units)
    adapter.check_numbers()
    if adapter.weights.stat().st_size > MAX_WEIGHTS_BYTES:
        raise UsageError(f"{adapter.weights} is over {MAX_WEIGHTS_BYTES >> 30} GiB: an adapter is smaller")
    return adapter
