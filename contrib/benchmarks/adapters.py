"""Cost of an adapter for a decode step on one span that holds a whole model, against the same model without adapters.

    OMP_NUM_THREADS=1 python contrib/benchmarks/adapters.py

The model of `decode.py`; adapters of rank 16 on every linear layer of its blocks. Prints JSON: tokens per second of eight sessions
that decode together, as medians over rounds in turns, and as ratios to the model whose layers have no hooks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from statistics import median

import torch
from decode import build
from torch import Tensor, nn

from swarmnode.compute.device import set_threads
from swarmnode.compute.model.adapters.span_adapters import Lora, features_of
from swarmnode.compute.serving.runner import StageRunner, StepInput

RANK = 16
SESSIONS = 8
PROMPT_LENGTH = 32
WAYS = {  # which adapter each session goes through
    "model_alone": [""] * SESSIONS,
    "one_adapter": ["a"] * SESSIONS,
    "half_and_half": ["", "a"] * (SESSIONS // 2),
    "eight_adapters": list("abcdefgh"),
}


def adapter(model: nn.Module) -> dict[str, Lora]:
    """Return random LoRA matrices for every linear layer of the blocks."""
    sizes = {name: features_of(module) for name, module in model.named_modules() if name.endswith("_proj")}
    return {
        name: Lora(torch.randn(RANK, size[0]) / size[0], torch.randn(size[1], RANK) / RANK)
        for name, size in sizes.items()
        if size is not None
    }


def decode(runner: StageRunner, adapters: Sequence[str], prompt_BT: Tensor, new_tokens: int) -> float:
    """Return tokens/s of all sessions together, prompts left out."""
    for session, name in enumerate(adapters):
        runner.open(session, rows=1, max_length=prompt_BT.shape[1] + new_tokens, adapter=name)
    runner.run([StepInput(session, prompt_BT) for session in range(len(adapters))])
    begin_s = time.thread_time()
    for _ in range(new_tokens):
        runner.run([StepInput(session, prompt_BT[:, :1]) for session in range(len(adapters))])
    took_s = time.thread_time() - begin_s
    for session in range(len(adapters)):
        runner.close(session)
    return len(adapters) * new_tokens / took_s


def measure(rounds: int, new_tokens: int) -> dict[str, float]:
    """Return tokens/s of the model without hooks and of every way of using adapters, and each way's ratio to the former.
    The medians leave out one warm-up round."""
    prompt_BT = torch.randint(2, 32000, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as path:
        _, hooked = build(path)
        _, plain = build(path)
        for name in WAYS["eight_adapters"]:
            hooked.span.adapters.add(name, adapter(hooked.span.model))
        rates: dict[str, list[float]] = {"no_hooks": [], **{way: [] for way in WAYS}}
        for _ in range(rounds + 1):
            rates["no_hooks"].append(decode(plain, WAYS["model_alone"], prompt_BT, new_tokens))
            for way, names in WAYS.items():
                rates[way].append(decode(hooked, names, prompt_BT, new_tokens))
    medians = {way: median(values[1:]) for way, values in rates.items()}
    told = {f"{way}_tokens_per_s": round(rate, 1) for way, rate in medians.items()}
    return told | {f"{way}_ratio": round(medians[way] / medians["no_hooks"], 3) for way in WAYS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args()
    set_threads()
    print(json.dumps(measure(options.rounds, options.new_tokens)))
