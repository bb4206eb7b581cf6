"""A prototype of expert parallelism: two processes share the experts and heads of each layer of a trained mixture. Prints JSON.

    python contrib/studies/expert_parallel.py [--rounds 7] [--steps 60]

A small mixture (bytes, 2 layers of width 256, 8 experts of inner width 512, 2 active) is trained with a balance loss. Then two
processes of one thread each compute half of the heads and half of the experts, and sum partial results over TCP: each owns half of
the tokens, receives the other's partial sums of them, and sends the sums back (the schedule `sum` of
`swarmnode/plan/expert_groups.py`). `prompt_speed` is their speed relative to one process of two threads. `same_bits` compares
outputs, and the gradients of a training step, with one process that adds the same halves; `largest_difference` compares outputs
with the plain order of additions.

`settings` holds the model to measurements, directly and through a relay with a delay and a rate. The link's cost is fitted to
exchanges of other sizes, and the computing time to other numbers of tokens. Figures are medians of `--rounds` rounds that
interleave everything, since the machine may be busy with other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin wait for one another on a busy machine

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.plan.expert_groups import GroupNetwork, LinkCost

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from corpus import batches, read_corpus
from delaying_relay import DelayingRelay, free_port

LAYERS, HIDDEN, HEADS, EXPERTS, INNER, ACTIVE = 2, 256, 4, 8, 512, 2
BALANCE = 0.01
PROMPT, ROWS, SEQUENCE = 512, 4, 128  # tokens of a prompt; sequences of a training step, and their tokens
FITTED_TOKENS = (48, 160, 384, 640)
FITTED_BYTES = (1 << 12, 1 << 15, 160 << 10, 448 << 10)
SETTINGS = (  # delay in s, rate in bit/s (0: no relay), tokens
    (0.0, 0.0, 128),
    (0.0, 0.0, 512),
    (0.001, 1e9, 512),
    (0.005, 200e6, 256),
    (0.02, 50e6, 256),
    (0.02, 50e6, 64),
)
TOKEN_BYTES = 4 * HIDDEN


class Line:
    """Connection between the two processes. `rank` is the number of this one."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._connection = connection
        self._sender = ThreadPoolExecutor(1)

    def swap(self, mine: Tensor) -> Tensor:
        """Send a tensor, and return the other process's tensor of the same shape."""
        sent = self._sender.submit(self._connection.sendall, memoryview(mine.contiguous().numpy()).cast("B"))
        theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
        left = memoryview(theirs.numpy()).cast("B")
        while left:
            count = self._connection.recv_into(left)
            if not count:
                raise ConnectionError("the other process has ended")
            left = left[count:]
        sent.result()
        return theirs

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of both processes' tensors, whose even number of rows is divided among them."""
        halves = partial.chunk(2)
        theirs = self.swap(halves[1 - self.rank])
        mine = halves[self.rank]
        own = mine + theirs if self.rank == 0 else theirs + mine
        other = self.swap(own)
        return torch.cat((own, other) if self.rank == 0 else (other, own))


class World:
    """Shards that this process computes of `count`. The others are computed across `line`; without one, sums are partial."""

    def __init__(self, count: int, shards: Sequence[int], line: Line | None = None) -> None:
        self.count, self.shards, self.line = count, shards, line

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all shards, in their order."""
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return self.line.sum(total) if self.line else total


class Fork(torch.autograd.Function):
    """Hand one tensor to every shard; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, world: World, x: Tensor) -> tuple[Tensor, ...]:
        ctx.world = world
        return tuple(x.view_as(x) for _ in world.shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.world.sum(gradients)


class Join(torch.autograd.Function):
    """Sum the shards' results; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, world: World, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return world.sum(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *[gradient] * ctx.count


class Layer(nn.Module):
    """Layer of causal attention and a mixture of gated experts, whose heads and experts can be divided into shards."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.expert_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.qkv = nn.Parameter(torch.randn(3, HEADS, HIDDEN // HEADS, HIDDEN) * HIDDEN**-0.5)
        self.out = nn.Parameter(torch.randn(HEADS, HIDDEN, HIDDEN // HEADS) * HIDDEN**-0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)

    def forward(self, x: Tensor, world: World, rows: int) -> tuple[Tensor, Tensor]:
        """Return the output [N, H] for N tokens of `rows` sequences, and the balance loss."""
        forked = Fork.apply(world, self.attention_norm(x))
        heads = HEADS // world.count
        parts = [
            self.attend(one, slice(shard * heads, (shard + 1) * heads), rows)
            for one, shard in zip(forked, world.shards, strict=True)
        ]
        x = x + Join.apply(world, *parts)
        normed = self.expert_norm(x)
        chances = self.router(normed).softmax(-1)
        weights, chosen = chances.topk(ACTIVE)
        weights = weights / weights.sum(-1, keepdim=True)
        share = functional.one_hot(chosen, EXPERTS).sum(1).float().mean(0) / ACTIVE
        balance = EXPERTS * (share * chances.mean(0)).sum()
        forked = Fork.apply(world, torch.cat((normed, weights), 1))
        held = EXPERTS // world.count
        parts = [
            self.compute(one, chosen, range(shard * held, (shard + 1) * held))
            for one, shard in zip(forked, world.shards, strict=True)
        ]
        return x + Join.apply(world, *parts), balance

    def attend(self, x: Tensor, heads: slice, rows: int) -> Tensor:
        """Return the part [N, H] of attention's output that `heads` give."""
        qkv = torch.einsum("nh,cadh->cand", x, self.qkv[:, heads])
        q, k, v = qkv.unflatten(2, (rows, -1)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("rand,ahd->rnh", seen, self.out[heads]).flatten(0, 1)

    def compute(self, routed: Tensor, chosen: Tensor, experts: range) -> Tensor:
        """Return the part [N, H] that `experts` give; `routed` [N, H + K] holds inputs and weights."""
        x, weights = routed[:, :HIDDEN], routed[:, HIDDEN:]
        out = torch.zeros_like(x)
        for expert in experts:
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                gate, up = (x[tokens] @ self.up[expert].T).chunk(2, 1)
                result = (functional.silu(gate) * up) @ self.down[expert].T
                out = out.index_add(0, tokens, weights[tokens, place, None] * result)
        return out


class Mixture(nn.Module):
    """Language model on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)

    def hidden(self, ids: Tensor, world: World) -> tuple[Tensor, Tensor]:
        """Return the states [N, H] behind all layers for ids [rows, tokens], and the balance loss."""
        angles = torch.arange(ids.shape[1])[:, None] / 10_000 ** (torch.arange(0, HIDDEN, 2) / HIDDEN)
        x = self.embedding(ids) + torch.cat((angles.sin(), angles.cos()), 1)
        x, balance = x.flatten(0, 1), torch.zeros(())
        for layer in self.layers:
            x, more = layer(x, world, len(ids))
            balance = balance + more
        return x, balance

    def forward(self, ids: Tensor, world: World) -> tuple[Tensor, Tensor]:
        """Return the logits [N, 256] and the balance loss."""
        x, balance = self.hidden(ids, world)
        return self.head(self.norm(x)), balance

    def loss(self, ids: Tensor, world: World) -> Tensor:
        """Return the loss of predicting each byte of ids [rows, tokens] from those before it."""
        logits, balance = self(ids[:, :-1], world)
        return functional.cross_entropy(logits, ids[:, 1:].flatten()) + BALANCE * balance


WHOLE, HALVES = World(1, [0]), World(2, [0, 1])


def trained(steps: int) -> tuple[Mixture, float]:
    """Train a mixture for `steps` steps; return it and the mean loss of its last ten steps."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for _, ids in zip(range(steps), batches(read_corpus(), ROWS, SEQUENCE + 1, seed=0), strict=False):
        loss = model.loss(ids, WHOLE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, statistics.mean(losses[-10:])


def connect(rank: int, ports: Sequence[int]) -> list[Line]:
    """Return lines to the other process: number 0 listens at all ports, and number 1 connects to them, the direct one first."""
    if rank == 0:
        servers = [socket.create_server(("127.0.0.1", port)) for port in reversed(ports)]
        return [Line(server.accept()[0], rank) for server in reversed(servers)]
    for _ in range(600):
        try:
            first = socket.create_connection(("127.0.0.1", ports[0]))
        except OSError:
            time.sleep(0.1)
            continue
        others = [socket.create_connection(("127.0.0.1", port)) for port in ports[1:]]
        return [Line(one, rank) for one in (first, *others)]
    raise ConnectionError(f"nothing listens at port {ports[0]}")


def seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def exactness(model: Mixture, line: Line) -> dict[str, Any]:
    """Compare the shared computation with one process: outputs of a prompt, and gradients of a training step."""
    world, corpus = World(2, [line.rank], line), read_corpus()
    ids = next(batches(corpus, 1, PROMPT, seed=5))
    with torch.no_grad():
        shared, whole, halves = (model(ids, one)[0] for one in (world, WHOLE, HALVES))
    ids = next(batches(corpus, ROWS, SEQUENCE + 1, seed=6))
    gradients = []
    for one in (world, HALVES):
        model.zero_grad()
        model.loss(ids, one).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    mine = slice(line.rank * HEADS // 2, (line.rank + 1) * HEADS // 2)
    held = slice(line.rank * EXPERTS // 2, (line.rank + 1) * EXPERTS // 2)
    parts = {"qkv": (slice(None), mine), "out": mine, "up": held, "down": held}
    same = [
        torch.equal(gradient[part], gradients[1][name][part])
        for name, gradient in gradients[0].items()
        for part in [parts.get(name.split(".")[-1], slice(None))]
    ]
    return {
        "prompt": torch.equal(shared, halves),
        "gradients": f"{sum(same)} of {len(same)} tensors",
        "largest_difference": float((shared - whole).abs().max()),
        "same_next_byte": float((shared.argmax(1) == whole.argmax(1)).float().mean()),
    }


def measure(model: Mixture, lines: Sequence[Line], rounds: int) -> dict[str, list[float]]:
    """Time everything in each round, both processes in step; return the seconds of each name."""
    corpus, times = read_corpus(), dict[str, list[float]]()
    rank = lines[0].rank
    links = sorted({setting[:2] for setting in SETTINGS})

    def record(name: str, line: Line, action: Callable[[], object]) -> None:
        line.swap(torch.zeros(1))  # wait for the other process
        times.setdefault(name, []).append(seconds(action))

    def prompt(tokens: int) -> Tensor:
        return next(batches(corpus, 1, tokens, seed=tokens))

    with torch.no_grad():
        for number in range(rounds + 1):
            if number == 1:
                times.clear()  # the first round was to warm up
            for tokens in FITTED_TOKENS:
                record(f"computing {tokens}", lines[0], lambda t=tokens: model.hidden(prompt(t), World(2, [rank])))
            for link, line in zip(links, lines, strict=True):
                for size in FITTED_BYTES:
                    record(f"exchange {link} {size}", line, lambda n=size, at=line: at.swap(torch.zeros(n // 4)))
                for delay_s, rate, tokens in SETTINGS:
                    if (delay_s, rate) == link:
                        world = World(2, [rank], line)
                        record(f"layers {link} {tokens}", line, lambda t=tokens, w=world: model.hidden(prompt(t), w))
            record("two processes", lines[0], lambda: model(prompt(PROMPT), World(2, [rank], lines[0])))
            with torch.enable_grad():
                ids = next(batches(corpus, ROWS, SEQUENCE + 1, seed=number))
                world = World(2, [rank], lines[0])
                record("two processes, step", lines[0], lambda i=ids, w=world: model.loss(i, w).backward())
            lines[0].swap(torch.zeros(1))
            if rank == 0:  # while the other process waits
                torch.set_num_threads(2)
                times.setdefault("two threads", []).append(seconds(lambda: model(prompt(PROMPT), WHOLE)))
                with torch.enable_grad():
                    step_s = seconds(lambda i=ids: model.loss(i, WHOLE).backward())
                times.setdefault("two threads, step", []).append(step_s)
                torch.set_num_threads(1)
    return times


def fitted(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Return alpha and beta of times alpha + beta x size, with the least relative errors; none is negative."""
    weights = 1 / np.array(times_s)
    matrix = np.stack((np.ones(len(sizes)), np.array(sizes, float)), 1) * weights[:, None]
    alpha, beta = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)[0]
    return max(0.0, float(alpha)), max(0.0, float(beta))


def predictions(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return predicted and measured milliseconds of a layer for each setting."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    pass_s, token_s = fitted(FITTED_TOKENS, [middle[f"computing {tokens}"] for tokens in FITTED_TOKENS])
    rows = []
    for delay_s, rate, tokens in SETTINGS:
        link = (delay_s, rate)
        alpha_s, byte_s = fitted(FITTED_BYTES, [middle[f"exchange {link} {size}"] for size in FITTED_BYTES])
        cost = LinkCost(alpha_s, 0.0, 1 / byte_s if byte_s else 0.0)
        swap = GroupNetwork(2, cost).exchange(2, tokens / 2, TOKEN_BYTES)
        predicted_s = (pass_s + tokens * token_s) / LAYERS + 4 * swap.seconds  # two sums of two exchanges
        measured_s = middle[f"layers {link} {tokens}"] / LAYERS
        rows.append(
            {
                "link": "loopback" if not rate else f"relay, {1e3 * delay_s:g} ms, {rate / 1e6:g} Mbit/s",
                "tokens": tokens,
                "alpha_ms": round(1e3 * alpha_s, 3),
                "mbit_per_s": round(8e-6 / byte_s) if byte_s else None,
                "predicted_ms": round(1e3 * predicted_s, 2),
                "measured_ms": round(1e3 * measured_s, 2),
                "predicted_over_measured": round(predicted_s / measured_s, 3),
            }
        )
    return rows


def work(rank: int, ports: Sequence[int], state: dict[str, Tensor], rounds: int, results: Any) -> None:
    """Run one of the two processes."""
    torch.set_num_threads(1)
    model = Mixture()
    model.load_state_dict(state)
    lines = connect(rank, ports)
    same, times = exactness(model, lines[0]), measure(model, lines, rounds)
    results.put((rank, same, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, loss = trained(arguments.steps)
    state = model.state_dict()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with ExitStack() as stack:
        here, there = list[int](), list[int]()
        for delay_s, rate in sorted({setting[:2] for setting in SETTINGS}):
            here.append(free_port())
            relay = stack.enter_context(DelayingRelay(delay_s, rate)) if rate else None
            there.append(relay.to(here[-1]) if relay else here[-1])
        workers = [
            context.Process(target=work, args=(rank, ports, state, arguments.rounds, results), daemon=True)
            for rank, ports in enumerate((here, there))
        ]
        for worker in workers:
            worker.start()
        answers = {rank: rest for rank, *rest in (results.get(timeout=3600) for _ in workers)}
        for worker in workers:
            worker.join()
    (same, times), (same_there, _) = answers[0], answers[1]
    middle = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "training_loss": round(loss, 3),
        "same_bits": {"process 0": same, "process 1": same_there},
        "prompt_speed": round(middle["two threads"] / middle["two processes"], 3),
        "training_step_speed": round(middle["two threads, step"] / middle["two processes, step"], 3),
        "prompt_ms": {name: round(1e3 * middle[name], 2) for name in ("two processes", "two threads")},
        "settings": predictions(times),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
