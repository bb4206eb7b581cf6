"""A user's mistake is the user's: it is refused before any pass, suspects nobody, and disturbs nobody in the same pass.

Real stages of a tiny GPT-2 (whose positions end) on the fake network: two replicas of two stages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import torch
from transformers import GPT2Config

from swarmnode.codec.messages import Mode, Want
from swarmnode.codec.sampling import Sampling
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.assemble import assemble
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.config import ClientConfig, ServerConfig
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.memory.network import FakeWorld
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateOptions, RingStream
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from swarmnode.serving.pipeline import Pipeline
from swarmnode.serving.worker import Worker
from tests.peer.toy_swarm import HELLO, ToyPeer, ToyRouter, stage_server

POSITIONS = 32
VOCABULARY = 97
PROMPT = [5, 17, 3, 61, 42]
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None}
SPANS = [(0, 2), (2, 4)]


class Volunteer:
    """A peer that serves some units of the tiny GPT-2."""

    def __init__(
        self, world: FakeWorld, family: Family, weights: dict[str, torch.Tensor], span: tuple[int, int]
    ) -> None:
        self.start, self.end = span
        self.network = world.join()
        self.peer = self.network.peer_id
        mine = {n: t for n, t in weights.items() if any(span[0] <= u < span[1] for u in family.units_of_tensor(n))}
        stage = ModelSpan(family, assemble(family, mine, *span, dtype=torch.float32), *span)
        self.executor = Executor()
        self.worker = Worker(StageRunner(stage, RunnerConfig(cache_bytes=1 << 22)), self.executor)
        config = LinkConfig()
        pipeline = Pipeline([self.worker], config.ledger)
        self.server = stage_server(ToyPeer(self.network, config), [pipeline], ServerConfig())


class TinySwarm:
    """Two replicas of each stage and one client."""

    def __init__(self) -> None:
        config = GPT2Config(
            n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, **NO_SPECIAL_IDS
        )
        self.family = family_of(config)
        torch.manual_seed(3)
        self.model = self.family.model_class(config).eval()
        weights = self.model.state_dict()
        self.world = FakeWorld(seed=5)
        self.volunteers = [Volunteer(self.world, self.family, weights, span) for span in SPANS * 2]
        client = self.world.join()
        self.switchboard = Switchboard(client, SESSION_PROTOCOL, HELLO, LinkConfig())
        self.router = ToyRouter(self.volunteers)  # type: ignore[arg-type]  # it reads peers and spans alone
        self.config = ClientConfig(patience_s=20.0)
        self.client = client

    async def __aenter__(self) -> TinySwarm:
        for one in self.volunteers:
            await one.worker.start()
            await one.server.start()
            assert await one.network.connect(await self.client.addresses(), timeout_s=1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.switchboard.close()
        for one in self.volunteers:
            await one.server.close()
            await one.executor.close()

    def session(self, spec: SessionSpec) -> ClientSession:
        return ClientSession(self.switchboard, self.router, spec, self.config)

    async def generate(self, count: int) -> list[int]:
        options = GenerateOptions(max_new_tokens=count)
        session = ClientSession(self.switchboard, self.router, options.spec(PROMPT), self.config)
        return [token async for token in RingStream(session, options)]

    def expected(self, count: int) -> list[int]:
        ids = list(PROMPT)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


def on_a_tiny_swarm(test: Callable[[TinySwarm], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with TinySwarm() as swarm:
                await test(swarm)

        asyncio.run(main())

    return run


RING = Sampling(prompt_length=len(PROMPT), max_new_tokens=100, temperature=0.0, top_p=1.0, top_k=0, seed=1)
MISTAKES = {
    "more positions than the model has": (SessionSpec(Mode.RING, max_length=POSITIONS + 1, sampling=RING), PROMPT),
    "a negative id": (SessionSpec(Mode.RING, max_length=20, sampling=RING), [5, -1, 3, 61, 42]),
    "an id beyond the vocabulary": (SessionSpec(Mode.RING, max_length=20, sampling=RING), [5, 17, VOCABULARY, 61, 42]),
    "a bias for an id beyond the vocabulary": (
        SessionSpec(Mode.RING, max_length=20, sampling=msgspec.structs.replace(RING, logit_bias=((VOCABULARY, 1.0),))),
        PROMPT,
    ),
    "a prompt to be penalised that the model does not know": (
        SessionSpec(
            Mode.RING,
            max_length=20,
            sampling=msgspec.structs.replace(RING, repetition_penalty=1.5),
            prompt=(5, 17, VOCABULARY, 61, 42),
        ),
        PROMPT,
    ),
    "a wrong id in a driven session": (SessionSpec(Mode.DRIVEN, max_length=20), [5, 17, 1 << 40, 61, 42]),
}


@pytest.mark.parametrize(("spec", "prompt"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_at_once_suspects_nobody_and_disturbs_nobody(spec: SessionSpec, prompt: list[int]) -> None:
    @on_a_tiny_swarm
    async def check(swarm: TinySwarm) -> None:
        honest = [asyncio.ensure_future(swarm.generate(20)) for _ in range(2)]
        session = swarm.session(spec)
        with pytest.raises(PeerRefused) as refused:
            await session.start()
            session.send(ids_entry(0, [prompt], Want.LAST), expect=len(prompt))
            await session.receive()
        assert refused.value.code == ErrorCode.INVALID_REQUEST
        await session.close()
        assert swarm.router.suspected == []
        assert await asyncio.gather(*honest, swarm.generate(20)) == [swarm.expected(20)] * 3

    check()
