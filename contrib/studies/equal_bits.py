"""Study of equal bits: positions of a packed model with fast products, alone and in company, with several numbers of threads.

    python contrib/studies/equal_bits.py [--tokens 20000] [--threads 1 2] [--layers 30] [--length 1100] [--kv int8]
    python contrib/studies/equal_bits.py --model MIXTURE.gguf --slots 8 [--tokens 20000] [--threads 1 2] [--layers 2]

Pages of docs are cut into texts. SmolLM2's first layers compute each text alone: a prompt, then one position a pass, as a session
that decodes. They compute it again as one of four sessions side by side, sometimes by two positions a pass, as guesses do, and as
one prompt, as a replay does; all of it with each number of threads. Steady steps are recorded and replayed, as in a node.
`--model` takes another GGUF file, with random tokens. `--slots` repeats it all with memory for that number of experts in a layer.

Prints JSON: the positions of the texts, and for each way and number of threads how many have other bits behind the last layer than
alone with the first number of threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is imported: waiting threads leave their core to others

import torch
from torch import Tensor
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.founding.model_source import open_model
from tests.trained import SMOLLM2, trained

COMPANY, PROMPT = 4, 500
CACHE_BYTES = 1 << 29


def hidden_states(span: ModelSpan, texts: list[Tensor], prompt: int, kv: str, *, guesses: bool) -> list[Tensor]:
    """Return the states (T, H) of texts ids_T that are computed side by side behind prompts of `prompt` positions or a few less."""
    runner = StageRunner(span, RunnerConfig(CACHE_BYTES, kv=kv, capture=True))
    found: list[list[Tensor]] = [[] for _ in texts]
    left = list(texts)
    for at, ids_T in enumerate(texts):
        runner.open(at, rows=1, max_length=len(ids_T))
    turn = 0
    while any(len(ids_T) for ids_T in left):
        counts = [1 + (guesses and turn % 50 < 4 + at) if found[at] else prompt - 7 * at for at in range(len(texts))]
        works = [StepInput(at, left[at][None, :count]) for at, count in enumerate(counts) if len(left[at])]
        left = [ids_T[count:] for ids_T, count in zip(left, counts, strict=True)]
        for result in runner.run(works):
            found[result.session_id].append(result.output[0])  # type: ignore[call-overload]
        turn += 1
    for at in range(len(texts)):
        runner.close(at)
    return [torch.cat(parts) for parts in found]


@torch.inference_mode()
def main() -> None:
    """Print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--length", type=int, default=1100, help="positions of a text")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--kv", default="plain", choices=["plain", "int8"])
    parser.add_argument("--model", type=Path, help="GGUF file instead of SmolLM2's")
    parser.add_argument("--slots", type=int, default=0, help="experts of a layer in memory, besides all of them")
    options = parser.parse_args()
    model = options.model or trained(SMOLLM2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_model(str(model), Path(folder) / "model", packs=True)
        spans = {
            f"{slots} slots" if slots else "memory": load_span(
                checkpoint,
                0,
                1 + options.layers,
                dtype=getattr(torch, options.dtype),
                products="fast",
                expert_slots=slots,
            )
            for slots in dict.fromkeys((0, options.slots))
        }
        if options.model is not None:
            most = min(2000, checkpoint.config.vocab_size)
            ids_N = torch.randint(most // 20, most, (options.tokens,), generator=torch.Generator().manual_seed(0))
        else:
            tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
            pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
            ids_N = torch.tensor(tokenizer("\n".join(page.read_text("utf-8") for page in pages)).input_ids)
        texts = list(ids_N[: options.tokens // options.length * options.length].split(options.length))
        differ: dict[str, int] = {}
        positions = 0
        for start in range(0, len(texts), COMPANY):
            some = texts[start : start + COMPANY]
            known: list[Tensor] = []
            for threads, (place, span) in itertools.product(options.threads, spans.items()):
                torch.set_num_threads(threads)

                def alone(prompt: int, span: ModelSpan = span, some: list[Tensor] = some) -> list[Tensor]:
                    return [hidden_states(span, [one], prompt, options.kv, guesses=False)[0] for one in some]

                ways = {
                    "alone": alone(PROMPT),
                    "in company": hidden_states(span, some, PROMPT, options.kv, guesses=True),
                    "replay": alone(options.length),
                }
                known = known or ways["alone"]
                for way, states in ways.items():
                    name = f"{way}, {threads} threads, {place}"
                    wrong = sum(int((a != b).any(-1).sum()) for a, b in zip(known, states, strict=True))
                    differ[name] = differ.get(name, 0) + wrong
            positions += sum(map(len, some))
            print(positions, differ, file=sys.stderr, flush=True)
        print(json.dumps({**vars(options), "model": model.name, "positions": positions, "differ": differ}, indent=1))


if __name__ == "__main__":
    main()
