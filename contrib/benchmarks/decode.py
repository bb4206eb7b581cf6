"""Decoding speed of one span that holds a whole model, against transformers' `generate` in the same process.

    OMP_NUM_THREADS=1 python contrib/benchmarks/decode.py

A random llama (hidden 512, 8 layers, 8 heads, vocabulary 32000, float32); no network and no drafts. Prints JSON: tokens per second
of CPU, prompts included, as medians over the rounds, and as ratios to `generate`. With one thread and nothing else running these
are tokens per second. Rounds alternate between the contestants, so that noise hits both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.compute.device import set_threads
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput

PROMPT_LENGTH = 32
BATCH_PROMPT_LENGTHS = (16, 24, 32, 40, 48, 56, 64, 128)


def build(path: str) -> tuple[LlamaForCausalLM, StageRunner]:
    """Return the model twice: as transformers has it, and loaded from its checkpoint as a span."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    checkpoint = Checkpoint(path)
    span = load_span(checkpoint, 0, checkpoint.units)
    span.packings.at_once.run()
    return model, StageRunner(span, RunnerConfig(cache_bytes=1 << 30))


def run_generate(model: LlamaForCausalLM, prompt_BT: Tensor, new_tokens: int) -> tuple[float, Tensor]:
    """Generate with transformers. Returns the CPU seconds and the new ids."""
    begin_s = time.process_time()
    ids_BT = model.generate(prompt_BT, max_new_tokens=new_tokens, do_sample=False)
    return time.process_time() - begin_s, ids_BT[:, prompt_BT.shape[1] :]


def run_sessions(runner: StageRunner, prompts: Sequence[Tensor], new_tokens: int) -> tuple[float, list[Tensor]]:
    """Decode all sessions together. Returns the CPU seconds and the ids per session."""
    begin_s = time.process_time()
    for session, prompt_BT in enumerate(prompts):
        runner.open(session, rows=1, max_length=prompt_BT.shape[1] + new_tokens)
    inputs = list(prompts)
    drawn: list[list[Tensor]] = [[] for _ in prompts]
    for _ in range(new_tokens):
        results = runner.run([StepInput(session, x) for session, x in enumerate(inputs)])
        inputs = [result.output.argmax(dim=-1) for result in results]
        for ids, x in zip(drawn, inputs, strict=True):
            ids.append(x)
    took_s = time.process_time() - begin_s
    for session in range(len(prompts)):
        runner.close(session)
    return took_s, [torch.cat(ids, dim=1) for ids in drawn]


def measure(rounds: int, new_tokens: int) -> dict[str, float | int | bool]:
    """Return the medians over `rounds` rounds, after one warm-up round."""
    generator = torch.Generator().manual_seed(1)
    prompt_BT = torch.randint(2, 32000, (1, PROMPT_LENGTH), generator=generator)
    batch = [torch.randint(2, 32000, (1, length), generator=generator) for length in BATCH_PROMPT_LENGTHS]
    rates: dict[str, list[float]] = {"generate": [], "single": [], "batch": []}
    same_text = True
    with tempfile.TemporaryDirectory() as path:
        model, runner = build(path)
        for _ in range(rounds + 1):
            generate_s, expected_BT = run_generate(model, prompt_BT, new_tokens)
            single_s, (ids_BT,) = run_sessions(runner, [prompt_BT], new_tokens)
            batch_s, _ = run_sessions(runner, batch, new_tokens)
            same_text &= torch.equal(ids_BT, expected_BT)
            rates["generate"].append(new_tokens / generate_s)
            rates["single"].append(new_tokens / single_s)
            rates["batch"].append(len(batch) * new_tokens / batch_s)
    medians = {name: median(values[1:]) for name, values in rates.items()}
    return {
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "new_tokens": new_tokens,
        "generate_tokens_per_s": round(medians["generate"], 1),
        "single_tokens_per_s": round(medians["single"], 1),
        "batch_tokens_per_s": round(medians["batch"], 1),
        "single_ratio": round(medians["single"] / medians["generate"], 2),
        "batch_ratio": round(medians["batch"] / medians["generate"], 2),
        "same_text": same_text,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    set_threads()
    print(json.dumps(measure(options.rounds, options.new_tokens)))
