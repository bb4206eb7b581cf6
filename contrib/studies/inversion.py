"""Text that a peer in the middle can read from hidden states: an inverter is trained on a boundary of a tiny language model.

    python contrib/studies/inversion.py [--steps 150] [--seed 0] [--codecs none,int8,int4,topk] [--attacks nearest,linear,mlp]

A volunteer that holds units [i, j) sees hidden_BTH before unit i. The swarm gives it the model's
weights, and texts are at hand. So it can run the model itself and learn the tokens behind the hidden states. Here a Llama of
8 blocks is trained for a while on one half of the standard library's sources (as bytes). Each attack is tried on the unseen half,
for each codec, on the states as they arrive (of top-k a twentieth of the elements). Boundary 0 is the embedding alone.

    nearest   the token whose embedding points most the way of the hidden state; nothing is learnt.
    linear    a linear map, learnt from the first half.
    mlp       a small MLP, learnt from the first half.
    gradient  the same MLP, but of the gradient that comes back in training, for the label: the token after the position.

The share of tokens that they name is printed. A lower bound: attackers that weigh whole sentences, or train for longer, get more.
"""

from __future__ import annotations

import argparse
import functools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode

VOCABULARY = 256
WIDTH = 128
BLOCKS = 8
LENGTH = 128
BATCH = 16
CORPUS_BYTES = 2_000_000
BOUNDARIES = (0, 1, 2, 4, 6, 8)  # number of blocks before each
KEEP = 0.05  # of top-k
TRIED = 20  # batches
ATTACKS = "nearest,linear,mlp,gradient"


def corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's sources, halved by files: text to learn from, and text to try attacks on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size)
    return _bytes(files[::2]), _bytes(files[1::2])


def _bytes(files: Sequence[Path]) -> Tensor:
    text = b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield batches ids_BT from random places of `tokens`, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])


def train_model(tokens: Tensor, steps: int, seed: int) -> LlamaForCausalLM:
    """Return a small Llama that was trained on the text for `steps` steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _, ids_BT in zip(range(steps), batches(tokens, seed), strict=False):
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"model: {BLOCKS} blocks, width {WIDTH}, loss {loss.item():.2f} nats a byte after {steps} steps")
    return model.eval().requires_grad_(False)


def hidden_states(model: LlamaForCausalLM, ids_BT: Tensor, codec: Codec) -> list[Tensor]:
    """Return hidden_BTH at each of BOUNDARIES, as a peer gets them."""
    with torch.no_grad():
        states = _states(model, ids_BT)
        return [arrived(states[boundary], codec) for boundary in BOUNDARIES]


def gradients(model: LlamaForCausalLM, ids_BT: Tensor, codec: Codec) -> list[Tensor]:
    """Return gradient_BTH of the loss at each of BOUNDARIES, as it comes back; the last position has none."""
    with torch.enable_grad():
        model.get_input_embeddings().requires_grad_(True)
        states = _states(model, ids_BT)
        logits_BTV = model.lm_head(model.model.norm(states[BLOCKS]))
        loss = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        found = torch.autograd.grad(loss, [states[boundary] for boundary in BOUNDARIES])
    return [arrived(gradient_BTH[:, :-1] / gradient_BTH.std(), codec) for gradient_BTH in found]


def _states(model: LlamaForCausalLM, ids_BT: Tensor) -> list[Tensor]:
    """Return hidden_BTH before the first block and after each one, before the final norm."""
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _block, _in, out: states.append(out)) for block in model.model.layers]
    first = model.model.layers[0].register_forward_pre_hook(lambda _block, inputs: states.append(inputs[0]))
    model.model(input_ids=ids_BT, use_cache=False)
    for hook in (*hooks, first):
        hook.remove()
    return states


def arrived(hidden_BTH: Tensor, codec: Codec) -> Tensor:
    """Return `hidden_BTH` as it arrives after encoding with `codec`."""
    kept = round(KEEP * hidden_BTH.numel()) if codec == Codec.TOPK else 0
    return decode(*encode(hidden_BTH, codec, param=kept))


def inverter(kind: str) -> nn.Module:
    """Return an untrained model from hidden_BTH to logits_BTV over the token at the same position."""
    normed = nn.LayerNorm(WIDTH)
    if kind == "linear":
        return nn.Sequential(normed, nn.Linear(WIDTH, VOCABULARY))
    return nn.Sequential(normed, nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, VOCABULARY))


Seen = Callable[[Tensor], tuple[list[Tensor], Tensor]]
"""ids_BT -> the values at each of BOUNDARIES, and the tokens to name from them."""


def what_passes(model: LlamaForCausalLM, attack: str, codec: Codec) -> Seen:
    """Return a function from ids_BT to what passes by: hidden states and their tokens, or gradients and labels for the "gradient"
    attack."""
    if attack == "gradient":
        return lambda ids_BT: (gradients(model, ids_BT, codec), ids_BT[:, 1:])
    return lambda ids_BT: (hidden_states(model, ids_BT, codec), ids_BT)


def nearest(embedding_VH: Tensor, state_BTH: Tensor) -> Tensor:
    """Return logits_BTV: the cosines of the angles between the states and the embeddings."""
    return nn.functional.normalize(state_BTH, dim=-1) @ nn.functional.normalize(embedding_VH, dim=-1).T


def learn(kind: str, seen: Seen, known: Tensor, steps: int, seed: int) -> list[nn.Module]:
    """Return an inverter for each boundary, trained on known text."""
    torch.manual_seed(seed)
    inverters = [inverter(kind) for _ in BOUNDARIES]
    optimizer = torch.optim.AdamW([p for one in inverters for p in one.parameters()], lr=2e-3)
    for _, ids_BT in zip(range(steps), batches(known, seed + 1), strict=False):
        passed, wanted_BT = seen(ids_BT)
        logits = [one(state_BTH) for one, state_BTH in zip(inverters, passed, strict=True)]
        loss = torch.stack(
            [nn.functional.cross_entropy(one.flatten(0, 1), wanted_BT.flatten()) for one in logits]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return inverters


@torch.no_grad()
def named_shares(inverters: Sequence[Callable[[Tensor], Tensor]], seen: Seen, unseen: Tensor, seed: int) -> list[float]:
    """Return for each boundary the share of unseen tokens that its inverter names right."""
    right, total = torch.zeros(len(BOUNDARIES)), 0
    for _, ids_BT in zip(range(TRIED), batches(unseen, seed + 2), strict=False):
        passed, wanted_BT = seen(ids_BT)
        named = [one(state_BTH).argmax(-1) for one, state_BTH in zip(inverters, passed, strict=True)]
        right += torch.stack([(guess_BT == wanted_BT).sum() for guess_BT in named])
        total += wanted_BT.numel()
    return (right / total).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of the model, and of each inverter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codecs", default="none,int8,int4,topk", help="codecs of the states")
    parser.add_argument("--attacks", default=ATTACKS)
    arguments = parser.parse_args()
    known, unseen = corpus()
    guess = (unseen == known.mode().values).float().mean().item()
    print(f"always naming the most frequent byte: {guess:.1%}")
    model = train_model(known, arguments.steps, arguments.seed)
    embedding_VH = model.get_input_embeddings().weight.detach()
    print("after block    " + "".join(f"{boundary:>8}" for boundary in BOUNDARIES))
    for codec in (Codec[name.upper()] for name in arguments.codecs.split(",")):
        for attack in arguments.attacks.split(","):
            seen = what_passes(model, attack, codec)
            inverters: Sequence[Callable[[Tensor], Tensor]] = (
                [functools.partial(nearest, embedding_VH)] * len(BOUNDARIES)
                if attack == "nearest"
                else learn(attack, seen, known, arguments.steps, arguments.seed)
            )
            shares = named_shares(inverters, seen, unseen, arguments.seed)
            print(f"{codec.name.lower():<5}{attack:<10}" + "".join(f"{share:>8.1%}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
