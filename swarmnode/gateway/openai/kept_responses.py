"""Responses that a gateway keeps for a day, so that a later request can continue the conversation of one of them.

Each response is a file in the home folder, encrypted with AES-GCM by a key beside them. The names of the files are keyed hashes of
the API key's name and of the response's id, so that a client finds its own responses only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarmnode.errors import LocalError
from swarmnode.files import read_bounded, write_private

log = logging.getLogger(__name__)

FOLDER, KEY_FILE = "responses", "responses.key"
LIFE_S = 86_400.0
MOST_RESPONSES = 1000  # of one API key; the oldest ones are removed
MOST_BYTES = 64 << 20  # of one API key
MAX_BYTES = 8 << 20  # of one response with its conversation
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
NAME_CHARS = 32


class ItemPart(msgspec.Struct, omit_defaults=True):
    """Part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """Item of a conversation, in the format of OpenAI's API: a message, a tool call, its result, or the model's reasoning."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: list[Any] | None = None

    @property
    def text(self) -> str:
        """Text of the content; empty without content."""
        return "".join(part.refusal or part.text or "" for part in self.content or ())


class StoredOutput(msgspec.Struct):
    """The part of a response's JSON that continues a conversation."""

    output: list[Item]


class StoredResponse(msgspec.Struct):
    """Kept response: its JSON, and the items that it answers, including those of the responses before it."""

    created_s: float
    reply: msgspec.Raw
    input: list[Item]

    def conversation(self) -> list[Item]:
        """Return the items of the conversation up to the end of the response."""
        return [*self.input, *msgspec.json.decode(self.reply, type=StoredOutput).output]


class ResponseStore:
    """Responses that the gateways of one home folder keep. `owner` is the name of the API key whose client asked for the response.
    All methods block while they use the disk."""

    def __init__(self, home: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._home = home
        self._folder = home / FOLDER
        self._clock = clock
        self._key_bytes: bytes | None = None

    def store(self, owner: str, id: str, reply: bytes, items: Sequence[Item]) -> None:
        """Keep the response `id`, which answers `items`. Removes the owner's oldest responses if there are more than
        `MOST_RESPONSES`, or more than `MOST_BYTES`. Raises LocalError if it is too large or cannot be written."""
        kept = StoredResponse(self._clock(), msgspec.Raw(reply), list(items))
        content = msgspec.json.encode(kept)
        if len(content) > MAX_BYTES:
            raise LocalError(f"the conversation has {len(content):,} bytes, and at most {MAX_BYTES:,} are kept")
        path, key = self._path(owner, id), self._key()
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            write_private(path, nonce + AESGCM(key).encrypt(nonce, content, _names(owner, id)), make_folder=True)
            # The oldest files go, until both bounds hold.
            total_bytes = 0
            for count, (_, size_bytes, file) in enumerate(sorted(_files(path.parent), reverse=True), start=1):
                total_bytes += size_bytes
                if count > MOST_RESPONSES or total_bytes > MOST_BYTES:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise LocalError(f"cannot write {self._folder}: {error.strerror or error}") from error

    def find(self, owner: str, id: str) -> StoredResponse | None:
        """Return the response `id` of `owner`; None if there is none, it has expired, or its file cannot be read."""
        if not self._folder.is_dir():
            return None
        try:
            sealed = read_bounded(self._path(owner, id), MAX_BYTES + NONCE_BYTES + TAG_BYTES) or b""
            content = AESGCM(self._key()).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _names(owner, id))
            kept = msgspec.json.decode(content, type=StoredResponse)
        except FileNotFoundError:
            return None
        except (OSError, LocalError, InvalidTag, ValueError) as error:  # msgspec's and AES-GCM's errors are ValueErrors
            log.warning("a kept response cannot be read: %s: %s", type(error).__name__, error)
            return None
        return kept if kept.created_s > self._clock() - LIFE_S else None

    def remove(self, owner: str, id: str) -> bool:
        """Remove the response `id` of `owner`. Returns False if there is none, or if it has expired. Raises LocalError if the file
        cannot be removed."""
        if self.find(owner, id) is None:
            return False
        path = self._path(owner, id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LocalError(f"cannot remove {path}: {error.strerror or error}") from error
        return True

    def sweep(self) -> None:
        """Remove the expired responses of all owners."""
        oldest_s = self._clock() - LIFE_S
        try:
            for folder in self._folder.iterdir():
                for written_s, _, path in _files(folder):
                    if written_s < oldest_s:
                        path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("expired responses remain: %s", error)

    def _path(self, owner: str, id: str) -> Path:
        return self._folder / self._hashed(owner.encode()) / self._hashed(_names(owner, id))

    def _hashed(self, name: bytes) -> str:
        return hmac.new(self._key(), name, hashlib.sha256).hexdigest()[:NAME_CHARS]

    def _key(self) -> bytes:
        """Return the key of this home, and make it if there is none. Raises LocalError if its file is unusable."""
        if self._key_bytes is None:
            path = self._home / KEY_FILE
            try:
                if not path.exists():
                    _write_first(path, secrets.token_bytes(KEY_BYTES))
                self._key_bytes = read_bounded(path, KEY_BYTES)
            except OSError as error:
                raise LocalError(f"cannot read {path}: {error.strerror or error}") from error
            if self._key_bytes is None or len(self._key_bytes) != KEY_BYTES:
                self._key_bytes = None
                raise LocalError(f"{path} is no key of {KEY_BYTES} bytes: remove it, and the kept responses are lost")
        return self._key_bytes


def _names(owner: str, id: str) -> bytes:
    return f"{owner}\0{id}".encode(errors="surrogatepass")


def _write_first(path: Path, data: bytes) -> None:
    """Write a file, unless another process writes it first."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_private(own, data, make_folder=True)
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        own.unlink()


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield for each file the time at which it was written, its size and its path. A file that another process removes meanwhile is
    left out."""
    for path in folder.iterdir():
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        yield found.st_mtime, found.st_size, path
