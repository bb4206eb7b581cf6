"""Mutation of bytes and msgpack structures into nearly valid ones. The result depends only on the input and the
`random.Random`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

EDGES: tuple[Any, ...] = (
    0,
    1,
    -1,
    0xFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    0.0,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    None,
    True,
    False,
    "",
    "\x1b[2J",
    "\ud7ff" * 8,
    b"",
    b"\0" * 33,
    [],
    {},
    [[]] * 3,
)
LENGTHS = (
    b"\xff" * 4,
    b"\x7f" + b"\xff" * 3,
    b"\0\0\1\0",
    b"\xdd",
    b"\xdf",
    b"\xc6",
    b"\xdb",
)  # of arrays, maps, texts
DEEPEST = 4


def mutate(raw: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a mutation of `raw`, with other bytes or another msgpack structure. Pieces of `others` may be spliced in."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        raw = chance.choice(WAYS)(raw, others, chance)
    return raw


def _flip(raw: bytes, _others: Sequence[bytes], chance: random.Random) -> bytes:
    if not raw:
        return bytes([chance.randrange(256)])
    changed = bytearray(raw)
    for _ in range(chance.choice((1, 1, 3))):
        changed[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(changed)


def _cut(raw: bytes, _others: Sequence[bytes], chance: random.Random) -> bytes:
    start = chance.randrange(len(raw) + 1)
    return raw[:start] if chance.random() < 0.5 else raw[:start] + raw[start + chance.randrange(1, 9) :]


def _splice(raw: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    return raw[: chance.randrange(len(raw) + 1)] + other[chance.randrange(len(other) + 1) :]


def _lie_of_length(raw: bytes, _others: Sequence[bytes], chance: random.Random) -> bytes:
    start = chance.randrange(len(raw) + 1)
    lie = chance.choice(LENGTHS)
    return raw[:start] + lie + raw[start + chance.choice((0, len(lie))) :]


def _restructure(raw: bytes, _others: Sequence[bytes], chance: random.Random) -> bytes:
    """Change a field of the msgpack structure `raw`; flip bytes if `raw` is not msgpack."""
    try:
        return msgspec.msgpack.encode(_other_value(msgspec.msgpack.decode(raw), chance, 0))
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError, UnicodeError):
        return _flip(raw, (), chance)


def _other_value(value: Any, chance: random.Random, depth: int) -> Any:
    if isinstance(value, list) and value and depth < DEEPEST and chance.random() < 0.9:
        place = chance.randrange(len(value))
        changed = list(value)
        if chance.random() < 0.15:
            changed[place : place + chance.choice((0, 1))] = [chance.choice(value)] * chance.choice((0, 2, 70))
        else:
            changed[place] = _other_value(value[place], chance, depth + 1)
        return changed
    if isinstance(value, dict) and value and depth < DEEPEST and chance.random() < 0.9:
        key = chance.choice(list(value))
        return {**value, key: _other_value(value[key], chance, depth + 1)}
    if isinstance(value, bytes | str) and value and chance.random() < 0.5:
        return value * chance.choice((0, 2, 40)) if chance.random() < 0.5 else value[1:]
    if isinstance(value, int) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 255, 1 << 20))
    return chance.choice(EDGES)


WAYS: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _flip,
    _cut,
    _splice,
    _lie_of_length,
    _restructure,
    _restructure,
    _restructure,
)
