"""Models with recurrent states: speed, company, memory, second turns and faults, each beside its baseline of the same run.

    OMP_NUM_THREADS=1 python contrib/benchmarks/hybrids.py [--family falcon_h1] [PART ...]

Random models in float32, no drafts unless a part is about guesses. Prints one JSON object a part:

- `decode`: tokens/s of one session on two nodes / transformers' `generate` in one process (floor 0.8), also by CPU seconds.
- `company`: tokens per CPU second of eight sessions in one pass / of one alone, in one process (floor 3); and CPU seconds of eight
  prompts of 64 tokens one by one / in one pass.
- `memory`: bytes that 32 sessions of 8,000 tokens hold / bytes that the ledger promised them (at most 1.15).
- `turn`: time to the first token of a second turn behind 8,000 tokens / of computing all of it, on two nodes (at most 0.1).
- `faults`: tokens that differ from one process's (0), of `--tokens`, in virtual time with a tiny model: nodes killed, hung and
  drained, wrong guesses, several answers to one prompt, conversations that go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from baseline import LocalProcess
from plain_decoding import PlainClient, joined
from weights import Cpu

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.localswarm import LocalSwarm
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.swarm.storage.swarmfile import load_swarm

VOCABULARY, LAYERS, HIDDEN, PROMPT, NEW, LONG = 8192, 16, 640, 32, 64, 8000
PLAIN = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 1792,
         "num_attention_heads": 10, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17, "pad_token_id": None,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
EACH_FOURTH = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(LAYERS)]
MAMBA = {"mamba_n_heads": 20, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 2 * HIDDEN, "head_dim": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": EACH_FOURTH, "num_local_experts": 0, "shared_intermediate_size": 1792},
    "lfm2": {"full_attn_idxs": list(range(3, LAYERS, 4)), "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {"layer_types": EACH_FOURTH, "head_dim": 64, "linear_num_value_heads": 16, "linear_num_key_heads": 8,
                     "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "mamba2": {"state_size": 64, "expand": 2, "num_heads": 20, "head_dim": 64, "n_groups": 1},
}  # fmt: skip


def save_model(folder: Path, family: str, layers: int = LAYERS) -> int:
    """Save a random model of the family, and return its parameters."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    sizes = {**PLAIN, **FAMILIES[family], "num_hidden_layers": layers}
    sizes |= {name: sizes[name][:layers] for name in ("layer_types",) if name in sizes}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def two_nodes(model: Path, folder: Path) -> Any:
    """Serve a model on two nodes of one thread each."""
    with LocalSwarm(folder) as local:
        local.create(model)
        local.bootstrap()
        for name, span in (("a", f"0:{LAYERS // 2 + 1}"), ("b", f"{LAYERS // 2 + 1}:{LAYERS + 2}")):
            local.node(name, "--span", span).wait_for("ready")
        yield local


async def decode(local: LocalSwarm, model: Path, rounds: int) -> dict[str, Any]:
    """Measure one session's decoding beside one local process."""
    wall, by_cpu = [], []
    ids = list(range(5, 5 + PROMPT))
    with LocalProcess(model, prompt=PROMPT, new=NEW, prefill=PROMPT) as alone:
        async with await joined(local, 2) as client:
            await client.generate(ids, max_new_tokens=8)
            for _ in range(rounds):
                told = await asyncio.to_thread(alone.measure)
                cpu = Cpu(member.pid for member in local.members)
                await client.generate(ids, max_new_tokens=1)
                first_s = sum(cpu.spent().values())
                ours = await client.generate(ids, max_new_tokens=NEW)
                cpu_s = (sum(cpu.spent().values()) - 2 * first_s) / (NEW - 1)
                wall.append(ours.tokens_per_s / told["decode_tokens_per_s"])
                by_cpu.append(told["decode_cpu_s"] / cpu_s)
    return {"decode": round(statistics.median(wall), 3), "decode_by_cpu": round(statistics.median(by_cpu), 3)}


async def turn(local: LocalSwarm, rounds: int) -> dict[str, Any]:
    """Measure the time to the first token of a second turn, beside that of the whole prompt under another owner."""
    dice, ratios = random.Random(0), []
    client = await PlainClient.join(load_swarm(local.file), home=local.folder / "client", audit_share=0.0)
    async with client:
        for _ in range(rounds):
            said = [dice.randrange(5, VOCABULARY) for _ in range(LONG)]
            stream = await client.stream(said, kept_for="me", max_new_tokens=8)
            async for _ in stream:
                pass
            said += [*stream.result.ids, *(dice.randrange(5, VOCABULARY) for _ in range(16))]
            took_s = []
            for owner in ("me", "other"):
                stream = await client.stream(said, kept_for=owner, max_new_tokens=2)
                async for _ in stream:
                    pass
                took_s.append(stream.result.first_token_s)
            ratios.append(took_s[0] / took_s[1])
    return {"second_turn": round(statistics.median(ratios), 4)}


def company(model: Path, rounds: int) -> dict[str, Any]:
    """Measure eight sessions of other lengths in one pass beside one, in one process."""
    checkpoint = Checkpoint(model)
    span = load_span(checkpoint, 0, checkpoint.units)
    span.packings.at_once.run()
    runner = StageRunner(span, RunnerConfig(1 << 30))
    lengths = (16, 24, 32, 40, 48, 56, 64, 72)
    per_token_s: dict[int, list[float]] = {1: [], 8: []}
    for _, count in itertools.product(range(rounds), (1, 8)):
        for name in range(count):
            runner.open(name, rows=1, max_length=256)
            runner.run([StepInput(name, torch.randint(2, VOCABULARY, (1, lengths[name])))])
        began_s, turns = time.thread_time(), 24
        for _ in range(turns):
            runner.run([StepInput(name, torch.randint(2, VOCABULARY, (1, 1))) for name in range(count)])
        per_token_s[count].append((time.thread_time() - began_s) / turns / count)
        for name in range(count):
            runner.close(name)
    ratios = []
    for _ in range(rounds):
        took_s = []
        for together in (1, 8):
            began_s = time.thread_time()
            for first in range(0, 8, together):
                names = range(first, first + together)
                for name in names:
                    runner.open(name, rows=1, max_length=256)
                runner.run([StepInput(name, torch.randint(2, VOCABULARY, (1, 64))) for name in names])
            took_s.append(time.thread_time() - began_s)
            for name in range(8):
                runner.close(name)
        ratios.append(took_s[0] / took_s[1])
    one_s, eight_s = (statistics.median(per_token_s[count]) for count in (1, 8))
    return {
        "eight_by_one": round(one_s / eight_s, 2),
        "one_ms": round(1e3 * one_s, 2),
        "eight_prompts_of_64_alone_by_together": round(statistics.median(ratios), 2),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(model: Path, sessions: int, length: int) -> dict[str, Any]:
    """Measure what sessions with `length` tokens hold beside their reservations: tensors, and growth of the process."""
    checkpoint = Checkpoint(model)
    runner = StageRunner(load_span(checkpoint, 0, checkpoint.units), RunnerConfig(8 << 30, prefill_positions=512))
    ids = torch.randint(2, VOCABULARY, (1, length))
    runner.open("warm", rows=1, max_length=length)
    runner.run([StepInput("warm", ids[:, : length // 2], WANT_NOTHING)])
    runner.close("warm")
    gc.collect()
    before = resident_bytes()
    for name in range(sessions):
        runner.open(name, rows=1, max_length=length)
        runner.run([StepInput(name, ids[:, : length - 140], WANT_NOTHING)])
        for at in range(length - 140, length):  # far enough for snapshots of an answer
            runner.run([StepInput(name, ids[:, at : at + 1], WANT_NOTHING)])
    promised = runner.pool.reserved_bytes
    grown = resident_bytes() - before
    held = held_bytes(runner)
    return {
        "held_by_promised": round(held / promised, 3),
        "process_by_promised": round(grown / promised, 3),
        "promised_mb_a_session": round(promised / sessions / 1e6, 2),
    }


def held_bytes(runner: StageRunner) -> int:
    """Return the bytes of all sessions' caches, states, snapshots and inputs."""
    sessions = runner.pool.sessions.values()
    held = [
        state for one in sessions if one.history for each in one.history.snapshots for state in each.states.values()
    ]
    held += [x for one in sessions if one.history for x in one.history._inputs]
    for cohort in {id(one.cohort): one.cohort for one in sessions if one.cohort is not None}.values():
        held += [buffer for buffers in cohort.buffers.values() for buffer in buffers]
        held += cohort.states.committed.values()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


async def faults(folder: Path, family: str, tokens: int) -> dict[str, Any]:
    """Generate `tokens` tokens in swarms of tiny models where something goes wrong in each text, and count those that differ."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.node.conftest import Founded
    from tests.node.test_faults import two_by_two
    from tests.node.test_kept_sessions import ask
    from tests.numerics.families import COMMON, RECURRENT
    from tests.tiny import TinyModel

    sizes = {**COMMON, **RECURRENT[family], "vocab_size": 512, "max_position_embeddings": 1 << 17, "bos_token_id": None}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**sizes, "pad_token_id": None}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder / "model")
    tiny = TinyModel(folder / "model", units=6)
    swarm_file = folder / "founded"
    swarm_file.mkdir()
    dice, checked, different, reroutes, number = random.Random(0), 0, 0, 0, 0
    from tests.node.virtual_swarm import VirtualSwarm

    VirtualSwarm(swarm_file).create(tiny.folder)
    founded = Founded(VirtualSwarm(swarm_file).file)

    def compare(prompt: list[int], found: list[int]) -> None:
        nonlocal checked, different
        expected = tiny.alone(prompt, len(found))
        checked += len(found)
        different += sum(one != other for one, other in zip(found, expected, strict=True))

    while checked < tokens:
        number += 1
        (home := folder / f"round{number}").mkdir()
        async with two_by_two(founded, home) as (swarm, _, client):
            prompt = [dice.randrange(5, 512) for _ in range(dice.choice((9, 70, 300, 700)))]
            new, at = dice.choice((96, 160, 256)), dice.randrange(1, 40)
            stream = await client.stream(prompt, max_new_tokens=new, drafts=dice.choice(("off", "auto")), kept_for="me")
            kind, seen = ("kill", "hang", "drain", "none")[number % 4], 0
            with contextlib.ExitStack() as hung:
                async for _ in stream:
                    seen += 1
                    if seen == at and kind != "none":
                        member = swarm.member(stream.result.route[dice.randrange(2)].peer)
                        if kind == "kill":
                            await member.kill()
                        elif kind == "hang":
                            hung.enter_context(member.hanging())
                        else:
                            member.leave()
            compare(prompt, stream.result.ids)
            reroutes += stream.result.reroutes
            said = [*prompt, *stream.result.ids, *(dice.randrange(5, 512) for _ in range(dice.choice((1, 5, 40))))]
            for prompts in ([said], [[*prompt, 7], [*prompt, 7]], [said[: len(said) - 9], said, prompt[:7]]):
                results = await asyncio.gather(*(ask(client, list(each), max_new_tokens=24) for each in prompts))
                for each, result in zip(prompts, results, strict=True):
                    compare(list(each), result.ids)
        print(json.dumps({"family": family, "tokens": checked, "different": different}), file=sys.stderr, flush=True)
    return {"tokens": checked, "different": different, "texts_with_a_fault": number, "reroutes": reroutes}


def main(options: argparse.Namespace) -> None:
    """Measure the parts and print a line of JSON for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, small = folder / "model", folder / "small"
        parts = options.parts or ["decode", "company", "memory", "turn", "faults"]
        if {"decode", "company", "turn"} & set(parts):
            count = save_model(model, options.family)
            print(json.dumps({"family": options.family, "millions": round(count / 1e6, 1)}), flush=True)
        for part in parts:
            (home := folder / part).mkdir()
            if part == "company":
                told = company(model, options.rounds)
            elif part == "memory":
                save_model(small, options.family, layers=4)
                told = memory(small, options.sessions, options.length)
            elif part == "faults":
                told = run_virtual(faults(home, options.family, options.tokens))
            else:
                with two_nodes(model, home) as local:
                    told = asyncio.run(
                        decode(local, model, options.rounds) if part == "decode" else turn(local, options.rounds)
                    )
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="decode, company, memory, turn, faults; all by default")
    parser.add_argument("--family", choices=FAMILIES, default="falcon_h1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=32, help="of `memory`")
    parser.add_argument("--length", type=int, default=LONG, help="tokens of a session of `memory`")
    parser.add_argument("--tokens", type=int, default=20_000, help="of `faults`")
    main(parser.parse_args())
