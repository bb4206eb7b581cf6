"""Study of texts whose steps have several rows: how many of their tokens differ from those of steps of one row.

    OMP_NUM_THREADS=1 python contrib/studies/ragged_texts.py --dtype bfloat16 [--tokens 2000] [--rows 2 4 8]

A drafted step has a row for each guess, and the bits of a row may depend on their number. SmolLM2 writes answers to the prompts of
contrib/benchmarks/drafts.py, one token a pass: copies with edits, and free text, greedy and sampled at 0.8. Then the same text
passes once more for each number of rows, by that many positions a pass, as if all guesses were right. Each position is drawn again
from the new logits. So each token shows alone whether its draw depends on the number of rows. Nodes run the same code on a CPU.
Weights are unpacked, as with `run --products plain`.

Prints JSON: for each kind of text and number of rows the tokens, those that differ, and their number per 100,000. `ties` counts
the tokens whose two largest logits are less than 1e-5 apart in steps of one row, and `near` those less than 0.1 apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # before this folder, which has another drafts.py

from copying import COPY, held_out
from drafts import Work, chat, questions, tasks

from swarmnode.codec.sampling import Sampling
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sampler import sample
from swarmnode.founding.model_source import open_model
from tests.trained import SMOLLM2, trained

WAYS = {"greedy": 0.0, "sampled": 0.8}  # their temperatures
TIE, NEAR = 1e-5, 0.1  # differences of two logits
CACHE_BYTES = 1 << 28
RENAMED_CHARS, RENAME = 240, "Write this text again, with `yield` for each `return`:"


def renames(count: int) -> list[Work]:
    """Return requests for an edited copy of pieces of source texts."""
    asked = [f"{RENAME}\n\n{text.removesuffix(COPY)}" for text, _ in held_out(count, RENAMED_CHARS)]
    return [Work(chat(one), {"max_new_tokens": 90}) for one in asked]


class Text:
    """Text that is written one token a pass, and passes again with other numbers of rows."""

    def __init__(self, runner: StageRunner, prompt: Sequence[int], parameters: Sampling) -> None:
        self._runner = runner
        self._prompt = list(prompt)
        self._parameters = parameters
        self.ids: list[int] = []
        self.gaps: list[float] = []  # of each token's two largest logits

    def write(self, ends: Sequence[int]) -> None:
        """Write the text, up to one of the tokens `ends`."""
        logits_KV = self._begin()
        while True:
            (token,) = self._draw(logits_KV, len(self.ids))
            largest = logits_KV[-1].float().topk(2).values
            self.gaps.append(float(largest[0] - largest[1]))
            self.ids.append(token)
            if len(self.ids) == self._parameters.max_new_tokens or token in ends:
                break
            logits_KV = self._pass(self.ids[-1:])
        self._runner.close(self)

    def drawn_again(self, rows: int) -> list[int]:
        """Return the tokens that are drawn if the text passes by `rows` positions a pass."""
        drawn = self._draw(self._begin(), 0)
        for start in range(0, len(self.ids) - 1, rows):
            logits_KV = self._pass(self.ids[start : min(start + rows, len(self.ids) - 1)])
            drawn += self._draw(logits_KV, start + 1)
        self._runner.close(self)
        return drawn

    def _begin(self) -> Tensor:
        """Pass the prompt. Returns the logits (1, V) behind it."""
        self._runner.open(self, rows=1, max_length=512)
        return self._pass(self._prompt)[-1:]

    def _pass(self, ids: Sequence[int]) -> Tensor:
        """Return the logits (K, V) of the next positions."""
        (result,) = self._runner.run([StepInput(self, torch.tensor([list(ids)]), want=WANT_ALL)])
        logits_KV: Tensor = result.output[0]
        return logits_KV

    def _draw(self, logits_KV: Tensor, first: int) -> list[int]:
        """Return the tokens that are drawn from logits; `first` is the number of the first one in the text."""
        position = len(self._prompt) + first
        return [int(sample(row_V[None], self._parameters, position + at)) for at, row_V in enumerate(logits_KV)]


def study(
    runner: StageRunner, tokenizer: Any, works: Sequence[Work], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the findings about texts that answer some prompts, once each if they are greedy."""
    counts: Counter[str] = Counter()
    differ = dict.fromkeys(options.rows, 0)
    for seed, work in enumerate(itertools.cycle(works)):
        if counts["tokens"] >= options.tokens or (not temperature and seed == len(works)):
            break
        prompt = tokenizer(work.prompt).input_ids
        text = Text(runner, prompt, Sampling(len(prompt), work.options["max_new_tokens"], temperature, seed=seed))
        text.write([tokenizer.eos_token_id])
        counts["tokens"] += len(text.ids)
        counts["texts"] += 1
        counts["ties"] += sum(gap < TIE for gap in text.gaps)
        counts["near"] += sum(gap < NEAR for gap in text.gaps)
        for rows in options.rows:
            again = text.drawn_again(rows)
            differ[rows] += sum(one != other for one, other in zip(text.ids, again, strict=True))
        print(dict(counts), differ, file=sys.stderr)
    per_100_000 = {rows: round(1e5 * count / counts["tokens"], 1) for rows, count in differ.items()}
    return {**counts, "differ": differ, "per_100_000": per_100_000}


@torch.inference_mode()
def main() -> None:
    """Print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each kind of text")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = trained(SMOLLM2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_model(str(model), Path(folder) / "model", packs=True)
        span = load_span(checkpoint, 0, checkpoint.units, dtype=getattr(torch, options.dtype))
        span.packings.at_once.run()
        tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        kinds = {"edits": renames(64), "free": [*questions(64), *tasks(64)]}
        runner = StageRunner(span, RunnerConfig(CACHE_BYTES))
        found = {
            f"{kind}, {way}": study(runner, tokenizer, works, temperature, options)
            for kind, works in kinds.items()
            for way, temperature in WAYS.items()
        }
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
