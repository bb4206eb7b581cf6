"""Tokens of a turn by each proposer, counted in one process without a network: `python contrib/benchmarks/guesses_alone.py`.

    python contrib/benchmarks/guesses_alone.py [--model FOLDER] [--head FOLDER]

SmolLM2 writes the greedy answers of drafts.py's row `model`: requests for code, and questions. Behind each token three proposers
guess: look-up, the draft model of distilled.py, and the EAGLE head of distilled_head.py. Then the turns of each answer are counted
as if the guesses had been sent. So the figures do not depend on the machine's load. The nodes' own code computes all of it.

Prints JSON: the tokens of a turn by proposer and number of guesses. In the rows with look-up, the model or the head guesses only if
look-up finds no match. The figures leave out the budget of a session, which sends no guess that costs more than it saves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from distilled import Recipe, distilled
from distilled_head import HeadRecipe, distilled_head
from drafts import TASKS, tasks
from torch import Tensor
from transformers import AutoTokenizer

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.mtp import load_eagle
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.mtp_guesses import DrawnStates, MtpGuesses
from swarmnode.compute.serving.runner import WANT_ALL, WANT_LAST, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Throttle
from swarmnode.founding.model_source import open_model
from swarmnode.serving.drafting.lookup import LookupDrafter
from tests.trained import SMOLLM2, trained

CACHE_BYTES, MAX_LENGTH, MOST = 1 << 27, 256, 8


@dataclass
class Answer:
    """Answer to a prompt. `by_head` and `by_lookup` are the guesses behind each token, and `by_model` is the draft model's one."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    by_head: list[Sequence[int]] = field(default_factory=list)
    by_lookup: list[Sequence[int]] = field(default_factory=list)
    by_model: list[int] = field(default_factory=list)


def write(runner: StageRunner, head: MtpGuesses, prompt: list[int], count: int, end: int) -> Answer:
    """Return the model's greedy answer, with the guesses of the head and of look-up."""
    answer, lookup = Answer(prompt), LookupDrafter()
    lookup.push(prompt)
    runner.open("text", rows=1, max_length=MAX_LENGTH)
    step = prompt
    while len(answer.ids) < count and answer.ids[-1:] != [end]:
        (result,) = runner.run([StepInput("text", torch.tensor([step]), want=WANT_LAST)])
        step = [int(result.output[0, -1].argmax())]
        answer.ids += step
        lookup.push(step)
        answer.by_lookup.append(lookup.propose((), MOST))
        assert result.left_BKH is not None
        position = len(prompt) + len(answer.ids) - 2
        drawn = DrawnStates("text", position, result.left_BKH[0, -1:], tuple(step), guessed=True)
        answer.by_head.append(head.guess([drawn]).get("text", ()))
    runner.close("text")
    head.close("text")
    return answer


def guess_by_model(runner: StageRunner, answer: Answer) -> None:
    """Set the draft model's guess behind each token of an answer."""
    ids = [*answer.prompt, *answer.ids]
    runner.open("text", rows=1, max_length=MAX_LENGTH)
    (result,) = runner.run([StepInput("text", torch.tensor([ids]), want=WANT_ALL)])
    runner.close("text")
    logits_TV: Tensor = result.output[0, len(answer.prompt) :]
    answer.by_model = logits_TV.argmax(-1).tolist()


def tokens_per_turn(answers: Sequence[Answer], propose: Callable[[Answer, int], Sequence[int]]) -> float:
    """Return the tokens of a turn if `propose` returns the guesses behind the token at a place of an answer."""
    turns = 0
    for answer in answers:
        at = 0
        while at < len(answer.ids):
            pairs = zip(propose(answer, at), answer.ids[at + 1 :], strict=False)
            right = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
            at += 1 + (min(len(propose(answer, at)), len(answer.ids) - at - 1) if right is None else right)
            turns += 1
    return round(sum(len(answer.ids) for answer in answers) / turns, 2)


def by_model(count: int) -> Callable[[Answer, int], Sequence[int]]:
    """Return the draft model as a proposer. A guess behind a wrong one never counts, so each is made behind the right text."""
    return lambda answer, at: answer.by_model[at : at + count]


def by_head(answer: Answer, at: int) -> Sequence[int]:
    """Propose the head's guesses."""
    return answer.by_head[at]


def by_lookup(answer: Answer, at: int) -> Sequence[int]:
    """Propose the guesses of look-up."""
    return answer.by_lookup[at]


def either(other: Callable[[Answer, int], Sequence[int]]) -> Callable[[Answer, int], Sequence[int]]:
    """Return a proposer that looks up, and asks `other` if nothing is found."""
    return lambda answer, at: by_lookup(answer, at) or other(answer, at)


def whole(checkpoint: Checkpoint) -> ModelSpan:
    """Return all layers of a checkpoint in float32."""
    return load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32)


@torch.inference_mode()
def count(model: Path, head: Path) -> dict[str, float]:
    """Return the tokens of a turn by proposer."""
    gguf = trained(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with tempfile.TemporaryDirectory() as folder:
        served = open_model(str(gguf), Path(folder) / "index", packs=True)
        span = whole(served)
        span.reader = load_eagle(Checkpoint(head), served, span)
        guesses = MtpGuesses(span.reader, Throttle(), None, capture=True, kv="plain")
        runner, drafts = (
            StageRunner(span, RunnerConfig(CACHE_BYTES)),
            StageRunner(whole(Checkpoint(model)), RunnerConfig(CACHE_BYTES)),
        )
        answers = []
        for work in tasks(len(TASKS)):
            prompt = tokenizer(work.prompt).input_ids
            answers.append(write(runner, guesses, prompt, work.options["max_new_tokens"], tokenizer.eos_token_id))
            guess_by_model(drafts, answers[-1])
    ways = {"lookup": by_lookup, "model, 4": by_model(4), "model, 8": by_model(8), "head, 2": by_head}
    ways |= {"lookup and model, 8": either(by_model(8)), "lookup and head, 2": either(by_head)}
    counted = {name: tokens_per_turn(answers, propose) for name, propose in ways.items()}
    return {"tokens": sum(len(answer.ids) for answer in answers), **counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the draft model; by default distilled and cached")
    parser.add_argument("--head", type=Path, help="folder of the EAGLE head; by default distilled and cached")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, head = options.model or distilled(Recipe()), options.head or distilled_head(HeadRecipe())
    print(json.dumps({"model": model.name, "head": head.name, **count(model, head)}, indent=1))


if __name__ == "__main__":
    main()
