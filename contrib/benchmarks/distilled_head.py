"""Distil an EAGLE head for SmolLM2: `python contrib/benchmarks/distilled_head.py [--written 3 --epochs 4 …]`.

The head (arXiv 2401.15077) reads the teacher's last state and the token that was drawn behind it, and predicts the next state. It
is for `swarmnode run --draft-model FOLDER` at the node with the last layer. It begins as the linear map with the least squared
error. The texts are those of distilled.py. As at the last hop, the head sees answers alone. It learns two steps: from the
teacher's states, and from its own states of the first step.

Prints JSON: the folder, and the curve of the head. Each point has the CPU seconds of training, the share of right guesses in the
first and in the second step, and the tokens of a turn with two guesses. They are of held-out greedy answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from distilled import BATCH_ROWS, RIDGE, Lesson, Recipe, Shard, batches, cache_folder, distil, prepare, texts_folder
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

STEPS = 2  # guesses of a turn


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """Everything that decides the head."""

    layers: int = 1
    epochs: int = 4

    @property
    def name(self) -> str:
        """Name of the folder in the cache."""
        return f"smollm2-eagle-{self.written}-{self.read}-{self.epochs}"


class Head(nn.Module):
    """EAGLE head of the teacher. `head_VH` is the teacher's own head."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        config = type(teacher.config).from_dict({**teacher.config.to_dict(), "num_hidden_layers": 1})
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model
        self.layer = self.model.layers[0]
        self.layer.input_layernorm = self.model.norm = nn.Identity()
        for last in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(last.weight)  # the layer changes nothing at first
        self.model.embed_tokens.load_state_dict(teacher.get_input_embeddings().state_dict())
        self.model.embed_tokens.requires_grad_(requires_grad=False)
        self.fusion = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.register_buffer("head_VH", teacher.get_output_embeddings().weight.detach())

    def fuse(self, ids_BT: Tensor, hidden_BTH: Tensor) -> Tensor:
        """Return the inputs of `fusion`: the tokens' embeddings beside the states before them."""
        return torch.cat([self.model.embed_tokens(ids_BT), hidden_BTH], -1)

    @torch.inference_mode()
    def fit_fusion(self, shards: list[Shard]) -> None:
        """Set `fusion` to the affine map to the next state with the least squared error."""
        size = self.fusion.in_features + 1
        own, both = (torch.zeros(size, wide, dtype=torch.double) for wide in (size, self.fusion.out_features))
        for shard in batches(shards, epochs=1):
            known_BT, hidden_BTH = pairs(shard.answer_BT, 1), shard.hidden_BTH.float()
            fused_NI = self.fuse(shard.ids_BT[:, 1:], hidden_BTH[:, :-1])[known_BT]
            inputs_NI = torch.cat([fused_NI, torch.ones(len(fused_NI), 1)], 1).double()
            own += inputs_NI.T @ inputs_NI
            both += inputs_NI.T @ hidden_BTH[:, 1:][known_BT].double()
        weights = torch.linalg.solve(own + RIDGE * own.diagonal().mean() * torch.eye(size), both).T
        self.fusion.weight.copy_(weights[:, :-1])
        self.fusion.bias.copy_(weights[:, -1])

    def steps(self, shard: Shard) -> list[tuple[Tensor, Tensor]]:
        """Return the head's states and the teacher's (N, H) of each step, at the N positions whose next tokens are of answers."""
        hidden_BTH, found = shard.hidden_BTH[:, :-1].float(), []
        for step in range(1, STEPS + 1):
            known_BT = pairs(shard.answer_BT, step)
            positions_BT = (known_BT.cumsum(1) - 1).clamp(min=0)
            inputs_BTH = self.fusion(self.fuse(shard.ids_BT[:, step:], hidden_BTH))
            left_BTH = self.model(
                inputs_embeds=inputs_BTH, attention_mask=known_BT.long(), position_ids=positions_BT
            ).last_hidden_state
            found.append((left_BTH[known_BT], shard.hidden_BTH[:, step:][known_BT].float()))
            hidden_BTH = left_BTH[:, :-1]
        return found

    def forward(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Return the head's states and the teacher's (N, H) of all steps."""
        found, wanted = zip(*self.steps(shard), strict=True)
        return torch.cat(found), torch.cat(wanted)

    def save(self, folder: Path) -> None:
        """Write the head in the form of EAGLE's checkpoints."""
        self.model.config.save_pretrained(folder)
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        fusion = {f"fc.{name}": tensor for name, tensor in self.fusion.state_dict().items()}
        embedding = {"embed_tokens.weight": self.model.embed_tokens.weight}
        stored = {name: tensor.detach().contiguous() for name, tensor in (layer | fusion | embedding).items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def pairs(answer_BT: Tensor, step: int) -> Tensor:
    """Return whether each position and the one `step` positions later are both of the answer, (B, T - step)."""
    return answer_BT[:, :-step] & answer_BT[:, step:]


@torch.inference_mode()
def success(head: Head, shard: Shard) -> dict[str, float]:
    """Return the share of right guesses by step, and the tokens of a turn, in greedy answers."""
    right: list[list[list[bool]]] = [[] for _ in range(STEPS)]  # by step and text
    for chosen in torch.arange(len(shard.ids_BT)).split(BATCH_ROWS):
        some = shard.rows(chosen)
        for step, (found_NH, wanted_NH) in enumerate(head.steps(some)):
            same_N = (found_NH @ head.head_VH.T).argmax(-1) == (wanted_NH @ head.head_VH.T).argmax(-1)
            counts = pairs(some.answer_BT, step + 1).sum(1).tolist()
            right[step] += [part.tolist() for part in same_N.split(counts)]
    tokens = sum(map(len, right[0]))
    shares = {f"right_{step + 1}": round(sum(map(sum, one)) / sum(map(len, one)), 4) for step, one in enumerate(right)}
    return {**shares, "tokens_per_turn": round(tokens / sum(map(turns, *right)), 2)}


def turns(first: list[bool], second: list[bool]) -> int:
    """Return the turns of a text. `first` and `second` say whether the two guesses behind each token are right."""
    at = count = 0
    while at < len(first):
        at += 1 + (first[at] + second[at] if first[at] and at < len(second) else first[at])
        count += 1
    return count


def distilled_head(recipe: HeadRecipe) -> Path:
    """Return the folder of the head, after making it if it is not in the cache. `agreement.json` in it has the curve."""
    place = cache_folder() / recipe.name
    if not place.exists():
        made = texts_folder() / recipe.name
        teach(prepare(recipe), recipe, made)
        made.rename(place)
    return place


def teach(lesson: Lesson, recipe: HeadRecipe, folder: Path) -> None:
    """Distil a head, and write it into a folder."""
    head = Head(lesson.teacher)
    head.fit_fusion(lesson.shards)
    curve = [{"cpu_s": 0, **success(head, lesson.held_out)}]
    for cpu_s in distil(head, lesson.shards, recipe.epochs):
        curve.append({"cpu_s": round(cpu_s), **success(head, lesson.held_out)})
        print(json.dumps(curve[-1]), file=sys.stderr)
    folder.mkdir(exist_ok=True)
    head.save(folder)
    lesson.tokenizer.save_pretrained(folder)
    (folder / "agreement.json").write_text(json.dumps({"curve": curve}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(HeadRecipe()).items():
        if name != "layers":
            parser.add_argument(f"--{name}", type=int, default=value)
    folder = distilled_head(HeadRecipe(**vars(parser.parse_args())))
    print(json.dumps({"folder": str(folder), **json.loads((folder / "agreement.json").read_text())}))


if __name__ == "__main__":
    main()
