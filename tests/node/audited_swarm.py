"""A swarm in virtual time whose answers are audited, and how one of its nodes comes to lie."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.model.span import ModelSpan
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT

TOKENS = 48
ALWAYS = 1.0  # of what the answers cost: every session is audited
SETTLED, MOST_SESSIONS = 3, 30  # sessions in a row over the same node, and sessions until then

Change = Callable[[Tensor], Tensor]
"""What becomes of hidden_BTH, or of logits_BTV, that a node has computed"""


@contextlib.asynccontextmanager
async def three_by_two(
    found: Callable[[VirtualSwarm], object],
    folder: Path,
    last: int = 3,
    spans: tuple[str, str] = ("0:3", "3:6"),
    **stage: Any,
) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Two stages of three replicas each, or fewer of the `last` one, and a client that audits every session. `found` founds the
    swarm; `stage` are StageConfig's fields."""
    async with VirtualSwarm(folder) as swarm:
        found(swarm)
        await swarm.bootstrap()
        for number in range(3):
            swarm.node(f"a{number}", spans[0], **stage)
        for number in range(last):
            swarm.node(f"b{number}", spans[1], **stage)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client(audit_share=ALWAYS) as client:
            while sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"]) < 3 + last:
                await client.changed()
            yield swarm, client


def span_of(member: VirtualMember) -> ModelSpan:
    """What a node computes with."""
    assert member.node._stage is not None
    return member.node._stage._parts[0].span  # type: ignore[union-attr]


def tamper(member: VirtualMember, change: Change) -> None:
    """Let a node send on something else than what it computes."""
    span = span_of(member)
    forward = span.forward
    span.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))
    compute_anew(member)
    graphs = member.node._stage._parts[0].runner.graphs  # type: ignore[union-attr]
    if graphs is not None:
        run = graphs.run
        graphs.run = lambda *args: None if (y := run(*args)) is None else change(y)


def compute_anew(member: VirtualMember) -> None:
    """Let a node replay no recorded steps, so that a change of its span's code has an effect on each."""
    assert member.node._stage is not None
    member.node._stage._parts[0].runner.captured = None  # type: ignore[union-attr]


def noise_on_every_tenth(size: float) -> Change:
    generator, calls = torch.Generator().manual_seed(3), 0

    def change(hidden_BTH: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        noise_BTH = torch.randn(hidden_BTH.shape, generator=generator)
        noise_BTH *= size * hidden_BTH.norm() / noise_BTH.norm()
        return hidden_BTH + noise_BTH if calls % 10 == 0 else hidden_BTH

    return change


def zeroed(*places: int, of_prompts: bool = True) -> Change:
    """Nothing at these places of a prompt, or of what else comes as one."""

    def change(hidden_BTH: Tensor) -> Tensor:
        if (hidden_BTH.shape[1] > 1) is of_prompts:
            hidden_BTH = hidden_BTH.clone()
            hidden_BTH[:, list(places)] = 0
        return hidden_BTH

    return change


def swapped(hidden_BTH: Tensor) -> Tensor:
    """The second place of a prompt for the first, and the other way round."""
    return hidden_BTH[:, [1, 0, *range(2, hidden_BTH.shape[1])]] if hidden_BTH.shape[1] > 1 else hidden_BTH


def a_little_off(size: float) -> Change:
    """The first place of a prompt by so much of its length."""

    def change(hidden_BTH: Tensor) -> Tensor:
        if hidden_BTH.shape[1] > 1:
            hidden_BTH = hidden_BTH.clone()
            hidden_BTH[:, 0] *= 1 + size
        return hidden_BTH

    return change


def results(client: SwarmClient) -> dict[str, float]:
    return {reading.labels[0]: reading.value for reading in client.auditor.readings() if reading.value}


async def hop_in_use(swarm: VirtualSwarm, client: SwarmClient, index: int) -> VirtualMember:
    """Return the node at hop `index` of this client's sessions, once their route has settled: the first ones try machines that were
    not measured yet. Raises AssertionError if it does not settle."""
    hops: list[str] = []
    while len(hops) < SETTLED + 1 or len(set(hops[-SETTLED:])) > 1:
        assert len(hops) < MOST_SESSIONS, f"the route changed in {MOST_SESSIONS} sessions: {hops}"
        honest = await client.generate(PROMPT, max_new_tokens=TOKENS)
        await client.auditor.idle()
        hops.append(honest.route[index].peer)
    return swarm.member(hops[-1])


async def generate_until_shunned(client: SwarmClient, sessions: int) -> int:
    """How many sessions it took until somebody is shunned."""
    for number in range(sessions):
        await client.generate(PROMPT, max_new_tokens=TOKENS, temperature=1.0, seed=number)
        await client.auditor.idle()
        if client.auditor.standing.shunned:
            return number + 1
    raise AssertionError(f"nobody was found in {sessions} sessions: {client.auditor!r}")
