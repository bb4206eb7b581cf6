"""A real task, tuned by a swarm and by peft: SmolLM2-135M-Instruct learns to write signatures from docstrings. Prints JSON.

    python contrib/studies/tune.py SmolLM2-135M-Instruct.Q4_1.gguf WORK [--seeds 0 1 2] [--steps 30] [--picture FILE.svg]

The pairs are from the standard library's sources; those of a tenth of the modules are held out. Each seed is tuned twice.
`swarmnode tune` has two node processes; in the middle one is killed, and a third takes its place. peft runs in a plain loop in this
process, with its own start, its own order of samples and transformers' tokenizer. Both have the same base weights in float32, and
one thread a process. peft must be installed (docs/testing.md). Each result is kept in the folder WORK; the same command goes on
from there.

`perplexity` is that of the held-out signatures by number of steps, `exact` the number of held-out signatures that greedy
decoding gives letter by letter (transformers and peft load both adapters).
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import statistics
import time
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from curves import draw
from torch import Tensor
from torch.nn import functional

from swarmnode.localswarm import LocalSwarm

SYSTEM = "Write the signature of the function."
SEQUENCE, BATCH, MICROBATCH = 48, 8, 4
RANK, RATE, WARMUP = 16, 1e-3, 4
HELD_OUT, NEW_TOKENS = 64, 24
LETTERS = range(12, 160)  # of a docstring
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "pydoc_data"}
NO_LABEL = -100
TIMEOUT_S = 3600.0
HALVES = ("0:16", "16:32")
NODE = ("--tune-share", "50%", "--dtype", "float32", "--memory", "3GB")

Results = dict[str, Any]
Sample = tuple[list[int], int]
"""Tokens of a conversation, and the number of those before its answer"""


# -- data


@dataclass(frozen=True)
class Pair:
    """A function's docstring (its first paragraph) and signature."""

    docstring: str
    signature: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The pair as a conversation."""
        texts = (("system", SYSTEM), ("user", self.docstring), ("assistant", self.signature))
        return [{"role": role, "content": content} for role, content in texts]


def pairs_in(source: str) -> Iterator[Pair]:
    """Yield the pairs of the public functions in a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        docstring = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(docstring) in LETTERS:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield Pair(docstring, f"def {node.name}({ast.unparse(node.args)}){returns}:")


def read_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return all pairs of the standard library, and the held-out ones, none of whose docstrings occurs in the others."""
    root = Path(typing.__file__).parent
    trained: list[Pair] = []
    held_out: list[Pair] = []
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if not LEFT_OUT & set(module.parts):
            part = held_out if zlib.crc32(module.as_posix().encode()) % 10 == 0 else trained
            part.extend(pairs_in(path.read_text(encoding="utf-8", errors="replace")))
    known = {pair.docstring for pair in trained}
    return list(dict.fromkeys(trained)), [pair for pair in dict.fromkeys(held_out) if pair.docstring not in known]


class Task:
    """The pairs that fit into a row, as conversations by the model's template and as files for `swarmnode tune`."""

    def __init__(self, base: Path, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        trained, held_out = ([pair for pair in pairs if self._fits(pair)] for pairs in read_pairs())
        self.held_out = random.Random(0).sample(held_out, HELD_OUT)
        self.trained = trained
        self.files = folder / "trained.jsonl", folder / "held_out.jsonl"
        for file, pairs in zip(self.files, (self.trained, self.held_out), strict=True):
            file.write_text("".join(json.dumps({"messages": pair.messages}) + "\n" for pair in pairs))

    def _fits(self, pair: Pair) -> bool:
        return len(self.sample(pair)[0]) <= SEQUENCE

    def prompt(self, pair: Pair) -> list[int]:
        """Return the tokens up to the answer."""
        asked = pair.messages[:-1]
        return list(self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))

    def sample(self, pair: Pair) -> Sample:
        """Return a pair's tokens, and the number of those before the answer."""
        whole = self.tokenizer.apply_chat_template(pair.messages, return_dict=False)
        return list(whole), len(self.prompt(pair))


# -- peft


def loss_of(model: Any, samples: Sequence[Sample]) -> tuple[Tensor, int]:
    """Return the sum of the answers' losses, and the number of their tokens. The samples are padded on the right."""
    length = max(len(tokens) for tokens, _ in samples)
    ids_BS = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in samples])
    seen_BS = torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens, _ in samples])
    labels_BS = ids_BS.masked_fill(seen_BS == 0, NO_LABEL)
    for row, (_, asked) in enumerate(samples):
        labels_BS[row, :asked] = NO_LABEL
    logits_BSV = model(input_ids=ids_BS, attention_mask=seen_BS).logits
    loss = functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten(), reduction="sum")
    return loss, int((labels_BS != NO_LABEL).sum())


def in_parts(samples: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    """Cut samples into microbatches."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@torch.no_grad()
def perplexity_of(model: Any, samples: Sequence[Sample]) -> float:
    """Return the perplexity of the samples' answers."""
    found = [loss_of(model, part) for part in in_parts(samples, MICROBATCH)]
    return math.exp(sum(float(loss) for loss, _ in found) / sum(count for _, count in found))


def load_base(base: Path) -> Any:
    """Return the base model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def tune_by_peft(base: Path, task: Task, steps: int, every: int, seed: int, out: Path) -> Results:
    """Tune an adapter by peft, torch's AdamW and transformers' schedule, and save it in `out`."""
    from peft import LoraConfig, get_peft_model
    from transformers import get_cosine_schedule_with_warmup

    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_base(base), config)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    held_out = [task.sample(pair) for pair in task.held_out]
    drawn = [task.sample(pair) for pair in random.Random(seed).sample(task.trained, steps * BATCH)]
    perplexity: dict[int, float] = {}
    losses: list[float] = []
    for step in range(steps):
        if step % every == 0:
            perplexity[step] = perplexity_of(model, held_out)
        batch = drawn[step * BATCH : (step + 1) * BATCH]
        count = sum(len(tokens) - asked for tokens, asked in batch)
        total = 0.0
        for part in in_parts(batch, MICROBATCH):
            loss = loss_of(model, part)[0] / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    perplexity[steps] = perplexity_of(model, held_out)
    model.save_pretrained(str(out))
    return {"losses": losses, "perplexity": perplexity}


# -- swarm


def tune_by_swarm(base: Path, task: Task, steps: int, every: int, seed: int, out: Path) -> Results:
    """Tune an adapter with two nodes, kill one in the middle, start a third in its place, and save the adapter in `out`."""
    folder = out.with_name(f"{out.name}-swarm")
    folder.mkdir()
    with LocalSwarm(folder) as local:
        local.create(base)
        local.bootstrap()
        first, last = (local.node(f"node-{span}", "--span", span, *NODE) for span in HALVES)
        for node in (first, last):
            node.wait_for("ready")
        log = folder / "log.jsonl"
        arguments = [
            "tune",
            str(local.file),
            *tune_options(task, steps, every, seed),
            "--out",
            str(out),
            "--log",
            str(log),
        ]
        tuning = local.start("owner", arguments)
        tuning.wait_until(lambda told: told.get("step", -1) >= steps // 2, "the middle", TIMEOUT_S)
        last.kill()
        local.node("node-third", "--span", HALVES[1], *NODE)
        if tuning.finish(TIMEOUT_S):
            raise SystemExit(f"the tuning failed: {tuning.tail()}")
        told = [json.loads(line) for line in log.read_text().splitlines()]
        end = next(line for line in tuning.tail().splitlines() if line.startswith("Done"))
    held_out = {one["step"]: one["perplexity"] for one in told if "perplexity" in one}
    held_out[steps] = held_out.pop(steps - 1)  # by the final weights
    return {"losses": [one["loss"] for one in told], "perplexity": held_out, "end": end}


def tune_options(task: Task, steps: int, every: int, seed: int) -> list[str]:
    """Return the options of `swarmnode tune`, which are those of `tune_by_peft`."""
    trained, held_out = task.files
    given = {
        "data": trained,
        "eval-data": held_out,
        "eval-every": every,
        "steps": steps,
        "batch": BATCH,
        "microbatch": MICROBATCH,
        "sequence": SEQUENCE,
        "rank": RANK,
        "alpha": 2 * RANK,
        "lr": RATE,
        "schedule": "hf-cosine",
        "warmup": WARMUP,
        "seed": seed,
        "checkpoint-steps": 4,
        "patience": 600,  # until the third node has loaded its layers
    }
    return [*(f"--{name}={value}" for name, value in given.items()), "--no-pack", "--json"]


# -- scores


@torch.no_grad()
def scored(base: Path, task: Task, adapter: Path | None) -> Results:
    """Return the perplexity of the held-out signatures by transformers and peft, and how many greedy decoding gives exactly."""
    model = load_base(base)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    perplexity = perplexity_of(model, [task.sample(pair) for pair in task.held_out])
    texts = [text for part in in_parts(task.held_out, 32) for text in written(model, task, part)]
    exact = [pair.signature == text for pair, text in zip(task.held_out, texts, strict=True)]
    names = [name_in(pair.signature) == name_in(text) for pair, text in zip(task.held_out, texts, strict=True)]
    return {"perplexity": perplexity, "exact": sum(exact), "names": sum(names), "texts": texts}


def written(model: Any, task: Task, pairs: Sequence[Pair]) -> list[str]:
    """Return the signatures that greedy decoding gives for the docstrings."""
    task.tokenizer.padding_side = "left"
    asked = task.tokenizer.pad({"input_ids": [task.prompt(pair) for pair in pairs]}, return_tensors="pt")
    ids_BS = model.generate(**asked, do_sample=False, max_new_tokens=NEW_TOKENS)
    answers = task.tokenizer.batch_decode(ids_BS[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in answers]


def name_in(signature: str) -> str:
    """Return the function's name in a signature."""
    return signature.partition("(")[0]


# -- all


def kept(file: Path, make: Callable[[], Results]) -> Results:
    """Return the results in `file`; make them and write them there if it is missing."""
    if not file.exists():
        began_s = time.perf_counter()
        made = make()
        made["seconds"] = time.perf_counter() - began_s
        file.write_text(json.dumps(made))
    found: Results = json.loads(file.read_text())
    return found


def compared(base: Path, work: Path, seeds: Sequence[int], steps: int, every: int) -> tuple[Results, dict[str, Any]]:
    """Return the table of all seeds, and the curves of held-out perplexity by side."""
    task = Task(base, work)
    found: Results = {
        "pairs": len(task.trained),
        "held_out": len(task.held_out),
        "base": kept(work / "base.json", partial(scored, base, task, None)),
    }
    curves: dict[str, list[dict[int, float]]] = {}
    sides = {"peft": tune_by_peft, "swarm": tune_by_swarm}
    for seed in seeds:
        for side, tune in sides.items():
            out = work / f"{side}-{seed}"
            run = kept(work / f"{out.name}.json", partial(tune, base, task, steps, every, seed, out))
            score = kept(work / f"{out.name}-score.json", partial(scored, base, task, out))
            found[out.name] = {**run, **{f"final_{name}": value for name, value in score.items()}}
            curves.setdefault(side, []).append({int(step): value for step, value in run["perplexity"].items()})
    return found, curves


def summary(found: Results, seeds: Sequence[int]) -> Results:
    """Return the final perplexities and exact matches of both sides, with means and standard deviations over the seeds."""
    rows: Results = {"base": {name: found["base"][name] for name in ("perplexity", "exact", "names")}}
    for side in ("swarm", "peft"):
        for name in ("perplexity", "exact", "names"):
            values = [found[f"{side}-{seed}"][f"final_{name}"] for seed in seeds]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            rows.setdefault(side, {})[name] = {
                "seeds": values,
                "mean": statistics.fmean(values),
                "deviation": deviation,
            }
    return {**rows, "ends": [found[f"swarm-{seed}"]["end"] for seed in seeds]}


def make_base(gguf: Path, work: Path) -> Path:
    """Return the folder of the model's dequantised weights."""
    base = work / "base-weights"
    if not (base / "config.json").exists():
        with LocalSwarm(work) as local:
            local.command("create", str(work / "base"), "--plain", "--quiet", "--open", "--model", str(gguf))
    return base


def main() -> None:
    """Run all parts without a result in the folder, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    base = make_base(options.model, options.work)
    found, curves = compared(base, options.work, options.seeds, options.steps, options.every)
    print(json.dumps(summary(found, options.seeds)))
    if options.picture is not None:
        options.picture.write_text(draw(curves, "held-out perplexity", "step"))


if __name__ == "__main__":
    main()
