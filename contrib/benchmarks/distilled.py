"""Distil a draft model for SmolLM2, for drafts.py: `python contrib/benchmarks/distilled.py [--written 3 --epochs 5 …]`.

The student begins as the first layers of SmolLM2 with its embedding and head, which stay as they are, and a translator before
the head: the linear map with the least squared error from the student's to the teacher's last states (as the tuned lens, arXiv
2303.08112). It learns to predict the next token as the whole model does (Kullback-Leibler divergence). At the end the translator
and the head become one matrix.

The teacher writes most of the texts: requests for code and questions after a user's first words (Magpie, arXiv 2406.08464), and
answers. The other texts are pieces of the standard library's sources. The result is a folder for `swarmnode run --draft-model`,
in the user's cache (or $SWARMNODE_TEST_MODELS). If the folder is there, nothing is made. Texts stay in the cache, in
smollm2-texts, for runs with other recipes.

Prints JSON: the folder, and the curve of the student. Each point has the CPU seconds of training, and figures of held-out greedy
answers: the share of the tokens that the student predicts, and the tokens of a turn with 4 and with 8 guesses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2]))  # trained models belong to the tests

from copying import pieces, sources

from swarmnode.founding.model_source import open_model
from tests.trained import SMOLLM2, VARIABLE, trained

ROWS = 64  # texts of a shard, which the teacher writes together
HELD_OUT = 16  # of the first shard, whose answers are greedy
READ_CHARS, READ_TOKENS = 1200, 192  # of a piece of sources
REQUEST_TOKENS, ANSWER_TOKENS = 32, 144
BATCH_ROWS = 12  # of a step of training
USUAL_TOKENS, OTHER_TOKENS = 4096, 2048  # of the vocabulary in a step: the most frequent ones, and random others
LEARNING_RATE, WARMUP_STEPS = 1e-3, 20
RIDGE = 1e-4  # of the least squares, relative to the mean square of a state's element
CURVE_STEPS = 20  # between two points of the curve
PROCESSES = 2
USER, END, ASSISTANT = "<|im_start|>user\n", "<|im_end|>", "<|im_start|>assistant\n"
OPENINGS = (
    "Why", "What is", "How does", "How do", "What are", "Explain", "Who was", "What causes", "Describe", "Tell me",
    "Write a Python function that", "Write a Python class", "Write a function to", "Implement", "How do I use Python to",
    "Write a Python program that",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the student: its layers, the shards that the teacher writes and reads, and the passes over them."""

    layers: int = 4
    written: int = 3
    read: int = 2
    epochs: int = 5

    @property
    def name(self) -> str:
        """Name of the folder in the cache."""
        return f"smollm2-draft-{self.layers}-{self.written}-{self.read}-{self.epochs}"


class Shard(NamedTuple):
    """Texts of the teacher: ids_BT, `real_BT` (False at padding), `answer_BT` (True where the next token is of an answer), and
    hidden_BTH, the teacher's last hidden state (float16)."""

    ids_BT: Tensor
    real_BT: Tensor
    answer_BT: Tensor
    hidden_BTH: Tensor

    def rows(self, chosen: Tensor | slice) -> Shard:
        """Return some of the texts."""
        return Shard(*(tensor[chosen] for tensor in self))


def teacher_and_tokenizer(folder: Path) -> tuple[Any, Any]:
    """Return the model in `folder` in float32, and its tokenizer, which pads on the left."""
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return teacher.eval(), AutoTokenizer.from_pretrained(folder, padding_side="left")


def make_shard(teacher_folder: Path, number: int) -> Path:
    """Make a shard, and return its file, which may be there already. `number` is the seed: from 0 on the teacher writes texts, and
    below 0 it reads sources."""
    out = teacher_folder.with_name(f"{number}.pt")
    if out.exists():
        return out
    torch.set_num_threads(1)
    torch.manual_seed(number)
    teacher, tokenizer = teacher_and_tokenizer(teacher_folder)
    shard = read(teacher, tokenizer, number) if number < 0 else written(teacher, tokenizer, number)
    torch.save(tuple(shard), partial := out.with_suffix(".partial"))
    partial.rename(out)
    return out


@torch.inference_mode()
def read(teacher: Any, tokenizer: Any, number: int) -> Shard:
    """Return what the teacher expects in pieces of the standard library's sources. Costs a quarter of texts that it writes."""
    chance, texts = random.Random(number), sources()
    rows: list[list[int]] = []
    while len(rows) < ROWS:
        ids = tokenizer(next(pieces(texts, READ_CHARS, chance.getrandbits(32)))).input_ids[:READ_TOKENS]
        rows += [ids] if len(ids) == READ_TOKENS else []
    ids_BT, all_BT = torch.tensor(rows), torch.ones(ROWS, READ_TOKENS, dtype=torch.bool)
    hidden = [teacher.model(some_BT)[0].half() for some_BT in ids_BT.split(BATCH_ROWS)]
    return Shard(ids_BT, all_BT, all_BT, torch.cat(hidden))


def written(teacher: Any, tokenizer: Any, number: int) -> Shard:
    """Return texts that the teacher writes. In every third shard the answers are sampled, in the others greedy."""
    end = tokenizer.convert_tokens_to_ids(END)
    openings = random.Random(number).choices(OPENINGS, k=ROWS)
    begun = tokenizer([USER + opening for opening in openings], return_tensors="pt", padding=True)
    usual = {"eos_token_id": end, "pad_token_id": end, "top_k": 0, "top_p": 0.95}
    asked_BT = teacher.generate(**begun, **usual, do_sample=True, temperature=0.8, max_new_tokens=REQUEST_TOKENS)
    asked = [text.split(END)[0] for text in tokenizer.batch_decode(asked_BT[:, begun.input_ids.shape[1] :])]
    prompts = [f"{USER}{begin}{rest}{END}\n{ASSISTANT}" for begin, rest in zip(openings, asked, strict=True)]
    prompt = tokenizer(prompts, return_tensors="pt", padding=True)
    how = {"do_sample": True, "temperature": 0.8} if number % 3 == 2 else {"top_p": None}
    with hidden_states(teacher) as hidden:
        ids_BT = teacher.generate(**prompt, **{**usual, **how}, max_new_tokens=ANSWER_TOKENS)
    begin = prompt.input_ids.shape[1]
    over_BT = (ids_BT[:, begin:] == end).cumsum(1)  # 1 at the end of the answer, and more behind it
    answer_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    answer_BT[:, begin - 1 : -1] = (over_BT - (ids_BT[:, begin:] == end).long()) == 0
    real_BT = torch.cat([prompt.attention_mask.bool(), torch.ones_like(over_BT, dtype=torch.bool)], 1)
    return Shard(ids_BT[:, :-1], real_BT[:, :-1], answer_BT[:, :-1], torch.cat(hidden, 1))


@contextlib.contextmanager
def hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Yield the list of the last hidden states of all passes that follow."""
    found: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _module, _inputs, output: found.append(output.half()))
    try:
        yield found
    finally:
        hook.remove()


def make_shards(teacher_folder: Path, recipe: Recipe) -> list[Shard]:
    """Return all shards of the recipe, first those that the teacher writes."""
    numbers = [*range(recipe.written), *range(-recipe.read, 0)]
    with ProcessPoolExecutor(PROCESSES) as pool:
        return [Shard(*torch.load(file)) for file in pool.map(make_shard, [teacher_folder] * len(numbers), numbers)]


class Student(nn.Module):
    """The first layers of the teacher, with its embedding and last norm, and a translator of their states into the teacher's.

    `head_VH` is the teacher's head.
    """

    def __init__(self, teacher: Any, layers: int) -> None:
        super().__init__()
        config = type(teacher.config).from_dict({**teacher.config.to_dict(), "num_hidden_layers": layers})
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lacking = self.model.load_state_dict(teacher.state_dict(), strict=False).missing_keys
        assert not lacking, lacking
        self.model.get_input_embeddings().weight.requires_grad_(requires_grad=False)  # the head, too: they are tied
        self.translator = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.head_VH = self.model.get_output_embeddings().weight

    def states(self, shard: Shard) -> Tensor:
        """Return the last states hidden_NH, not translated, at the positions before tokens of answers."""
        positions_BT = (shard.real_BT.cumsum(1) - 1).clamp(min=0)
        hidden_BTH = self.model.model(shard.ids_BT, attention_mask=shard.real_BT.long(), position_ids=positions_BT)[0]
        hidden_NH: Tensor = hidden_BTH[shard.answer_BT]
        return hidden_NH

    def forward(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Return the translated states and the teacher's (N, H) at the positions before tokens of answers."""
        return self.translator(self.states(shard)), shard.hidden_BTH[shard.answer_BT].float()

    @torch.inference_mode()
    def fit_translator(self, shards: list[Shard]) -> None:
        """Set the translator to the linear map with the least squared error."""
        size = self.head_VH.shape[1]
        own_HH, both_HH = torch.zeros(size, size, dtype=torch.double), torch.zeros(size, size, dtype=torch.double)
        for shard in batches(shards, epochs=1):
            found_NH, wanted_NH = self.states(shard).double(), shard.hidden_BTH[shard.answer_BT].double()
            own_HH += found_NH.T @ found_NH
            both_HH += found_NH.T @ wanted_NH
        ridge = RIDGE * own_HH.diagonal().mean()
        self.translator.weight.copy_(torch.linalg.solve(own_HH + ridge * torch.eye(size), both_HH).T)

    def save(self, folder: Path) -> None:
        """Write a model of transformers, whose head is the translator and the head in one."""
        config = type(self.model.config).from_dict({**self.model.config.to_dict(), "tie_word_embeddings": False})
        merged = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        head_VH = (self.head_VH @ self.translator.weight).detach()
        merged.load_state_dict({**self.model.state_dict(), "lm_head.weight": head_VH})
        merged.save_pretrained(folder)


def divergence(student: Any, shard: Shard, vocabulary_V: Tensor) -> Tensor:
    """Return the mean divergence of the student's from the teacher's probabilities, among the tokens `vocabulary_V`. A student
    returns its states and the teacher's (N, H), both before the head."""
    head_VH = student.head_VH[vocabulary_V]
    found_NV, wanted_NV = (nn.functional.log_softmax(states_NH @ head_VH.T, -1) for states_NH in student(shard))
    return nn.functional.kl_div(found_NV, wanted_NV, reduction="batchmean", log_target=True)


def batches(shards: list[Shard], epochs: int) -> Iterator[Shard]:
    """Yield the rows of all shards in random order, `epochs` times. Rows of one batch are of one shard."""
    for _ in range(epochs):
        parts = [(shard, rows) for shard in shards for rows in torch.randperm(len(shard.ids_BT)).split(BATCH_ROWS)]
        for place in torch.randperm(len(parts)).tolist():
            shard, rows = parts[place]
            yield shard.rows(rows)


def vocabularies(shards: list[Shard], size: int) -> Iterator[Tensor]:
    """Yield the tokens of each step: the most frequent ones of the texts, and others by chance, so that all are learnt."""
    counts_V = torch.zeros(size, dtype=torch.long)
    for shard in shards:
        counts_V += torch.bincount(shard.ids_BT[shard.answer_BT], minlength=size)
    usual = counts_V.argsort(descending=True)[:USUAL_TOKENS]
    while True:
        yield torch.cat([usual, torch.randint(size, (OTHER_TOKENS,))]).unique()


def distil(student: Any, shards: list[Shard], epochs: int) -> Iterator[float]:
    """Train the student on the shards, with a warm-up and a cosine of the learning rate. Yields the CPU seconds since the
    beginning, every CURVE_STEPS steps and at the end."""
    steps = epochs * sum(-(-len(shard.ids_BT) // BATCH_ROWS) for shard in shards)
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=min(0.5, WARMUP_STEPS / steps)
    )
    vocabulary, cpu_s = vocabularies(shards, len(student.head_VH)), 0.0
    for step, batch in enumerate(batches(shards, epochs), 1):
        began_s = time.process_time()
        loss = divergence(student, batch, next(vocabulary))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        cpu_s += time.process_time() - began_s
        if step % CURVE_STEPS == 0 or step == steps:
            print(f"step {step} of {steps}: divergence {loss.item():.3f}", file=sys.stderr)
            yield cpu_s


@torch.inference_mode()
def agreement(student: Student, shard: Shard) -> dict[str, float]:
    """Return the share of the positions of greedy answers at which student and teacher find the same token most likely. Return
    also the tokens of a turn, by the number of guesses that go with each token."""
    rows: list[list[bool]] = []
    for chosen in torch.arange(len(shard.ids_BT)).split(BATCH_ROWS):
        some = shard.rows(chosen)
        found_N, wanted_N = ((states_NH @ student.head_VH.T).argmax(-1) for states_NH in student(some))
        same_N = found_N == wanted_N
        rows += [part.tolist() for part in same_N.split(some.answer_BT.sum(1).tolist())]
    share = sum(map(sum, rows)) / sum(map(len, rows))
    return {
        "agreement": round(share, 4),
        **{f"tokens_per_turn_{count}": tokens_per_turn(rows, count) for count in (4, 8)},
    }


def tokens_per_turn(rows: list[list[bool]], count: int) -> float:
    """Return the tokens of a turn if each is followed by `count` guesses; `rows` say which tokens would be guessed right. A guess
    behind a wrong one never counts, so it does not matter what it is."""
    turns = 0
    for right in rows:
        at = 0
        while at < len(right):
            guessed = right[at + 1 : at + 1 + count]
            at += 1 + next((length for length, is_right in enumerate(guessed) if not is_right), len(guessed))
            turns += 1
    return round(sum(map(len, rows)) / turns, 2)


def cache_folder() -> Path:
    """Return the folder of trained models and their texts."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("swarmnode-tests"))


def texts_folder() -> Path:
    """Return the folder of the teacher's texts, after making it if it is missing."""
    folder = cache_folder() / "smollm2-texts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Lesson(NamedTuple):
    """Teacher and tokenizer, the shards to learn, and the texts that show the success."""

    teacher: Any
    tokenizer: Any
    shards: list[Shard]
    held_out: Shard


def prepare(recipe: Recipe) -> Lesson:
    """Return the teacher with its texts, after making those that are not in the cache, and seed torch."""
    whole = texts_folder() / "whole"
    if not whole.exists():
        open_model(str(trained(SMOLLM2)), whole)  # float weights
    first, *shards = make_shards(whole, recipe)
    torch.manual_seed(0)
    teacher, tokenizer = teacher_and_tokenizer(whole)
    return Lesson(teacher, tokenizer, [first.rows(slice(HELD_OUT, None)), *shards], first.rows(slice(HELD_OUT)))


def distilled(recipe: Recipe) -> Path:
    """Return the folder of the student, after making it if it is not in the cache. `agreement.json` in it has the shares."""
    place = cache_folder() / recipe.name
    if place.exists():
        return place
    began_s = time.perf_counter()
    lesson = prepare(recipe)
    texts_s = time.perf_counter() - began_s
    student = Student(lesson.teacher, recipe.layers)
    student.fit_translator(lesson.shards)
    curve = [{"cpu_s": 0, **agreement(student, lesson.held_out)}]
    for cpu_s in distil(student, lesson.shards, recipe.epochs):
        curve.append({"cpu_s": round(cpu_s), **agreement(student, lesson.held_out)})
        print(json.dumps(curve[-1]), file=sys.stderr)
    made = texts_folder() / recipe.name
    student.save(made)
    lesson.tokenizer.save_pretrained(made)
    times = {"texts_s": round(texts_s), "all_s": round(time.perf_counter() - began_s)}
    (made / "agreement.json").write_text(json.dumps({"curve": curve, **times}))
    made.rename(place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    folder = distilled(Recipe(**vars(parser.parse_args())))
    print(json.dumps({"folder": str(folder), **json.loads((folder / "agreement.json").read_text())}))


if __name__ == "__main__":
    main()
