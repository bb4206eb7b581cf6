"""Train a small model that copies its prompt with edits, for drafts.py: `python contrib/benchmarks/copying.py [--steps 500 250]`.

The model is a byte-level Llama that `swarmnode train --local` teaches. Its texts are pieces of the standard library's sources. A
copy follows each of them, with other words for `WORDS`. The first run uses short samples, which teach copying in fewer tokens;
the second run teaches the same over `SEQUENCE` positions. The result lies in the user's cache (or $SWARMNODE_TEST_MODELS), and is
trained again only if it is not there. Prints the folder and, as JSON, the share of held-out copies' bytes that the model
predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path

import platformdirs

END, COPY = "\0", "\x03"  # after a copy, and between a text and its copy
WORDS = {"return": "yield", "None": "null", "self": "this", "import": "use"}
LAYERS, HIDDEN, SEQUENCE, SHORT = 4, 128, 384, 128
STEP_TOKENS, MICROBATCH_TOKENS = 6144, 3072
STEPS = (500, 250)  # of the short and of the long run
LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
VARIABLE = "SWARMNODE_TEST_MODELS"
MAX_REPEAT = 30  # bytes: an answer that repeats a longer piece of itself would be a loop's


def edited(text: str) -> str:
    """Return `text` with its words replaced."""
    return re.sub("|".join(WORDS), lambda found: WORDS[found[0]], text)


def repeats(text: str, length: int = MAX_REPEAT) -> bool:
    """Return whether a piece of `length` characters stands in `text` twice."""
    pieces = [text[start : start + length] for start in range(len(text) - length + 1)]
    return len(set(pieces)) < len(pieces)


def sources() -> list[str]:
    """Return the standard library's modules as ASCII texts, in the order of their names."""
    texts = [path.read_bytes() for path in sorted(Path(typing.__file__).parent.glob("*.py"))]
    return [text.decode() for text in texts if text.isascii()]


def pieces(texts: list[str], length: int, seed: int) -> Iterator[str]:
    """Yield pieces of `length` characters of random places, without end. No piece repeats a long part of itself."""
    chance = random.Random(seed)
    long_enough = [text for text in texts if len(text) > length]
    while True:
        text = chance.choice(long_enough)
        start = chance.randrange(len(text) - length)
        piece = text[start : start + length]
        if not repeats(piece):
            yield piece


def sample(piece: str, sequence: int) -> str:
    """Return a piece and as much of its copy as fits into `sequence` - 1 bytes; the trainer adds the last one."""
    return (piece + COPY + edited(piece) + END * sequence)[: sequence - 1]


def write_samples(path: Path, texts: list[str], sequence: int, count: int, seed: int) -> None:
    """Write `count` samples as lines of JSON. Pieces have various lengths, so that the copy does not begin at one position."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            length = chance.randrange(sequence // 4, sequence // 2)
            piece = next(pieces(texts, length, chance.getrandbits(32)))
            file.write(json.dumps({"text": sample(piece, sequence)}) + "\n")


def write_config(folder: Path) -> None:
    """Write the config of the model into `folder`."""
    folder.mkdir(parents=True)
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 2 * SEQUENCE, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))


def command(folder: Path, *arguments: str) -> None:
    """Run `swarmnode` with a home in `folder`. Raises CalledProcessError if it fails."""
    home = ("--home", str(folder / "home"))
    subprocess.run([sys.executable, "-m", "swarmnode.cli.main", *arguments, *home], check=True, cwd=folder)


def taught(folder: Path, name: str, source: tuple[str, str], sequence: int, steps: int) -> Path:
    """Train the model of `source` (an option of `swarmnode create` and its value) and return the trained checkpoint's folder."""
    data, out = folder / f"{name}.jsonl", folder / f"{name}-trained"
    batch = STEP_TOKENS // sequence
    write_samples(data, sources()[::2], sequence, 20 * batch * max(10, steps // 20), seed=sequence)
    command(folder, "create", name, "--mode", "train", *source)
    rate = LEARNING_RATE if sequence == SHORT else LEARNING_RATE / 2
    settings = {
        "data": data, "steps": steps, "batch": batch, "microbatch": MICROBATCH_TOKENS // sequence, "sequence": sequence,
        "lr": rate, "warmup": min(WARMUP_STEPS, steps // 4), "out": out, "threads": 1, "log": folder / f"{name}.log",
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command(folder, "train", f"{name}.swarm", "--local", "--json", *options)
    return out


def trained_model(steps: tuple[int, int] = STEPS) -> Path:
    """Return the folder of the trained model, after training it if it is not in the cache."""
    cache = Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("swarmnode-tests"))
    place = cache / "copying-{}-{}".format(*steps)
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as name:
            folder = Path(name)
            write_config(folder / "config")
            first = taught(folder, "short", ("--config", str(folder / "config")), SHORT, steps[0])
            taught(folder, "long", ("--model", str(first)), SEQUENCE, steps[1]).rename(place)
    return place


def held_out(count: int, length: int = SEQUENCE // 2 - 16) -> list[tuple[str, str]]:
    """Return `count` prompts of modules that were not learnt, with the edited copies that should follow."""
    found = [next(pieces(sources()[1::2], length, seed)) for seed in range(count)]
    return [(piece + COPY, edited(piece) + END) for piece in found]


def predicted_share(folder: Path, count: int = 16) -> float:
    """Return the share of the bytes of held-out copies that the model finds most likely."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = total = 0
    for prompt, copy in held_out(count):
        ids = torch.tensor([list((prompt + copy).encode())])
        with torch.inference_mode():
            best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        right += int((best == ids[0, len(prompt) :]).sum())
        total += len(copy)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="steps of the short and of the long run")
    folder = trained_model(tuple(parser.parse_args().steps))
    print(json.dumps({"folder": str(folder), "predicted_share": round(predicted_share(folder), 4)}))


if __name__ == "__main__":
    main()
