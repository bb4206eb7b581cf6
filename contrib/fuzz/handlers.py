"""A whole node, in virtual time, and strangers that greet it properly and then send it sequences of frames that are nearly right.

    python contrib/fuzz/handlers.py [--frames 100000] [--seed 0]

Over each of its protocols. Most frames are those of sessions as they may be here, others have the bodies of
`protocol/vectors/v1`, some mutated; all on a few channels in any order, so that conversations are begun, contradicted, taken over
and ended at any point. After every `ROUND` frames an honest client generates, and must get the text that it got before the
strangers came; at the end the node must be alive, none of its tasks may have died of a bug, strangers must have had something
computed, and memory must be within its bound. The same seed sends the same frames. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decoders import MOST_BYTES, hexes, peak_bytes, rows
from mutation import mutate

sys.path.append(str(Path(__file__).parents[2]))  # swarms in virtual time belong to the tests

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL, GetStatement
from swarmnode.codec.frames import MAX_BODY_BYTES, FrameKind, pack_header
from swarmnode.codec.messages import (
    KIND_OF,
    VERSION,
    Attach,
    Body,
    End,
    Hello,
    HopSpec,
    Input,
    Mode,
    Open,
    Sampling,
    Truncate,
    encode_body,
)
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import PeerError
from swarmnode.net.interfaces import Stream
from swarmnode.net.memory.network import FakeNetwork
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.roles.credit.priorities import CLAIM_PROTOCOL
from swarmnode.roles.credit.receipt_keeper import CREDIT_PROTOCOL
from swarmnode.roles.fetching.seeder import MANIFEST_PROTOCOL, WEIGHTS_PROTOCOL
from swarmnode.roles.measuring.bandwidth import PROBE_PROTOCOL
from swarmnode.roles.measuring.trace_server import TRACE_PROTOCOL
from swarmnode.roles.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.swarm.records.manifest import CREDIT
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

PROTOCOLS = (
    SESSION_PROTOCOL,
    AUDIT_PROTOCOL,
    CREDIT_PROTOCOL,
    CLAIM_PROTOCOL,
    WEIGHTS_PROTOCOL,
    MANIFEST_PROTOCOL,
    PROBE_PROTOCOL,
    TRACE_PROTOCOL,
)
ROUND = 2_000
BURST = 20  # frames of one stranger before it looks whether it is still heard
CHANNELS = 6
TOKENS = 8
UNITS = 6  # of the tiny model
SESSIONS = 4  # that the strangers share
FITTING, MUTATED = 0.8, 0.05  # of the frames


class Stranger:
    """One peer that fuzzes over one stream after another."""

    def __init__(self, network: FakeNetwork, victim: str, hello: Hello, chance: random.Random) -> None:
        self._network = network
        self._victim = victim
        self._hello = hello
        self._chance = chance
        good = [(FrameKind[row["kind"]], bytes.fromhex(row["hex"])) for row in rows("bodies") if "value" in row]
        self._bodies = [(kind, body) for kind, body in good if len(body) <= MAX_BODY_BYTES]
        self._everything = [body for _, body in self._bodies] + hexes("frames")
        self.sent = self.refused = 0

    def __repr__(self) -> str:
        return f"<Stranger that sent {self.sent} frames, and was refused {self.refused} times>"

    async def burst(self) -> None:
        """Greet, and send some frames of one conversation or several."""
        try:
            protocol = self._chance.choice((SESSION_PROTOCOL, self._chance.choice(PROTOCOLS)))
            stream = await self._network.open(self._victim, protocol, timeout_s=10.0)
        except PeerError:
            self.refused += 1
            return
        body = encode_body(self._hello)
        stream.write([pack_header(FrameKind.HELLO, len(body), 0, 0, 0) + body])
        for number in range(BURST):
            if not await self._send(stream, first=number == 0):
                self.refused += 1
                break
        stream.abort()

    async def _send(self, stream: Stream, *, first: bool) -> bool:
        """One frame; whether the stream still is one."""
        chance = self._chance
        payload = chance.randbytes(chance.choice((0, 0, 0, 8, 300)))
        if first or chance.random() < FITTING:
            made, payload = self._fitting(first=first)
            kind, body = KIND_OF[type(made)], encode_body(made)
        else:
            kind, body = chance.choice(self._bodies)
        if not first and chance.random() < MUTATED:
            body = mutate(body, self._everything, chance)[:MAX_BODY_BYTES]
        channel = 1 if first else chance.choice((1, 1, chance.randrange(CHANNELS)))
        seq = chance.choice((0, 0, 0, 1, 2, 4, 1 << 31))
        try:
            stream.write([pack_header(kind, len(body), len(payload), channel, seq) + body + payload])
            self.sent += 1
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.01)))
        except PeerError:
            return False
        return True

    def _fitting(self, *, first: bool) -> tuple[Body, bytes]:
        """A frame of a session as one may be here, and its payload; it may be out of place, but for the first."""
        chance, session = self._chance, bytes([self._chance.randrange(SESSIONS)]) * 16
        count, epoch = chance.choice((1, 2, 4)), chance.randrange(3)
        ids = TensorInfo(Codec.NONE, DType.INT64, (1, count))
        sampling = Sampling(prompt_length=count, max_new_tokens=chance.choice((1, 4)))
        route = (HopSpec(self._victim, 0, chance.choice((UNITS, UNITS, 3))),)
        opened = Open(session, epoch, route, 0, chance.choice((Mode.RING, Mode.DRIVEN)), 1, 8, sampling=sampling)
        made: tuple[tuple[Body, bytes], ...] = (
            (opened, b""),
            (opened, b""),
            (Attach(session, epoch, chance.randrange(4)), b""),
            (Input(ids, want=chance.randrange(3)), bytes(8 * count)),
            (Input(ids, want=chance.randrange(3)), bytes(8 * count)),
            (Truncate(chance.randrange(1, 4), chance.randrange(4)), b""),
            (GetStatement(session, bytes(16), chance.randrange(4), count), b""),
            (End(), b""),
        )
        return made[0] if first else chance.choice(made)


class Bugs(logging.Handler):
    """What died of an error that nobody expected, as tasks tell it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it where it is one."""
        if record.exc_info:
            self.seen.append(record.getMessage())


async def fuzz(frames: int, seed: int, folder: Path) -> dict[str, Any]:
    """What came of so many frames. Raises AssertionError."""
    began_s, chance, bugs = time.perf_counter(), random.Random(seed), Bugs()
    logging.getLogger("swarmnode").addHandler(bugs)
    model = TinyModel.save(folder / "model")
    (folder / "swarm").mkdir()
    async with VirtualSwarm(folder / "swarm") as swarm:
        swarm.create(model.folder, priority=CREDIT)
        door = await swarm.bootstrap()
        node = swarm.node("victim")
        await node.wait_for("ready")
        hello = Hello(VERSION, swarm.load().id)
        async with swarm.client() as client:
            expected = (await client.generate(PROMPT, max_new_tokens=TOKENS)).ids
            before_bytes, sent, refused, honest = peak_bytes(), 0, 0, UNITS * (len(PROMPT) + TOKENS - 1)
            while sent < frames:
                network = swarm.world.join(host=f"198.51.{chance.randrange(256)}.{chance.randrange(256)}")
                await network.connect(await door.addresses(), timeout_s=1)
                stranger = Stranger(network, node.peer, hello, chance)
                while stranger.sent < min(ROUND, frames - sent) and stranger.refused < ROUND // BURST:
                    await stranger.burst()
                sent, refused = sent + max(1, stranger.sent), refused + stranger.refused
                await network.close()
                assert not node.over, "the node ended"
                assert (await client.generate(PROMPT, max_new_tokens=TOKENS)).ids == expected, "another text"
                assert not bugs.seen, bugs.seen
                honest += UNITS * (len(PROMPT) + TOKENS - 1)
            assert node.node._host is not None
            computed = node.node._host.completed.total - honest
            assert computed > 0, "no session of a stranger came to computing"
            grown_bytes = peak_bytes() - before_bytes
            assert grown_bytes < MOST_BYTES, f"memory grew by {grown_bytes / 1e6:.0f} MB"
    logging.getLogger("swarmnode").removeHandler(bugs)
    return {
        "frames": sent,
        "seed": seed,
        "computed_unit_tokens": computed,
        "refused": refused,
        "grown_bytes": grown_bytes,
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-fuzz-") as folder:
        print(json.dumps(run_virtual(fuzz(options.frames, options.seed, Path(folder))), indent=2))


if __name__ == "__main__":
    main()
