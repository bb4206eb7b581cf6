"""Fuzz of serving: any one peer, at any message, falls silent, answers with an error, or answers PING alone.

For every seed the request ends with the right text, or with a sentence; and no honest peer stays suspected.
"""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error, Fault
from swarmnode.errors import ErrorCode, SwarmnodeError
from swarmnode.links.switchboard import Channel
from swarmnode.serving.drafting.drafter import Drafting, no_drafting
from swarmnode.serving.job import Job
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import expected
from tests.serving.drafting import toy_drafting
from tests.serving.live_swarm import LiveSwarm, LiveVolunteer

SPANS = [(0, 1), (1, 3), (3, 4)] * 2
ANSWERS = [ErrorCode.INTERNAL, ErrorCode.BUSY, ErrorCode.NO_SESSION, ErrorCode.NOT_FINITE, ErrorCode.INVALID_REQUEST]
WAYS = ["dies", "hangs", "answers PING alone", "computes no more", "answers ERROR", "answers FAULT"]
TEXTS, TOKENS = 3, 25
ENDS_WITHIN_S = 90.0


class Fuzz:
    """Counts what the volunteers are given; whoever gets the one that is drawn misbehaves from then on."""

    def __init__(self, swarm: LiveSwarm, seed: int) -> None:
        self.random = random.Random(seed)
        self.swarm = swarm
        self.way = self.random.choice(WAYS)
        self.victim: LiveVolunteer | None = None
        self._left = self.random.randrange(1, 200)
        for one in swarm.volunteers:
            self._arm(one)

    def __repr__(self) -> str:
        whose = "nobody" if self.victim is None else f"[{self.victim.start}:{self.victim.end})"
        return f"<Fuzz: {whose} {self.way}>"

    def _arm(self, one: LiveVolunteer) -> None:
        board, submit = one.server.switchboard, one.worker.submit
        accept = board._accept
        assert accept is not None

        def fuzzed_accept(channel: Channel, frame: Frame, body: Body) -> None:
            if self._is_handled(one, channel):
                accept(channel, frame, body)

        def fuzzed_submit(job: Job) -> None:
            if self._is_handled(one, None):
                submit(job)

        board._accept = fuzzed_accept
        one.worker.submit = fuzzed_submit  # type: ignore[method-assign]

    def _is_handled(self, one: LiveVolunteer, channel: Channel | None) -> bool:
        self._left -= 1
        if self._left == 0:
            self.victim = one
            if self.way == "dies":
                self._dying = asyncio.ensure_future(self.swarm.kill(one))
            elif self.way == "hangs":
                self.swarm.world.hang(one.peer)
            elif self.way == "computes no more":
                one.worker.step_s = math.inf
        if one is not self.victim or self.way in ("hangs", "computes no more"):
            return True
        if self.way == "answers ERROR" and channel is not None:
            channel.close(Error(self.random.choice(ANSWERS)))
        elif self.way == "answers FAULT" and channel is not None:
            channel.send(Fault(1, self.random.randrange(3), self.random.choice(ANSWERS), 0.0))
        return False  # of the rest nothing is handled: PING is all that it answers


async def ends_well(seed: int, drafting: Drafting = no_drafting) -> str:
    """One fuzzed run; what became of it. Raises AssertionError where somebody waits for ever or an honest peer is blamed."""
    swarm = await LiveSwarm.start(SPANS, clients=1, seed=seed, drafting=drafting)
    fuzz, client, ends = Fuzz(swarm, seed), swarm.clients[0], []
    for number in range(TEXTS):
        prompt = [number + 1, seed % 90 + 2, 7]
        try:
            result = await asyncio.wait_for(client.generate(prompt, TOKENS), ENDS_WITHIN_S)
        except SwarmnodeError as error:
            ends.append(str(error))
        else:
            assert result.ids == expected(prompt, TOKENS), fuzz
            ends.append(f"{max(result.first_token_s, result.longest_stall_s):.1f} s")
    await asyncio.sleep(15.0)  # of virtual time: everybody has announced itself again
    assert swarm.suspected() <= {one.peer for one in [fuzz.victim] if one is not None}, fuzz
    return f"{fuzz!r}: {ends}"


@pytest.mark.parametrize("seed", [0, 5, 6, 10, 16, 20, 23, 29])
@in_virtual_time
async def test_every_request_ends_whatever_one_peer_does(seed: int) -> None:
    await ends_well(seed)


@pytest.mark.parametrize("seed", [1, 8, 14, 33, 120])
@in_virtual_time
async def test_every_request_ends_also_with_guesses_in_flight(seed: int) -> None:
    await ends_well(seed, toy_drafting(0.15 * (seed % 5)))
