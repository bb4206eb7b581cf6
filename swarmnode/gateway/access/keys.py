"""API keys and their limits.

A key file holds only hashes of the keys, one line per key:

alice 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 per_minute=60 concurrent=4

A key is 256 random bits, so a plain SHA-256 of it can be neither inverted nor guessed.

Fair queueing: the keys take turns at the places to generate, however many requests wait under one key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.files import write_private
from swarmnode.gateway.http.api_error import too_many
from swarmnode.swarm.storage.small_files import read_user_file

log = logging.getLogger(__name__)

PREFIX = "sk-swarmnode-"
KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 20
WHAT = "a file of API keys"
NAME = re.compile(r"[\w.@-]{1,64}")
LOOK_S = 1.0
HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; 0 means no limit."""

    per_minute: int = 0  # requests; after a minute without any, this many at once
    concurrent: int = 0  # generations at once


class ApiKey:
    """API key of one client: its name, its limits, and the state of its rate limiter."""

    def __init__(
        self, name: str, limits: KeyLimits = KeyLimits(), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._paid_until_s = float("-inf")

    def __repr__(self) -> str:
        return f"<ApiKey {self.name} {self.limits}>"

    def count_request(self) -> float:
        """Count a request and return 0 if the rate limit allows it; else return the seconds until it will, and do not count it. The
        limiter is a leaky bucket (GCRA)."""
        if not self.limits.per_minute:
            return 0.0
        now_s, cost_s = self._clock(), 60.0 / self.limits.per_minute
        paid_until_s = max(self._paid_until_s, now_s) + cost_s
        if paid_until_s - now_s > 60.0 + 1e-9:
            return paid_until_s - now_s - 60.0
        self._paid_until_s = paid_until_s
        return 0.0


ANYBODY = "anybody"


class KeyRing:
    """API keys of a gateway. An empty ring admits every client, all under one key."""

    def __init__(self, keys: dict[str, ApiKey] | None = None) -> None:
        self._keys = keys or {}  # by the key's hash
        self._anybody = ApiKey(ANYBODY)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)} keys>"

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str | None) -> ApiKey | None:
        """Return the key whose text is `presented`; None if there is no such key. An empty ring always returns its common
        key."""
        if not self._keys:
            return self._anybody
        return None if presented is None else self._keys.get(_hash(presented))


class KeyFile(KeyRing):
    """API keys in a file, read again when the file changes. If the changed file is invalid, the last valid content stays in
    force."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read `path`. Raises UsageError if the file is missing, holds no key, or has an invalid line, which the error names."""
        self._path = path
        self._clock = clock
        self._checked_s = clock()
        self._version = _version(path)
        super().__init__(_read_keys(path, clock))

    def find(self, presented: str | None) -> ApiKey | None:
        if self._clock() - self._checked_s >= LOOK_S:
            self._reload()
        return super().find(presented)

    def _reload(self) -> None:
        self._checked_s, version = self._clock(), _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            read = _read_keys(self._path, self._clock)
        except UsageError as error:
            log.warning("the key file has changed but cannot be used, so the old keys still apply: %s", error)
            return
        for digest, before in self._keys.items():
            now = read.get(digest)
            if now is not None and (before.name, before.limits) == (now.name, now.limits):
                read[digest] = before  # its rate limiter keeps its state
        self._keys = read
        log.info("%s has changed: %r", self._path, self)


def _version(path: Path) -> tuple[int, ...]:
    """Return a value that changes when the file is written; empty if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_keys(path: Path, clock: Callable[[], float]) -> dict[str, ApiKey]:
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT)
    if data is None:
        raise UsageError(f"{path}: no such file; make a key with --new-key NAME")
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            name, digest, *pairs = words
            if not NAME.fullmatch(name) or not HASH.fullmatch(digest):
                raise ValueError(line)
            if digest in keys:
                raise UsageError(
                    f"{path}, line {number}: this key already has a line, as {keys[digest].name}: remove one of them"
                )
            limits = KeyLimits(**{word: int(value) for word, value in (pair.split("=", 1) for pair in pairs)})
            if min(limits.per_minute, limits.concurrent) < 0:
                raise ValueError(limits)
            keys[digest] = ApiKey(name, limits, clock=clock)
        except (ValueError, TypeError):
            allowed = " ".join(f"[{field.name}=N]" for field in fields(KeyLimits))
            raise UsageError(f"{path}, line {number}: write NAME SHA256 {allowed}") from None
    if not keys:
        raise UsageError(f"{path} holds no key; make one with --new-key NAME")
    return keys


def new_key(path: Path, name: str) -> str:
    """Create a key called `name`, add its hash to the file, and return the key, which is stored nowhere else. Raises UsageError if
    the name is not possible, LocalError if the file cannot be written."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a key's name: use letters, digits and . _ @ -")
    known = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT) or b""
    if known and not known.endswith(b"\n"):
        known += b"\n"
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    write_private(path, known + f"{name} {_hash(key)}\n".encode())
    return key


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


RETRY_S = 2.0


class FairQueue:
    """Queue for `running` places; each key may take as many as its limits allow. At most `waiting` requests of one key may
    wait, each for `wait_s` seconds."""

    def __init__(self, *, running: int, waiting: int, wait_s: float) -> None:
        self._places = running
        self._max_waiting = waiting
        self._wait_s = wait_s
        self._running: Counter[ApiKey] = Counter()
        self._waiting: dict[ApiKey, deque[asyncio.Future[None]]] = {}  # the key with the next turn comes first

    @property
    def running(self) -> int:
        """Number of places that are taken."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Number of waiting requests, all keys together."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, key: ApiKey) -> AsyncIterator[None]:
        """Hold a place while the context lasts. Raises ApiError (429) if the key has too many waiting requests, or no place becomes
        free in time."""
        await self._enter(key)
        try:
            yield
        finally:
            self._leave(key)

    async def _enter(self, key: ApiKey) -> None:
        queue = self._waiting.setdefault(key, deque())
        if len(queue) >= self._max_waiting:
            raise too_many(f"{len(queue)} requests of this key are already waiting: try again later", RETRY_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._give_places()
        if turn.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._wait_s)
        except BaseException as error:
            if turn.done():  # the place came in the same moment
                self._leave(key)
            else:
                turn.cancel()
                self._waiting[key].remove(turn)
                if not self._waiting[key]:
                    del self._waiting[key]
            if isinstance(error, asyncio.TimeoutError):
                raise too_many(f"no place became free within {self._wait_s:.0f} s: try again later", RETRY_S) from None
            raise

    def _leave(self, key: ApiKey) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._give_places()

    def _give_places(self) -> None:
        while self.running < self._places:
            for key, queue in self._waiting.items():
                if queue and self._running[key] < (key.limits.concurrent or self._places):
                    break
            else:
                return
            del self._waiting[key]
            self._running[key] += 1
            queue.popleft().set_result(None)
            if queue:
                self._waiting[key] = queue  # behind the others
