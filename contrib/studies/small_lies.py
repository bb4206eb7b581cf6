"""Smallest lies that audits find, one position a text, against deviations of honest peers over kernels, adapters and models.

    OMP_NUM_THREADS=1 python contrib/studies/small_lies.py record FOLDER [--model CHECKPOINT_OR_GGUF] [--texts 32] [--seed 1]

`record` computes the same texts in processes whose kernels differ (those of this machine, AVX2's, and ATen's and oneDNN's oldest):
each once as it is served and once as an audit does, without and with an adapter, and once for each lie of the first hop. The states
that each hop sends on are kept in FOLDER. Without `--model` it is a small Llama with random weights.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the line above: it reads OMP_NUM_THREADS when it is imported
from torch import Tensor, nn

from swarmnode.compute.model.adapters.adapter_file import Lora, features_of
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.founding.model_source import open_plain

LENGTH, PROMPT = 128, 32
FORMATS = ("float32", "bfloat16")
KERNELS = {
    "own": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "old": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
LIES = ("zeroed", "swapped", "head", "early")
RANK, STRENGTH = 4, 0.05  # of the adapter: its product is a tenth of a layer's own, or so
CHUNK_SESSIONS = 16  # decoded together


@dataclass
class Lie:
    """Lie of the first hop at the position `at`. Its `kind` is one of LIES; `head` silences one attention head of the hop's
    last layer."""

    kind: str
    at: int


def hops_of(units: int) -> tuple[tuple[int, int], ...]:
    """Return three hops over the units. The last one has the head."""
    third = units // 3
    return (0, third), (third, 2 * third), (2 * third, units)


class Pipeline:
    """Three hops on this process's kernels."""

    def __init__(self, checkpoint: Checkpoint, number_format: str, *, adapted: bool) -> None:
        self.dtype = getattr(torch, number_format)
        self.spans = [load_span(checkpoint, *hop, dtype=self.dtype) for hop in hops_of(checkpoint.family.units)]
        self.adapter = "adapter" if adapted else ""
        self.heads = checkpoint.config.num_attention_heads
        for span in self.spans if adapted else ():
            span.adapters.add("adapter", random_loras(span.model, self.dtype))

    def runners(self) -> list[StageRunner]:
        return [StageRunner(span, RunnerConfig(cache_bytes=1 << 31)) for span in self.spans]

    @torch.inference_mode()
    def compute(self, ids_ST: Tensor, *, served: bool, lies: Sequence[Lie] = ()) -> dict[str, Any]:
        """`hidden`: of each hop but the last what it sends on, hidden_STH; `drawn_ST`: the likeliest tokens."""
        sent: list[list[Tensor]] = [[], [], []]
        for first in range(0, len(ids_ST), CHUNK_SESSIONS):
            runners, part_ST = self.runners(), ids_ST[first : first + CHUNK_SESSIONS]
            for runner in runners:
                for session in range(len(part_ST)):
                    runner.open(session, rows=1, max_length=LENGTH, adapter=self.adapter)
            pieces: list[list[Tensor]] = [[], [], []]
            for start, end in as_served() if served else [(0, LENGTH)]:
                x = list(part_ST[:, start:end].unsqueeze(1))
                for index, runner in enumerate(runners):
                    if lies and index == 0:
                        x = [self._lied(runner, n, x[n], lies[first + n]) for n in range(len(x))]
                    elif served and end - start == 1:
                        x = [
                            one.output for one in runner.run([StepInput(n, x[n], want=WANT_ALL) for n in range(len(x))])
                        ]
                    else:
                        x = [runner.run([StepInput(n, x[n], want=WANT_ALL)])[0].output for n in range(len(x))]
                    pieces[index].append(torch.cat(x))
                    x = [one.to(self.dtype) for one in x]
            for index, found in enumerate(pieces):
                sent[index].append(torch.cat(found, dim=1))
        *hidden, logits = (torch.cat(found) for found in sent)
        return {"hidden": hidden, "drawn_ST": logits.float().argmax(-1)}

    def _lied(self, runner: StageRunner, session: int, x_BT: Tensor, lie: Lie) -> Tensor:
        at, hook = lie.at, None
        if lie.kind == "head":
            layer: nn.Module = [m for name, m in runner.span.model.named_modules() if name.endswith("o_proj")][-1]
            hook = layer.register_forward_pre_hook(lambda _layer, inputs: (self._silenced(inputs[0], at),))
        y_BTH = runner.run([StepInput(session, x_BT, want=WANT_ALL)])[0].output
        if hook is not None:
            hook.remove()
        elif lie.kind == "swapped":
            y_BTH = y_BTH.clone()
            y_BTH[:, [at, at - 1]] = y_BTH[:, [at - 1, at]]
        else:
            y_BTH = y_BTH.clone()
            y_BTH[:, at] = 0
        return y_BTH

    def _silenced(self, x_BTH: Tensor, at: int) -> Tensor:
        size = x_BTH.shape[-1] // self.heads
        x_BTH = x_BTH.clone()
        head = at % self.heads
        x_BTH[:, at, head * size : (head + 1) * size] = 0
        return x_BTH


def random_loras(model: nn.Module, dtype: torch.dtype) -> dict[str, Lora]:
    """Return random LoRAs for the projections of queries and values, and the last projection of each MLP."""
    generator, loras = torch.Generator().manual_seed(1), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "v_proj", "down_proj"):
            inputs, outputs = features_of(module) or (0, 0)
            a_RI, b_OR = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
            loras[name] = Lora((a_RI / inputs**0.5).to(dtype), (b_OR * STRENGTH).to(dtype))
    return loras


def as_served() -> Iterator[tuple[int, int]]:
    yield 0, PROMPT
    yield from ((at, at + 1) for at in range(PROMPT, LENGTH))


# -- recording


def record(folder: Path, model: str, texts: int, seed: int) -> None:
    """Every run of every kernel, one process after another."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ids.pt").exists():
        checkpoint = open_plain(model, folder / "model") if model else small_llama(folder / "model", seed)
        torch.save({"checkpoint": str(checkpoint.path), "ids_ST": texts_of(checkpoint, texts, seed)}, folder / "ids.pt")
    for kernel, settings in KERNELS.items():
        command = [sys.executable, __file__, "compute", str(folder), "--kernel", kernel, "--seed", str(seed)]
        subprocess.run(command, env={**os.environ, **settings}, check=True)


def small_llama(folder: Path, seed: int) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint(folder)


def texts_of(checkpoint: Checkpoint, texts: int, seed: int) -> Tensor:
    """ids_ST: of this repository's pages where the model has a tokenizer, else drawn."""
    if not (checkpoint.path / "tokenizer.json").exists():
        return torch.randint(
            0, checkpoint.config.vocab_size, (texts, LENGTH), generator=torch.Generator().manual_seed(seed)
        )
    from tokenizers import Tokenizer

    pages = "\n".join(page.read_text() for page in sorted((Path(__file__).parents[2] / "docs").rglob("*.md")))
    ids = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json")).encode(pages).ids
    starts = random.Random(seed).sample(range(len(ids) - LENGTH), texts)
    return torch.tensor([ids[start : start + LENGTH] for start in starts])


def compute(folder: Path, kernel: str, seed: int) -> None:
    """Compute all texts in this process, with the kernel `kernel`, and save the states of each way and lie in `folder`."""
    told = torch.load(folder / "ids.pt")
    checkpoint, ids_ST = Checkpoint(Path(told["checkpoint"])), told["ids_ST"]
    for number_format in FORMATS:
        for adapted in (False, True):
            pipeline = Pipeline(checkpoint, number_format, adapted=adapted)
            name = f"{number_format}{'+adapter' if adapted else ''}.{kernel}"
            began_s = time.perf_counter()
            for way in ("served", "audited"):
                torch.save(pipeline.compute(ids_ST, served=way == "served"), folder / f"{name}.{way}.pt")
            for kind in LIES if kernel == "own" and not adapted else ():
                dice = random.Random(seed)
                lies = [
                    Lie(kind, dice.randrange(1, 5) if kind == "early" else dice.randrange(5, LENGTH - 1))
                    for _ in ids_ST
                ]
                torch.save(pipeline.compute(ids_ST, served=False, lies=lies), folder / f"{name}.{kind}.pt")
            print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("record", "compute"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--kernel", default="own")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.do == "record":
        record(args.folder, args.model, args.texts, args.seed)
    elif args.do == "compute":
        compute(args.folder, args.kernel, args.seed)


if __name__ == "__main__":
    main()
