"""Fuzz a whole node in virtual time: strangers greet it properly and then send sequences of frames that are nearly right.

python contrib/fuzz/handlers.py [--frames 100000] [--seed 0]

The strangers use each of the node's protocols. They lead a session as an honest client would (`conversation.py`) and insert
frames that do not fit at any point: of other sessions, on other channels, for other positions, with the bodies of
`protocol/vectors/v1`, some mutated. So conversations are begun, contradicted, taken over, resumed and ended. After every
`ROUND` frames an honest client generates, and must get the same text as before the strangers came. At the end the node must be
alive, no task may have died of a bug, strangers must have had work computed, and memory must be within its bound. Frames count
only until the node cuts the link, as it does after an impossible frame. The same seed sends the same frames. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from conversation import SESSIONS, Conversation, Step
from decoders import MOST_BYTES, hexes, peak_bytes, rows
from mutation import mutate

sys.path.append(str(Path(__file__).parents[2]))  # swarms in virtual time belong to the tests

from swarmnode.codec.audit_messages import AUDIT_PROTOCOL
from swarmnode.codec.body import VERSION
from swarmnode.codec.frames import MAX_BODY_BYTES, FrameKind, pack_header
from swarmnode.codec.messages import KIND_OF, Hello, encode_body
from swarmnode.credit.receipts import CLAIM_PROTOCOL, CREDIT_PROTOCOL
from swarmnode.errors import PeerError
from swarmnode.measuring.bandwidth import PROBE_PROTOCOL
from swarmnode.measuring.trace import TRACE_PROTOCOL
from swarmnode.net.interfaces import Stream
from swarmnode.net.memory.network import FakeNetwork
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.host import MANIFEST_PROTOCOL
from swarmnode.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.weights.chunk_server import WEIGHTS_PROTOCOL
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

QUESTIONS = {
    AUDIT_PROTOCOL: {FrameKind.GET_STATEMENT},
    CREDIT_PROTOCOL: {FrameKind.RECEIPT},
    CLAIM_PROTOCOL: {FrameKind.CLAIM},
    WEIGHTS_PROTOCOL: {FrameKind.GET_CHUNKS},
    MANIFEST_PROTOCOL: {FrameKind.GET_MANIFEST},
    PROBE_PROTOCOL: {FrameKind.PROBE},
    TRACE_PROTOCOL: {FrameKind.GET_TRACE},
}
PROTOCOLS = tuple(QUESTIONS)
ROUND = 2_000
BURST = 20  # frames of one stranger on one stream
CHANNELS = 6
TOKENS = 8
UNITS = 6  # units of the tiny model
FITTING, MUTATED = 0.85, 0.05  # shares of the frames


class Raw(NamedTuple):
    """Frame with an encoded body."""

    kind: FrameKind
    body: bytes
    payload: bytes
    channel: int
    seq: int


class Stranger:
    """Peer that fuzzes over one stream after another."""

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
        """Open a stream, greet, and send up to `BURST` frames; count sent frames and refusals."""
        chance = self._chance
        protocol = chance.choice((SESSION_PROTOCOL, SESSION_PROTOCOL, chance.choice(PROTOCOLS)))
        try:
            stream = await self._network.open(self._victim, protocol, timeout_s=10.0)
        except PeerError:
            self.refused += 1
            return
        session = bytes([chance.randrange(SESSIONS)]) * 16
        led = Conversation(self._victim, UNITS, session, chance)
        self._write(stream, Step(self._hello, b"", 0))
        heard = asyncio.ensure_future(_hear_out(stream))
        for number in range(BURST):
            fits = number < 2 or chance.random() < FITTING
            try:
                self._write(stream, self._fitting(protocol, led) if fits else self._strange(led), mutable=number > 1)
                await asyncio.sleep(chance.choice((0.0, 0.001, 0.01, 0.05)))
            except PeerError:
                break
            if heard.done():
                self.refused += 1
                break
            self.sent += 1
        stream.abort()
        await cancel_and_wait(heard)

    def _write(self, stream: Stream, step: Step | Raw, *, mutable: bool = False) -> None:
        """Send a frame, sometimes with a mutated body if `mutable`. Raises PeerError if the stream has ended."""
        raw = step if isinstance(step, Raw) else Raw(KIND_OF[type(step.body)], encode_body(step.body), *step[1:])
        body = raw.body
        if mutable and self._chance.random() < MUTATED:
            body = mutate(body, self._everything, self._chance)[:MAX_BODY_BYTES]
        stream.write([pack_header(raw.kind, len(body), len(raw.payload), raw.channel, raw.seq) + body + raw.payload])

    def _fitting(self, protocol: str, led: Conversation) -> Step | Raw:
        """Return a frame that fits: the next frame of a session, or a question of another protocol."""
        if protocol == SESSION_PROTOCOL:
            return led.next()
        if protocol == AUDIT_PROTOCOL and self._chance.random() < FITTING:
            return Step(led.question(), b"", 1)
        kind, body = self._chance.choice([one for one in self._bodies if one[0] in QUESTIONS[protocol]])
        return Raw(kind, body, b"", 1, 0)

    def _strange(self, led: Conversation) -> Raw:
        """Return a frame that does not fit here, with another channel, position, payload or body."""
        chance = self._chance
        payload = chance.randbytes(chance.choice((0, 0, 0, 8, 300)))
        channel, seq = chance.choice((1, 1, chance.randrange(CHANNELS))), chance.choice((0, 0, 1, 2, 4, 1 << 31))
        if chance.random() < 0.5:
            step = led.next()
            return Raw(
                KIND_OF[type(step.body)], encode_body(step.body), chance.choice((step.payload, payload)), channel, seq
            )
        kind, body = chance.choice(self._bodies)
        return Raw(kind, body, payload, channel, seq)


async def _hear_out(stream: Stream) -> None:
    """Read and drop all answers until the other side ends the stream."""
    with contextlib.suppress(PeerError):
        while await stream.read():
            pass


class Bugs(logging.Handler):
    """Log handler that collects unexpected errors, as tasks report them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record with an exception."""
        if record.exc_info:
            self.seen.append(record.getMessage())


async def fuzz(frames: int, seed: int, folder: Path) -> dict[str, Any]:
    """Send `frames` frames to a node and return the counts as JSON data. Raises AssertionError if the node misbehaves."""
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
                await network.connect(await door.host.network.addresses(), timeout_s=1)
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
