"""Fuzz every decoder of other peers' data with inputs that are nearly right. Prints JSON.

    python contrib/fuzz/decoders.py [--inputs 1000000] [--seed 0]

The inputs are mutated vectors of `protocol/vectors/v1`; the same seed makes the same inputs. A decoder must return or raise
`ProtocolError` or `UsageError` within `SLOWEST_S`. Otherwise the input is printed and the exit status is 1. Bodies and runs are
encoded again after decoding, which must not fail. Memory must not grow by more than `MOST_BYTES`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation import mutate

from swarmnode.codec.frames import FrameKind, FrameReader
from swarmnode.codec.messages import decode_body, encode_body
from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import decode
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.net.direct.direct_stream import DirectionKey, RecordReader
from swarmnode.net.identity import verify
from swarmnode.swarm.records.announcement import open_announcement
from swarmnode.swarm.records.invite import decode_invite, open_certificate, open_grant
from swarmnode.swarm.records.manifest import decode_manifest
from swarmnode.swarm.records.membership import open_list
from swarmnode.swarm.records.receipt import open_receipt
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from swarmnode.swarm.records.statement import open_statement

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "v1"
SLOWEST_S = 2.0
MOST_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 16
SWARM, KEY = bytes(range(32)), bytes(range(32))

Decoder = Callable[[bytes], Any]


@dataclass
class Target:
    """Decoder with its seed inputs and the counts of its outcomes."""

    decode: Decoder
    seeds: list[bytes]
    outcomes: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        return f"<Target with {len(self.seeds)} seeds, {dict(self.outcomes)}>"


class Fault(Exception):
    """Forbidden behaviour of a decoder."""


def rows(name: str) -> list[Mapping[str, Any]]:
    """Return the rows of the vector file `name`."""
    return [json.loads(line) for line in (VECTORS / f"{name}.jsonl").read_text().splitlines()]


def hexes(name: str) -> list[bytes]:
    """Return the bytes of all rows of the vector file `name`."""
    return [bytes.fromhex(row["hex"]) for row in rows(name)]


def body_decoder(kind: FrameKind) -> Decoder:
    def decode_and_encode(raw: bytes) -> None:
        body = decode_body(kind, raw)
        if decode_body(kind, encode_body(body)) != body and "nan" not in repr(body):
            raise Fault("decoding, encoding and decoding again gives another body")

    return decode_and_encode


def read_stream(raw: bytes) -> None:
    reader = FrameReader(max_payload_bytes=1 << 16)
    for start in range(0, len(raw), 7):
        for frame in reader.feed(raw[start : start + 7]):
            if len(frame.payload) > 1 << 16:
                raise Fault("a payload above the bound")


def read_tensor(raw: bytes) -> None:
    """Decode a tensor from `raw`: a byte each for codec and dtype, two for the element count (the second is also the codec's
    parameter), then the payload. Ignores short inputs and unknown codecs. Raises Fault if the result exceeds `MAX_ELEMENTS`."""
    if len(raw) < 4 or raw[0] not in Codec._value2member_map_:
        return
    info = TensorInfo(raw[0], raw[1] % 8, (int.from_bytes(raw[2:4], "little"),), raw[3])
    decoded = decode(info, raw[4:], max_elements=MAX_ELEMENTS)
    if decoded.numel() > MAX_ELEMENTS:
        raise Fault("more elements than the bound")


def read_run(raw: bytes) -> None:
    encode_run(decode_run(raw))


def read_records(raw: bytes) -> None:
    reader = RecordReader(DirectionKey(KEY))
    for start in range(0, len(raw), 7):
        piece = raw[start : start + 7]
        reader.room()[: len(piece)] = piece
        list(reader.advance(len(piece)))


def targets() -> dict[str, Target]:
    """Return all targets by name; every kind of body is a separate target."""
    bodies: dict[str, list[bytes]] = {}
    for row in rows("bodies"):
        bodies.setdefault(row["kind"], []).append(bytes.fromhex(row["hex"]))
    tensors = [bytes([codec, 0, 64, 0]) + bytes(300) for codec in Codec] + hexes("tensors")
    return {
        **{f"body {kind}": Target(body_decoder(FrameKind[kind]), seeds) for kind, seeds in bodies.items()},
        "stream": Target(read_stream, hexes("frames")),
        "records": Target(read_records, [b"".join(DirectionKey(KEY).seal(text)) for text in (b"", b"a", bytes(40))]),
        "tensor": Target(read_tensor, tensors),
        "run": Target(read_run, [encode_run(Run(data=bytes(32), steps=9, batch=8, microbatch=4))]),
        "manifest": Target(decode_manifest, hexes("manifests")),
        "receipt": Target(lambda raw: open_receipt(raw, SWARM, verify), hexes("receipts")),
        "announcement": Target(lambda raw: open_announcement(raw, SWARM, verify), hexes("announcements")),
        "invite": Target(lambda raw: decode_invite(raw.decode("utf-8", "replace")), [b"swarm1"]),
        "certificate": Target(lambda raw: open_certificate(raw, SWARM, KEY), hexes("certificates")),
        "grant": Target(lambda raw: open_grant(raw, SWARM, KEY), hexes("certificates")),
        "revocation list": Target(lambda raw: open_list(raw, SWARM, KEY), hexes("revocations")),
        "statement": Target(lambda raw: open_statement(raw, SWARM, verify), hexes("statements")),
    }


def try_one(target: Target, raw: bytes) -> None:
    """Decode `raw` and count the outcome. Raises Fault if the decoder misbehaves or is too slow."""
    began_s = time.perf_counter()
    try:
        target.decode(raw)
        target.outcomes["taken"] += 1
    except (ProtocolError, UsageError):
        target.outcomes["refused"] += 1
    except Fault:
        raise
    except BaseException as error:
        raise Fault(f"{type(error).__name__}: {error}") from error
    took_s = time.perf_counter() - began_s
    if took_s > SLOWEST_S:
        raise Fault(f"it took {took_s:.1f} s")


def fuzz(inputs: int, seed: int) -> dict[str, Any]:
    """Try `inputs` mutated inputs and return the counts as JSON data. Raises Fault, with the input in its text, if a decoder
    misbehaves, or if memory grows too much."""
    chance, began_s = random.Random(seed), time.perf_counter()
    found = targets()
    names = list(found)
    everything = [seed for target in found.values() for seed in target.seeds]
    for name in names:  # imports and caches of the first calls do not count as growth
        for raw in found[name].seeds:
            try_one(found[name], raw)
    before_bytes = peak_bytes()
    for _ in range(inputs):
        name = chance.choice(names)
        raw = mutate(chance.choice(found[name].seeds), everything, chance)
        try:
            try_one(found[name], raw)
        except Fault as fault:
            raise Fault(f"{name}, {raw.hex()}: {fault}") from fault
    grown_bytes = peak_bytes() - before_bytes
    if grown_bytes > MOST_BYTES:
        raise Fault(f"memory grew by {grown_bytes / 1e6:.0f} MB")
    outcomes = sum((target.outcomes for target in found.values()), Counter())
    seconds = round(time.perf_counter() - began_s, 1)
    return {
        "inputs": inputs,
        "seed": seed,
        "decoders": len(names),
        **outcomes,
        "grown_bytes": grown_bytes,
        "seconds": seconds,
    }


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        print(json.dumps(fuzz(options.inputs, options.seed), indent=2))
    except Fault as fault:
        sys.exit(str(fault))


if __name__ == "__main__":
    main()
