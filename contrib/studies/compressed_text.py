"""Tokens of compressed sessions that differ from those of exact ones: greedy texts of a small model that was trained.

    python contrib/studies/compressed_text.py [--steps 600] [--texts 64] [--seed 0]

The Llama of `inversion.py` (8 blocks of width 128, on Python sources as bytes) continues texts that it has not seen, greedily.
Then each position is computed again, after the same tokens, with states that are rounded where they enter blocks 2, 4 and 6, as
on a route of four hops: `agreement` is the share of positions at which the likeliest token is the same. The last row is what
hops choose on a very slow link: int4 for the prompt, int8 for the steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from inversion import LENGTH, batches, corpus, train_model
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode

PROMPT = LENGTH // 2
LINKS = (1, 3, 5)  # blocks whose output is sent on
WAYS = {  # prompt, steps
    "bf16": (Codec.BF16, Codec.BF16),
    "fp16": (Codec.FP16, Codec.FP16),
    "int8": (Codec.INT8, Codec.INT8),
    "int4": (Codec.INT4, Codec.INT4),
    "int4, int8": (Codec.INT4, Codec.INT8),
}


def crossing(prompt: Codec, steps: Codec) -> Callable[[Any, Any, Any], Any]:
    """Return a forward hook that rounds hidden_BTH as two codecs do: one for the `prompt`, one for the `steps` after it."""

    def cross(_block: object, _inputs: object, output: Any) -> Any:
        hidden_BTH: Tensor = output[0] if isinstance(output, tuple) else output
        parts = [(hidden_BTH[:, :PROMPT], prompt), (hidden_BTH[:, PROMPT:], steps)]
        rounded_BTH = torch.cat([decode(*encode(part.contiguous(), codec)) for part, codec in parts], dim=1)
        return (rounded_BTH, *output[1:]) if isinstance(output, tuple) else rounded_BTH

    return cross


@torch.no_grad()
def likeliest(model: Any, ids_BT: Tensor, way: Sequence[Codec] | None) -> Tensor:
    """Return the likeliest ids_BT after each position from the prompt's last one on, with hidden states rounded by the codecs
    `way`."""
    hooks = [] if way is None else [model.model.layers[at].register_forward_hook(crossing(*way)) for at in LINKS]
    logits_BTV = model(input_ids=ids_BT).logits
    for hook in hooks:
        hook.remove()
    return logits_BTV[:, PROMPT - 1 :].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 600), ("texts", 64), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    known, unseen = corpus()
    model = train_model(known, arguments.steps, arguments.seed)
    drawn = torch.cat(list(islice(batches(unseen, arguments.seed), -(-arguments.texts // 16))))[: arguments.texts]
    ids_BT = model.generate(drawn[:, :PROMPT], max_length=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    exact_BT = likeliest(model, ids_BT, None)
    print(f"{exact_BT.numel()} positions; prompt, steps: agreement")
    for name, way in WAYS.items():
        print(f"{name:<12}{(likeliest(model, ids_BT, way) == exact_BT).float().mean().item():>8.2%}")


if __name__ == "__main__":
    main()
