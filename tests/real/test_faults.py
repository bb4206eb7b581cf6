"""What only real processes show of faults: signals. At which token and hop they strike is varied in tests/node (virtual time)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.localswarm import STOP_TIMEOUT_S
from swarmnode.serving.client.generation import Generation
from tests.real.conftest import Stages
from tests.tiny import PROMPT, TinyModel

ASKED = 4000  # nodes draw on while a client that gets no processor reads nothing: so many are never over before they are struck
TOKENS = 240  # of these, compared


async def generate_and(client: SwarmClient, at: int, strike: object) -> Generation:
    """Generate until the text has been rerouted; at token number `at` call `strike(route)`."""
    stream = await client.stream(PROMPT, max_new_tokens=ASKED)
    number = 0
    async with contextlib.aclosing(aiter(stream)) as pieces:
        async for _ in pieces:
            number += 1
            if number == at:
                strike(stream.result.route)  # type: ignore[operator]
            if number >= TOKENS and stream.result.reroutes:
                break
    return stream.result


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """SIGSTOP it, and wake it in the end."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


async def test_killed_nodes_do_not_change_the_text(stages: Stages, tiny: TinyModel) -> None:
    async with stages.client() as client:

        def strike(route: Sequence[object]) -> None:
            for hop in route:
                stages.member(hop.peer).kill()  # type: ignore[attr-defined]

        result = await generate_and(client, 3, strike)
    assert result.ids[:TOKENS] == tiny.alone(PROMPT, TOKENS)
    assert result.reroutes >= 1


async def test_a_hung_node_is_left_and_cannot_disturb_when_it_wakes(stages: Stages, tiny: TinyModel) -> None:
    async with stages.client() as client:
        with contextlib.ExitStack() as hung:

            def strike(route: Sequence[object]) -> None:
                member = stages.member(route[1].peer)  # type: ignore[attr-defined]
                hung.enter_context(stopped(psutil.Process(member.pid)))

            result = await generate_and(client, 3, strike)
        assert result.ids[:TOKENS] == tiny.alone(PROMPT, TOKENS)
        assert result.reroutes >= 1
        again = await client.generate(PROMPT, max_new_tokens=TOKENS)
        assert again.ids == result.ids[:TOKENS]


async def test_a_killed_p2pd_is_mended_and_its_node_used_again(stages: Stages, tiny: TinyModel) -> None:
    async with stages.client() as client:
        struck: list[str] = []

        def strike(route: Sequence[object]) -> None:
            struck.append(route[1].peer)  # type: ignore[attr-defined]
            (p2pd,) = psutil.Process(stages.member(struck[0]).pid).children()
            p2pd.kill()

        result = await generate_and(client, 3, strike)
        assert result.ids[:TOKENS] == tiny.alone(PROMPT, TOKENS)
        for name, member in stages.nodes.items():
            if name.startswith("b") and member.peer != struck[0]:
                member.kill()  # now only the mended one holds these units
        again = await client.generate(PROMPT, max_new_tokens=TOKENS)
    assert again.ids == result.ids[:TOKENS]
    assert again.route[1].peer == struck[0]


async def test_a_leaving_node_hands_its_sessions_over(stages: Stages, tiny: TinyModel) -> None:
    async with stages.client() as client:
        leaving = []

        def strike(route: Sequence[object]) -> None:
            leaving.append(stages.member(route[1].peer))  # type: ignore[attr-defined]
            leaving[0].kill(signal.SIGINT)

        result = await generate_and(client, 3, strike)
        await asyncio.to_thread(leaving[0].finish, STOP_TIMEOUT_S)
    assert result.ids[:TOKENS] == tiny.alone(PROMPT, TOKENS)
    assert leaving[0].process.returncode == 0


async def test_the_sessions_of_a_killed_client_are_freed(stages: Stages) -> None:
    asked = ("generate", str(stages.local.file), "--ids", ",".join(map(str, PROMPT)), "-n", "4000")
    async with stages.client() as client:

        async def until_sessions(some: bool) -> None:
            while any(peer["sessions"] for peer in client.status()["peers"]) is not some:
                await client.changed()

        dying = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "swarmnode.cli.main", *asked, env=stages.local.environment, stdout=subprocess.PIPE
        )
        assert dying.stdout is not None
        await dying.stdout.readexactly(4)  # it has tokens: its session is open
        with stopped(psutil.Process(dying.pid)):  # it would have ended its text before the session is announced
            await until_sessions(True)
            dying.kill()
        await dying.wait()
        await until_sessions(False)
