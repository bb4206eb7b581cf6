"""Adapters in a home folder: those that its owner brings into swarms, and the ids of those that its nodes must not serve."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.errors import CheckpointError, LocalError, UsageError, with_advice
from swarmnode.files import parse_json, read_bounded
from swarmnode.swarm.records.adapter_record import DAY_S, SLOTS, AdapterRecord, Share
from swarmnode.swarm.records.manifest import MAX_CHAT_BYTES
from swarmnode.swarm.storage.chunk_folder import folder_name
from swarmnode.swarm.storage.content import FileContent, describe_files
from swarmnode.swarm.storage.small_files import new_folder, read_stored, write_stored

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # peft's own names
ABOUT_NAME = "about.json"
CHAT_NAME = "chat.json"  # in the home folder, see AdapterChat
TEMPLATE_NAME, TOKENIZER_NAME = "chat_template.jinja", "tokenizer_config.json"  # transformers' own names
MORE_TEMPLATES = "additional_chat_templates"  # its folder
MAX_TEMPLATES = 16
MAX_TOKENIZER_BYTES = 1 << 26  # of a tokenizer's config, which lists its added tokens
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FOLDER = "adapters"  # in the home folder
BLOCKED_NAME = "blocked.json"
MAX_BLOCKED = 4096
MAX_KEPT_BYTES = 1 << 20
RECORD_S = DAY_S  # life of one signed record; peers drop the files at its end


class AdapterTerms(msgspec.Struct, frozen=True):
    """Terms of an adapter, as its owner has set them: its name, the peers that may use it, and its end in unix seconds."""

    name: str
    share: Share
    expires_at: int
    rank: int  # the largest one in its files
    slot: int = 0


class AdapterChat(msgspec.Struct, frozen=True):
    """Form of an adapter's chats: a chat template, or several by their names, and special tokens by their names in it. `tokens` has
    those that the template names, and the end of text, as far as the tokenizer sets them; "" is no token."""

    template: str | dict[str, str]
    tokens: dict[str, str]

    def encode(self) -> bytes:
        """Return the chat as the content of a file. Raises CheckpointError if it is over MAX_CHAT_BYTES."""
        raw = msgspec.json.encode(self, order="sorted")
        if len(raw) > MAX_CHAT_BYTES:
            raise CheckpointError(
                f"the adapter's chat template has {len(raw):,} bytes, over {MAX_CHAT_BYTES:,}: shorten it, or remove it to use the "
                "model's own"
            )
        return raw


def decode_chat(raw: bytes) -> AdapterChat:
    """Return the chat in a file's content. Raises CheckpointError if it is damaged."""
    try:
        return msgspec.json.decode(raw, type=AdapterChat)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the adapter's chat template is damaged: {error}; add the adapter again") from None


def chat_in(folder: Path) -> AdapterChat | None:
    """Return the chat template and tokens that a tokenizer has left in `folder`, as transformers reads them; None if there is no
    template. Raises CheckpointError if a file is damaged or too large."""
    config = read_object(folder / TOKENIZER_NAME, MAX_TOKENIZER_BYTES)
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {str(one.get("name")): one.get("template") for one in named if isinstance(one, dict)}
    templates: dict[str, Any] = dict(named) if isinstance(named, dict) else {} if named is None else {"default": named}
    files = {"default": folder / TEMPLATE_NAME} | {
        path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))[:MAX_TEMPLATES]
    }
    for name, path in files.items():
        if not path.is_file():
            continue
        try:
            raw = read_bounded(path, MAX_CHAT_BYTES)
            templates[name] = None if raw is None else raw.decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; save the tokenizer again") from None
        if raw is None:
            raise CheckpointError(
                f"{path}: over {MAX_CHAT_BYTES:,} bytes: shorten it, or remove it to use the model's own"
            )
    if not templates:
        return None
    if not all(isinstance(template, str) for template in templates.values()):
        raise CheckpointError(f"{folder / TOKENIZER_NAME}: a chat template in it is no text; save the tokenizer again")
    written = "".join(templates.values())
    named_tokens = [name for name in SPECIAL_TOKENS if name in config and (name == "eos_token" or name in written)]
    tokens = {name: value.get("content") if isinstance(value := config[name], dict) else value for name in named_tokens}
    return AdapterChat(
        templates["default"] if templates.keys() == {"default"} else templates,
        {name: token if isinstance(token, str) else "" for name, token in tokens.items()},
    )


def read_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file. Raises CheckpointError if it is none, or over
    `most_bytes`."""
    if not path.is_file():
        return {}
    try:
        raw = read_bounded(path, most_bytes)
        found = None if raw is None else parse_json(raw)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; save it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object of at most {most_bytes:,} bytes; save it again")
    return found


@dataclass(frozen=True)
class OwnAdapter:
    """An adapter of this home folder: its terms, its files, and the folder, as peft saved it, with these files."""

    terms: AdapterTerms
    config: FileContent
    weights: FileContent
    folder: Path
    chat: FileContent | None = None
    """The template of its chats, if that differs from the model's and the adapter was added"""

    def record(self, swarm: bytes, owner: str, now: float) -> AdapterRecord:
        """Return a record that begins at unix time `now`, and ends after RECORD_S or with the adapter's terms. `owner` is the id of
        the key that will sign it."""
        terms = self.terms
        chat = None if terms.share is Share.PRIVATE else self.chat  # of a private one no other needs it
        return AdapterRecord(
            swarm,
            owner,
            terms.name,
            terms.share,
            terms.rank,
            self.config.size,
            self.config.root,
            self.weights.size,
            self.weights.root,
            int(now),
            min(terms.expires_at, int(now) + RECORD_S),
            terms.slot,
            0 if chat is None else chat.size,
            b"" if chat is None else chat.root,
        )

    @property
    def files(self) -> tuple[FileContent, ...]:
        """The adapter's files, as a record has them."""
        return (self.config, self.weights, *(() if self.chat is None else (self.chat,)))

    @property
    def paths(self) -> Mapping[bytes, Path]:
        """The files' paths by their roots."""
        return {file.root: self.folder / file.name for file in self.files}


def adapter_in_folder(folder: Path, terms: AdapterTerms) -> OwnAdapter:
    """Hash the files of an adapter in a folder that peft saved, or `OwnAdapters.add`. Raises LocalError if they cannot be read."""
    names = [CONFIG_NAME, WEIGHTS_NAME, *([CHAT_NAME] if (folder / CHAT_NAME).is_file() else [])]
    try:
        config, weights, *chat = describe_files([folder / name for name in names])
    except OSError as error:
        raise LocalError(f"cannot read the adapter in {folder}: {with_advice(error, 'save it again')}") from error
    return OwnAdapter(terms, config, weights, folder, *chat)


class OwnAdapters:
    """The adapters that the owner of a home folder has added for one swarm."""

    def __init__(self, home: Path, swarm: bytes) -> None:
        self._folder = home / FOLDER / folder_name(swarm)
        self._hashed: dict[Path, OwnAdapter] = {}

    def all(self) -> list[OwnAdapter]:
        """Return the added adapters in the order of their names. A damaged one is left out. Files are hashed once."""
        adapters = []
        for folder in sorted(self._folder.glob("[!.]*/")):  # not those that are being written
            terms = read_stored(folder / ABOUT_NAME, AdapterTerms, max_bytes=MAX_KEPT_BYTES)
            if terms is None:
                continue
            known = self._hashed.get(folder)
            if known is None or known.terms != terms:
                try:
                    known = self._hashed[folder] = adapter_in_folder(folder, terms)
                except LocalError:
                    continue
            adapters.append(known)
        return adapters

    def add(self, source: Path, terms: AdapterTerms, chat: AdapterChat | None = None) -> OwnAdapter:
        """Copy an adapter from the folder `source`, and keep it under `terms.name` with its `chat`, None for the model's own; a
        shared one gets a free slot.

        Raises UsageError if the name is taken or SLOTS adapters are shared already, LocalError if the disk cannot be written.
        """
        others = {one.terms.name.casefold(): one.terms for one in self.all()}
        if terms.name.casefold() in others:
            raise UsageError(
                f"you have added an adapter {terms.name!r} already; remove it first, or choose another --name"
            )
        if terms.share is not Share.PRIVATE:
            taken = {one.slot for one in others.values() if one.share is not Share.PRIVATE}
            free = next((slot for slot in range(SLOTS) if slot not in taken), None)
            if free is None:
                raise UsageError(f"you share {SLOTS} adapters already; remove one of them first")
            terms = msgspec.structs.replace(terms, slot=free)
        folder = self._folder / terms.name
        with new_folder(folder) as partial:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                shutil.copyfile(source / name, partial / name)
            if chat is not None:
                (partial / CHAT_NAME).write_bytes(chat.encode())
            write_stored(partial / ABOUT_NAME, terms)
        return adapter_in_folder(folder, terms)

    def remove(self, name: str) -> None:
        """Delete the adapter `name`. Raises UsageError if there is none, LocalError if it cannot be deleted."""
        if not any(one.terms.name == name for one in self.all()):
            raise UsageError(f"you have added no adapter {name!r}; `swarmnode adapter list` shows them")
        try:
            shutil.rmtree(self._folder / name)
        except OSError as error:
            raise LocalError(f"cannot delete {self._folder / name}: {error.strerror or error}") from error


class BlockedAdapters:
    """Ids of adapters that no node of this home folder serves. Running nodes read the file anew every few seconds."""

    def __init__(self, home: Path) -> None:
        self._path = home / FOLDER / BLOCKED_NAME

    def ids(self) -> frozenset[str]:
        """Return the blocked ids; empty if there is no list."""
        return frozenset(read_stored(self._path, list[str], max_bytes=MAX_KEPT_BYTES) or ())

    def block(self, adapter: str) -> None:
        """Add an id. Raises UsageError if the list is full, LocalError if it cannot be written."""
        ids = self.ids() | {adapter}
        if len(ids) > MAX_BLOCKED:
            raise UsageError(f"{MAX_BLOCKED} adapters are blocked already; unblock some, or run with --adapters none")
        write_stored(self._path, sorted(ids))

    def unblock(self, adapter: str) -> None:
        """Take an id off the list. Raises UsageError if it is not blocked, LocalError if the list cannot be written."""
        if adapter not in self.ids():
            raise UsageError(f"the adapter {adapter[:64]!r} is not blocked here")
        write_stored(self._path, sorted(self.ids() - {adapter}))
