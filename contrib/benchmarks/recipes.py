"""Recipes beside their references: transformers' Trainer, trl's SFTTrainer, and the cost of evaluation. Prints JSON with ratios.

    python contrib/benchmarks/recipes.py trainer [--steps 200] [--seeds 3] [--families llama qwen3 gpt2 qwen3_moe]

`trainer` needs the packages trl, accelerate and datasets. It trains small random models of four families on the same batches, with
one recipe: AdamW, cosine with warm-up, weight decay, clipping, and the balance loss for the mixture of experts. It prints the
largest relative difference of a step's loss. Rounding decides between two experts that are nearly equal. So the mixture is compared
up to the step before one of the two trainings sends a token to another expert.

    python contrib/benchmarks/recipes.py chat --model DIR

`chat` needs the same packages, and a folder with a tokenizer and a chat template, such as SmolLM2's. It compares ids and labels of
a chat file, one sample at a time.

    python contrib/benchmarks/recipes.py evaluation [--steps 100] [--seeds 3]

`evaluation` compares two trainings. One evaluates 1 % of the data every 100 steps and at the end, the other never does. It prints
the additional passes through layers as a share of the others. A pass back counts twice. `ratio_of_cpu` is of pairs that alternate,
and noisy on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import read_corpus
from torch import Tensor

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import Batches, TokenBatches, WithHeldOut
from swarmnode.compute.training.lm import SpanSegment, load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.data.samples import TokenSample, read_samples
from swarmnode.swarm.records.run import RECIPE, Recipe, Run

VOCABULARY, SEQUENCE, BATCH, MICROBATCH = 256, 64, 8, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
FAMILIES = ("llama", "qwen3", "gpt2", "qwen3_moe")
MIXTURE = "qwen3_moe"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
BALANCE = 0.01
NO_LABEL = -100


def save_model(folder: Path, family: str, seed: int) -> None:
    """Write a small random model of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {**SIZES, **EXPERTS} if family == MIXTURE else SIZES
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(folder)


def recipe_run(batches: Batches, steps: int, seed: int, **recipe: Any) -> Run:
    """Return the run of the benchmark. As in the Trainer, embeddings are decayed."""
    return Run(
        data=batches.fingerprint,
        steps=steps,
        batch=BATCH,
        microbatch=MICROBATCH,
        sequence=SEQUENCE,
        learning_rate=1e-3,
        warmup_steps=steps // 10,
        betas=(0.9, 0.999),
        seed=seed,
        schedule=RECIPE,
        recipe=Recipe("hf-cosine", groups=(), **recipe),
    )


def watch_routes(model: Any, routes: list[Tensor]) -> None:
    """Append the experts that each token takes to `routes`, at each pass through a router of the model, sorted."""

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        routes.append(output[2].detach().sort(-1).values)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(note)


def trainers_losses(folder: Path, rows_NT: Tensor, run: Run, out: Path, routes: list[Tensor]) -> list[float]:
    """Return the loss of each step of transformers' Trainer on these rows in their order.

    The Trainer adds the balance loss of each microbatch to the step's mean cross-entropy, so its factor is a microbatch's share.
    """
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    losses: list[float] = []

    class Watched(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            losses.append(float(loss := super().training_step(*arguments, **options)))
            return loss

    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=run.steps,
        per_device_train_batch_size=run.microbatch,
        gradient_accumulation_steps=run.microbatches,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=run.warmup_steps,
        weight_decay=run.weight_decay,
        adam_beta1=run.betas[0],
        adam_beta2=run.betas[1],
        adam_epsilon=run.epsilon,
        max_grad_norm=run.clip,
        seed=run.seed,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    # The first label of a row has no prediction. Of some families (GPT-2) the Trainer counts it nevertheless, unless it is -100.
    dataset = [{"input_ids": row, "labels": torch.cat([torch.tensor([NO_LABEL]), row[1:]])} for row in rows_NT]
    model = AutoModelForCausalLM.from_pretrained(folder)
    if run.known_recipe.watches_routers:
        model.config.output_router_logits = True
        model.router_aux_loss_coef = run.known_recipe.router_balance / run.microbatches
    watch_routes(model, routes)
    Watched(model, arguments, train_dataset=dataset).train()
    size = run.microbatches
    return [sum(losses[begin : begin + size]) for begin in range(0, len(losses), size)]


def in_order(batches: Batches, run: Run) -> Tensor:
    """Return all rows of a run, in its order, as ids_NT."""
    numbers = range(run.microbatches)
    parts = (batches.microbatch(step, number, run).inputs[0] for step in range(run.steps) for number in numbers)
    return torch.cat(list(parts))


def first_flip(own: list[Tensor], theirs: list[Tensor], steps: int) -> int:
    """Return the number of the first step that sends a token to other experts; `steps` if there is none."""
    passes = len(own) // steps
    differ = (number for number, pair in enumerate(zip(own, theirs, strict=True)) if not torch.equal(*pair))
    return next(differ, steps * passes) // passes if passes else steps


def beside_trainer(steps: int, seed: int, families: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield for each family the largest relative difference of a step's loss."""
    batches = TokenBatches(read_corpus()[: 50 * steps * SEQUENCE].numpy().astype(np.uint32), VOCABULARY)
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            balance = {"router_balance": BALANCE} if family == MIXTURE else {}
            path, run = Path(folder) / "model", recipe_run(batches, steps, seed, **balance)
            save_model(path, family, seed)
            checkpoint = Checkpoint(path)
            segment = load_segment(checkpoint, 0, checkpoint.units)
            routes: tuple[list[Tensor], list[Tensor]] = ([], [])
            watch_routes(segment.span.model, routes[0])
            own = [one.loss for one in train_locally(segment, run, batches)]
            theirs = trainers_losses(path, in_order(batches, run), run, Path(folder) / "out", routes[1])
        off = [abs(one - other) / other for one, other in zip(own, theirs, strict=True)]
        flip = first_flip(*routes, steps)
        yield {
            "family": family,
            "seed": seed,
            "steps": steps,
            "largest_relative_difference": max(off[:flip], default=0.0),
            "after_100_steps": max(off[:100]),
            "first_flipped_route": flip if routes[0] else None,
            "with_flipped_routes": max(off),
            "first_loss": own[0],
            "last_loss": own[-1],
        }


CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "4."},
            {"role": "user", "content": "And 3 + 3? Zwölf?"},
            {"role": "assistant", "content": "6.\n\n- twice 3\n"},
        ]
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! 🙂"}]},
]
TOLD: list[dict[str, Any]] = [{"prompt": one["messages"][:-1], "completion": one["messages"][-1:]} for one in CHATS]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": "Count:", "completion": " 1, 2, 3"},
]
MARKED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trl_samples(tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of each row as trl's SFTTrainer gives them to the model."""
    from datasets import Dataset, fingerprint
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    # To name its caches, datasets pickles what it maps with, which fails for some tokenizers. Nothing is cached here.
    fingerprint.Hasher.hash = classmethod(lambda _cls, _value: uuid.uuid4().hex)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 512}))
    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(
            output_dir=out,
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            bf16=False,
            max_length=512,
            **options,
        )
        trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        made = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in made]


def labels_of(sample: TokenSample) -> list[int]:
    """Return the labels of a sample: the token's id, or -100 if the token does not count in the loss."""
    return [token if counts else NO_LABEL for token, counts in zip(*sample, strict=True)]


def beside_sft(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield for each kind of record whether ids and labels equal trl's."""
    kinds: list[tuple[str, list[dict[str, Any]], str | None, dict[str, Any]]] = [
        ("messages, template with marks", CHATS, MARKED, {"assistant_only_loss": True}),
        ("messages as prompt and completion", TOLD, None, {}),
        ("texts as prompt and completion", PAIRS, None, {}),
    ]
    for kind, rows, template, options in kinds:
        own = Tokenizer(folder)
        if template is not None:
            own.own.chat_template = template
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "data.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            ours = [(one.tokens, labels_of(one)) for one in read_samples(path, own)]
        theirs = trl_samples(own.own, rows, **options)
        yield {
            "kind": kind,
            "samples": len(ours),
            "ids_equal": [ids for ids, _ in ours] == [ids for ids, _ in theirs],
            "labels_equal": [labels for _, labels in ours] == [labels for _, labels in theirs],
        }


def count_passes(segment: SpanSegment) -> Counter[str]:
    """Return a counter of the passes through a segment's first layer, forward and backward, as they come."""
    counted: Counter[str] = Counter()

    def forward(_module: Any, _inputs: Any, output: Any) -> None:
        counted["forward"] += 1
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        if hidden_BTH.requires_grad:
            hidden_BTH.register_hook(lambda _gradient: counted.update(("backward",)))

    segment.span.stack.get_submodule("0").register_forward_hook(forward)
    return counted


def cost_of_evaluation(steps: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the passes and the CPU seconds of a training with evaluation over those without, the latter in pairs that alternate."""
    rows = steps * BATCH
    held = max(MICROBATCH, rows // 100)
    corpus_N = read_corpus()[: (rows + held) * SEQUENCE].numpy().astype(np.uint32)
    trained, held_out = (TokenBatches(part, VOCABULARY) for part in np.split(corpus_N, [rows * SEQUENCE]))
    count = held // MICROBATCH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_model(path / "model", "llama", seed)
        checkpoint = Checkpoint(path / "model")
        plain = recipe_run(trained, steps, seed)
        both = WithHeldOut(trained, held_out)
        evaluates = recipe_run(both, steps, seed, evaluate_every=100, evaluation=count)
        taken: dict[str, list[float]] = {"plain": [], "evaluates": []}
        passes: dict[str, int] = {}
        for name in ("plain", "evaluates", "evaluates", "plain"):
            run, batches = (plain, trained) if name == "plain" else (evaluates, both)
            segment = load_segment(checkpoint, 0, checkpoint.units)
            counted = count_passes(segment)
            began_s = time.process_time()
            for _ in train_locally(segment, run, batches):
                pass
            taken[name].append(time.process_time() - began_s)
            passes[name] = counted["forward"] + 2 * counted["backward"]
    plain_s, evaluates_s = (statistics.mean(taken[name]) for name in ("plain", "evaluates"))
    yield {
        "seed": seed,
        "steps": steps,
        "held_out_microbatches": count,
        "evaluations": sum(bool(evaluates.evaluations_at(step)) for step in range(steps + 1)),
        "plain_cpu_s": plain_s,
        "ratio_of_cpu": evaluates_s / plain_s,
        "share_of_passes": passes["evaluates"] / passes["plain"] - 1,
    }


def main() -> None:
    """Run one part of the benchmark and print a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("trainer", "chat", "evaluation"))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    if given.part == "chat":
        if given.model is None:
            parser.error("chat needs --model with a tokenizer's folder")
        for row in beside_sft(given.model):
            print(json.dumps(row), flush=True)
        return
    make = partial(beside_trainer, families=given.families) if given.part == "trainer" else cost_of_evaluation
    rows = []
    for seed in range(given.seeds):
        for row in make(given.steps or 200, seed):
            rows.append(row)
            print(json.dumps(row), flush=True)
    name = "largest_relative_difference" if given.part == "trainer" else "share_of_passes"
    values = [row[name] for row in rows]
    print(json.dumps({"of": name, "lowest": min(values), "mean": statistics.mean(values), "highest": max(values)}))


if __name__ == "__main__":
    main()
