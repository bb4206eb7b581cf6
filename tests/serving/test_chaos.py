"""Chaos in virtual time: volunteers are killed, stopped for a while and told to leave, while clients generate without pause."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarmnode.serving.client.generation import Generation
from swarmnode.serving.drafting.drafter import Drafting, no_drafting
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import expected
from tests.serving.drafting import toy_drafting
from tests.serving.live_swarm import LiveClient, LiveSwarm, LiveVolunteer

SPANS = [(0, 1), (1, 3), (3, 4)] * 2
FAULT_EVERY_S = 6.0
STOPPED_S = 5.0
RESTART_S = 2.0
LONGEST_WAIT_S = 3.0


class Chaos:
    """Faults on a swarm, one every so often; what was killed or left comes back as a new peer."""

    def __init__(self, swarm: LiveSwarm) -> None:
        self.swarm = swarm
        self.log: list[str] = []
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        loop, random = asyncio.get_running_loop(), self.swarm.random
        end_s = loop.time() + seconds
        for kind in itertools.cycle(["kill", "stop", "leave"]):
            await asyncio.sleep(FAULT_EVERY_S)
            if loop.time() >= end_s:
                break
            victim = random.choice(self.swarm.volunteers)
            self.log.append(f"{loop.time():.1f} {kind} {victim.peer[-6:]} [{victim.start}:{victim.end})")
            self._pending.add(asyncio.ensure_future(getattr(self, kind)(victim)))
        await asyncio.gather(*self._pending)

    async def kill(self, victim: LiveVolunteer) -> None:
        await self.swarm.kill(victim)
        await self._replace(victim)

    async def stop(self, victim: LiveVolunteer) -> None:
        await self.swarm.stop_for(victim, STOPPED_S)

    async def leave(self, victim: LiveVolunteer) -> None:
        await self.swarm.leave(victim)
        await self._replace(victim)

    async def _replace(self, victim: LiveVolunteer) -> None:
        await asyncio.sleep(RESTART_S)
        await self.swarm.add((victim.start, victim.end))


async def generate_for(client: LiveClient, number: int, seconds: float) -> list[Generation]:
    """One text after the other; each is checked."""
    loop = asyncio.get_running_loop()
    end_s, results = loop.time() + seconds, []
    for turn in itertools.count():
        if loop.time() >= end_s:
            return results
        prompt = [number + 1, turn % 90 + 2, 7, 31]
        result = await client.generate(prompt, 60)
        assert result.ids == expected(prompt, 60), "another text"
        results.append(result)
    raise AssertionError


async def longest_wait_s(
    seed: int, seconds: float, *, drafting: Drafting = no_drafting, verbose: bool = False
) -> float:
    """The longest wait for a token, the first ones included, of all texts. `verbose` prints what was done to whom."""
    swarm = await LiveSwarm.start(SPANS, clients=4, seed=seed, drafting=drafting)
    chaos = Chaos(swarm)
    raging = asyncio.ensure_future(chaos.run(seconds))
    everything = await asyncio.gather(*(generate_for(one, i, seconds) for i, one in enumerate(swarm.clients)))
    await raging
    results = [result for results in everything for result in results]
    waits_s = [max(result.longest_stall_s, result.first_token_s) for result in results]
    if verbose:
        print(seed, len(results), "texts, waits", [round(wait_s, 2) for wait_s in sorted(waits_s)[-5:]], chaos.log)
    return max(waits_s)


@pytest.mark.parametrize("seed", [5, 14])
@in_virtual_time
async def test_nobody_waits_long_for_a_token_while_volunteers_come_and_go(seed: int) -> None:
    assert await longest_wait_s(seed, 50.0) <= LONGEST_WAIT_S


@in_virtual_time
async def test_nobody_waits_longer_with_guesses_in_flight() -> None:
    assert await longest_wait_s(3, 10.0, drafting=toy_drafting(0.3)) <= LONGEST_WAIT_S
