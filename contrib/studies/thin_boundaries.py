"""Loss of pre-training by what crosses the boundaries between stages: codecs, and bottlenecks of R numbers. Appends JSON lines.

    python contrib/studies/thin_boundaries.py OUT.jsonl [--tokens 100000] [--hidden 256] [--layers 6] [--seeds 0] [--only NAME …]
    python contrib/studies/thin_boundaries.py OUT.jsonl --table

A Llama on bytes of the standard library's sources is trained in one process and cut into five stages. What crosses the four
boundaries is encoded and decoded by the wire's codecs, there and back. Settings that OUT has already are skipped, so a sweep
goes on where it ended. Every setting of a seed begins with the same weights and sees the same batches; held-out windows are the
same for all.

A bottleneck at a boundary is h -> (h E^T) D: E and D have R orthonormal rows; R numbers cross. `random`: E = D is drawn at each
boundary; otherwise E = D begins as the first R coordinates. `fixed` ones do not learn. `anchor`: the receiver adds a learnt
vector of the token, so token ids must cross as well (their bytes are counted); `small` makes it of R learnt numbers and a learnt
map, which is less for a large vocabulary. `frozen` is an anchor that does not learn: the
embedding of the token as it was drawn, which the sender takes away and the receiver adds. `residual`: the identity of the first R
coordinates stays, and a learnt map of R numbers is added to it on both sides (ResBM, arXiv 2604.11947). Projections have no
weight decay.

`--table` compares each setting with `none` of the same seed and tokens. It prints the held-out loss, with an interval if there are
three seeds, and the steps to the worse of the two last losses. Bytes are per token and boundary, both ways with scales. The time to
that loss is on a line that decides alone, relative to int4.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.training.update_rules import is_matrix, muon

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from corpus import batches, read_corpus

SEQUENCE, BATCH = 128, 8
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, LARGEST_NORM = 1e-3, 20, 0.1, 1.0
EVALUATE_EVERY, WINDOWS, LAST_WINDOWS = 20, 32, 256
HELD_OUT_BYTES = 200_000
ID_BYTES = 2  # of a token id on the wire, if anchors need it
CUTS = 4


@dataclass(frozen=True)
class Setting:
    """Setting of all boundaries: the codec of each way, and the bottleneck (a width of 0: none)."""

    codec: Codec = Codec.NONE
    divisor: int = 0  # hidden / R
    keep: float = 1.0
    random: bool = False
    fixed: bool = False
    anchor: bool = False
    small: bool = False
    frozen: bool = False
    residual: bool = False
    optimizer: str = "adamw"


SETTINGS = {
    "none": Setting(),
    "int4": Setting(Codec.INT4),
    "8x int8": Setting(Codec.INT8, 8),
    "16x int8": Setting(Codec.INT8, 16),
    "4x int8": Setting(Codec.INT8, 4),
    "8x int4": Setting(Codec.INT4, 8),
    "8x fixed int8": Setting(Codec.INT8, 8, fixed=True),
    "8x anchor int8": Setting(Codec.INT8, 8, anchor=True),
    "2x int4": Setting(Codec.INT4, 2),
    "top-k 1/10 feedback": Setting(Codec.TOPK, keep=0.1),
    "8x random int8": Setting(Codec.INT8, 8, random=True),
    "8x residual int8": Setting(Codec.INT8, 8, residual=True),
    "int8": Setting(Codec.INT8),
    "16x anchor int8": Setting(Codec.INT8, 16, anchor=True),
    "16x small anchor int8": Setting(Codec.INT8, 16, anchor=True, small=True),
    "8x frozen anchor int8": Setting(Codec.INT8, 8, frozen=True),
    "16x frozen anchor int8": Setting(Codec.INT8, 16, frozen=True),
    "8x": Setting(Codec.NONE, 8),
    "bf16": Setting(Codec.BF16),
    "muon none": Setting(optimizer="muon"),
    "muon 8x int8": Setting(Codec.INT8, 8, optimizer="muon"),
    "muon 16x anchor int8": Setting(Codec.INT8, 16, anchor=True, optimizer="muon"),
    "muon int4": Setting(Codec.INT4, optimizer="muon"),
    "int2": Setting(Codec.INT2),
}


class Wire:
    """Line of one boundary: it encodes and decodes both ways, and counts bytes. Top-k adds what it left out to the next values."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sent_bytes = {"forward": 0, "backward": 0}
        self._left: dict[str, Tensor] = {}

    def cross(self, values: Tensor, way: str) -> Tensor:
        """Return the values as they arrive."""
        sparse = self.setting.codec == Codec.TOPK and torch.is_grad_enabled() | (way == "backward")
        wanted = values + self._left.get(way, torch.zeros(())) if sparse else values
        kept = round(values.numel() * self.setting.keep) if self.setting.codec == Codec.TOPK else 0
        info, payload = encode(wanted.contiguous(), self.setting.codec, param=kept)
        said = decode(info, payload)
        if sparse:
            self._left[way] = wanted - said
        self.sent_bytes[way] += len(bytes(payload)) + (
            ID_BYTES * values[..., 0].numel() if self.setting.anchor | self.setting.frozen else 0
        )
        return said


class Crossing(torch.autograd.Function):
    """Activations cross a boundary on the way forward, their gradients on the way back."""

    @staticmethod
    def forward(context: Any, values: Tensor, wire: Wire) -> Tensor:
        context.wire = wire
        return wire.cross(values, "forward").clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.wire.cross(gradient, "backward"), None


class Boundary(nn.Module):
    """Bottleneck of one boundary with its line. Without a bottleneck it has no parameters."""

    def __init__(self, setting: Setting, hidden: int, seed: int) -> None:
        super().__init__()
        self.wire, self.setting = Wire(setting), setting
        self.ids_BT: Tensor | None = None
        self.frozen_VH = torch.zeros(())  # embedding that was drawn
        self.rank = hidden // setting.divisor if setting.divisor else 0
        if not self.rank:
            return
        first_RH = torch.eye(self.rank, hidden)
        if setting.random:
            drawn = torch.randn(hidden, self.rank, generator=torch.Generator().manual_seed(seed))
            first_RH = torch.linalg.qr(drawn)[0].T.contiguous()
        if setting.residual:
            first_RH = torch.zeros(self.rank, hidden)
        self.encoder_RH = nn.Parameter(first_RH.clone(), requires_grad=not setting.fixed)
        self.decoder_RH = nn.Parameter(first_RH.clone(), requires_grad=not setting.fixed)
        if setting.residual:  # both zero would give no gradient
            drawn_RH = torch.randn(self.rank, hidden, generator=torch.Generator().manual_seed(seed))
            self.encoder_RH.data = 0.02 * drawn_RH
        if setting.anchor:
            self.anchor_VA = nn.Parameter(torch.zeros(256, self.rank if setting.small else hidden))
        if setting.small:
            drawn_AH = torch.randn(self.rank, hidden, generator=torch.Generator().manual_seed(seed))
            self.anchor_AH = nn.Parameter(drawn_AH / math.sqrt(hidden))

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the hidden states as the receiver has them."""
        if not self.rank:
            return Crossing.apply(hidden_BTH, self.wire)
        if self.setting.frozen:
            known_BTH = nn.functional.embedding(self.ids_BT, self.frozen_VH)
            hidden_BTH = hidden_BTH - known_BTH
        code_BTR = hidden_BTH @ self.encoder_RH.T
        if self.setting.residual:
            code_BTR = code_BTR + hidden_BTH[..., : self.rank]
        code_BTR = Crossing.apply(code_BTR, self.wire)
        decoded_BTH = code_BTR @ self.decoder_RH
        if self.setting.residual:
            decoded_BTH = decoded_BTH + nn.functional.pad(code_BTR, (0, hidden_BTH.shape[-1] - self.rank))
        if self.setting.frozen:
            decoded_BTH = decoded_BTH + known_BTH
        if self.setting.anchor:
            anchor_BTA = nn.functional.embedding(self.ids_BT, self.anchor_VA)
            decoded_BTH = decoded_BTH + (anchor_BTA @ self.anchor_AH if self.setting.small else anchor_BTA)
        return decoded_BTH

    @torch.no_grad()
    def retract(self) -> None:
        """Return the projections to orthonormal rows, by Newton and Schulz."""
        if self.rank and not self.setting.fixed and not self.setting.residual:
            for matrix_RH in (self.encoder_RH, self.decoder_RH):
                for _ in range(3):
                    matrix_RH.copy_(torch.addmm(matrix_RH, matrix_RH @ matrix_RH.T, matrix_RH, beta=1.5, alpha=-0.5))


def places(layers: int) -> list[int]:
    """Return the layers behind which the model is cut into five stages."""
    return [round(layers * cut / (CUTS + 1)) - 1 for cut in range(1, CUTS + 1)]


def build(options: argparse.Namespace, setting: Setting, seed: int) -> tuple[Any, list[Boundary]]:
    """Return the model, and its boundaries, through which the hidden states go."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3, num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64, vocab_size=256, max_position_embeddings=SEQUENCE, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    boundaries = [Boundary(setting, options.hidden, seed * 100 + place) for place in places(options.layers)]
    for place, boundary in zip(places(options.layers), boundaries, strict=True):
        boundary.frozen_VH = model.get_input_embeddings().weight.detach().clone()

        def behind(_layer: object, _inputs: object, output: Any, boundary: Boundary = boundary) -> Any:
            if isinstance(output, tuple):
                return (boundary(output[0]), *output[1:])
            return boundary(output)

        model.model.layers[place].register_forward_hook(behind)
    return model, boundaries


def loss_of(model: Any, boundaries: list[Boundary], ids_BT: Tensor) -> Tensor:
    for boundary in boundaries:
        boundary.ids_BT = ids_BT
    loss: Tensor = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    return loss


class Trainer:
    """Optimiser of a model and its boundaries: AdamW, or Muon for matrices with AdamW for the others."""

    def __init__(self, setting: Setting, model: Any, boundaries: list[Boundary]) -> None:
        named = dict(model.named_parameters())
        self._own = {
            f"{name} {place}": one
            for place, boundary in enumerate(boundaries)
            for name, one in boundary.named_parameters()
            if one.requires_grad
        }
        self._matrices = {  # anchors are AdamW's, as embeddings are
            name: (one, torch.zeros_like(one))
            for name, one in {**named, **self._own}.items()
            if setting.optimizer == "muon" and is_matrix(name, one) and not name.startswith("anchor_VA")
        }
        others, own = ([one for name, one in each.items() if name not in self._matrices] for each in (named, self._own))
        self.parameters = [*named.values(), *(one for boundary in boundaries for one in boundary.parameters())]
        decayed = [one for one in others if one.dim() >= 2]
        groups = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": [one for one in others if one.dim() < 2] + own, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
        self._boundaries = boundaries

    def step(self, step: int) -> None:
        """Take a step along the gradients, and forget them."""
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        torch.nn.utils.clip_grad_norm_([one for one in self.parameters if one.grad is not None], LARGEST_NORM)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        with torch.no_grad():
            for name, (one, momentum) in self._matrices.items():
                decay = 0.0 if name in self._own else WEIGHT_DECAY
                muon(name, one, one.grad, momentum, beta=0.95, learning_rate=rate, weight_decay=decay)
        for boundary in self._boundaries:
            boundary.retract()
        for one in self.parameters:
            one.grad = None


@torch.no_grad()
def held_out_loss(model: Any, boundaries: list[Boundary], windows_NT: Tensor) -> float:
    losses = [loss_of(model, boundaries, ids_BT).item() for ids_BT in windows_NT.split(BATCH)]
    return statistics.mean(losses)


def train(options: argparse.Namespace, name: str, setting: Setting, seed: int) -> dict[str, Any]:
    """Train by a setting and return its line of the report."""
    corpus_N = read_corpus()
    drawn = batches(corpus_N[:-HELD_OUT_BYTES], BATCH, SEQUENCE, seed)
    windows_NT = next(batches(corpus_N[-HELD_OUT_BYTES:], LAST_WINDOWS, SEQUENCE, 12345))
    model, boundaries = build(options, setting, seed)
    trainer = Trainer(setting, model, boundaries)
    began_s = time.process_time()
    steps = options.tokens // (BATCH * SEQUENCE)
    curve: list[tuple[int, float]] = []
    for step, ids_BT in enumerate(islice(drawn, steps)):
        loss_of(model, boundaries, ids_BT).backward()
        trainer.step(step)
        if (step + 1) % EVALUATE_EVERY == 0:
            curve.append((step + 1, round(held_out_loss(model, boundaries, windows_NT[:WINDOWS]), 5)))
    for boundary in boundaries:
        boundary.wire.sent_bytes = dict.fromkeys(boundary.wire.sent_bytes, 0)
    loss_of(model, boundaries, next(drawn)).backward()
    sent_bytes = [sum(boundary.wire.sent_bytes.values()) / (BATCH * SEQUENCE) for boundary in boundaries]
    return {
        "setting": name, "seed": seed, "hidden": options.hidden, "layers": options.layers, "tokens": steps * BATCH * SEQUENCE,
        "loss": round(held_out_loss(model, boundaries, windows_NT), 5), "curve": curve,
        "parameters": sum(one.numel() for one in trainer.parameters),
        "bytes_per_token": statistics.mean(sent_bytes), "cpu_s": round(time.process_time() - began_s, 1),
    }  # fmt: skip


class Key(NamedTuple):
    """Identity of a run of the sweep."""

    setting: str
    seed: int
    hidden: int
    layers: int
    tokens: int


def finished(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the lines of the report by the run that they are of; empty if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Key(*(row[name] for name in Key._fields)): row for row in rows}


def steps_to(curve: list[tuple[int, float]], loss: float) -> float:
    """Return the steps after which a curve first has a loss, between two evaluations by a line; infinity if it never has."""
    before = (0, math.log(256))
    for step, found in curve:
        if found <= loss:
            share = (before[1] - loss) / (before[1] - found) if before[1] > found else 1.0
            return before[0] + share * (step - before[0])
        before = (step, found)
    return math.inf


def relative(rows: dict[Key, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each setting its means over seeds, relative to the run without compression of the same optimiser."""
    by_setting: dict[tuple[str, int, int, int], list[dict[str, float]]] = {}
    for key, row in rows.items():
        base = rows.get(key._replace(setting="muon none" if key.setting.startswith("muon") else "none"))
        if base is None:
            continue
        # The easier loss that both reach, if the setting ends above the base.
        aim = max(base["curve"][-1][1], row["curve"][-1][1])
        steps, base_steps = steps_to(row["curve"], aim), steps_to(base["curve"], aim)
        found = {
            "more_loss_percent": 100 * (row["loss"] / base["loss"] - 1), "steps": steps / base_steps,
            "bytes_per_token": row["bytes_per_token"], "cpu": row["cpu_s"] / base["cpu_s"],
        }  # fmt: skip
        by_setting.setdefault((key.setting, *key[2:]), []).append(found)
    for (setting, hidden, layers, tokens), found in by_setting.items():
        means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
        spread = [one["more_loss_percent"] for one in found]
        interval = 4.3 * statistics.stdev(spread) / math.sqrt(len(spread)) if len(spread) == 3 else None
        yield setting, {
            "hidden": hidden, "layers": layers, "tokens": tokens, "seeds": len(found), **means, "interval": interval
        }  # fmt: skip


def print_table(rows: dict[Key, dict[str, Any]]) -> None:
    found = list(relative(rows))
    line_s = {(row["tokens"], row["hidden"], name): row["steps"] * row["bytes_per_token"] for name, row in found}
    print("setting                hidden  tokens seeds  loss %  +-95 %  steps  B/token  time on the line / int4")
    for name, row in found:
        base = line_s.get((row["tokens"], row["hidden"], "muon int4" if name.startswith("muon") else "int4"))
        ratio = f"{line_s[row['tokens'], row['hidden'], name] / base:.2f}" if base else ""
        interval = "" if row["interval"] is None else f"{row['interval']:.2f}"
        print(
            f"{name:22} {row['hidden']:6} {row['tokens']:7} {row['seeds']:5} {row['more_loss_percent']:7.2f} {interval:>7} "
            f"{row['steps']:6.2f} {row['bytes_per_token']:8.1f}  {ratio}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        print_table(finished(options.out))
        return
    steps = options.tokens // (BATCH * SEQUENCE)
    for seed in options.seeds:
        for name in options.only:
            key = Key(name, seed, options.hidden, options.layers, steps * BATCH * SEQUENCE)
            if key in finished(options.out):
                continue
            row = train(options, name, SETTINGS[name], seed)
            with options.out.open("a") as report:
                report.write(json.dumps(row) + "\n")
            print(f"{name}, seed {seed}: {row['loss']:.4f}, {row['cpu_s']} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
