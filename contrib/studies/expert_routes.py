"""ExpertFlow's parts (arXiv 2410.17954), each by itself beside recency, on the routes of a trained mixture. Prints JSON.

python contrib/benchmarks/expert_mixture.py train FOLDER
python contrib/studies/expert_routes.py FOLDER [--tokens 16384] [--slots 8]

next_router  the router of the next layer, or the one after it, on the state of the present layer: share of the experts that will
             be chosen among the 4 and the 8 that it names.
network      the same for a network of one hidden layer (64) for each layer, from the embeddings of the last two tokens, trained
             on the first half of the text and judged on the second.
decode       hits of one session's slots, and experts that are read for a token, if experts that a predictor names are read
             before the layer is reached: by recency alone, with each predictor, and with perfect knowledge of the next layer.
             `gap` is the share of the hits between recency and an oracle (Belady) that prediction gains. That each
             read ends in time is assumed.
prompt       experts that a prompt of 512 tokens reads: token after token, and each expert once with all its tokens, in the order
             of numbers and with those in memory first.
company      distinct experts that a step of eight sessions needs, in one pass, in two passes of four at random, and in two
             passes of sessions whose last routes were alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from expert_mixture import ACTIVE, EXPERTS, HELD_OUT, LAYERS, kept_by_oracle, kept_by_use, read_tokens

PROMPT, SESSIONS = 512, 8
Choices = Sequence[Sequence[int]]


class Recorded:
    """Held-out tokens with the states_NLH that enter the routers and the experts_NLK that these choose."""

    @torch.inference_mode()
    def __init__(self, folder: Path, tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        ids_N = torch.from_numpy(read_tokens(folder)[-HELD_OUT:][:tokens].astype("int64"))
        self.routers = [layer.mlp.gate.weight.detach() for layer in model.model.layers]
        states: list[list[Tensor]] = [[] for _ in self.routers]
        for found, layer in zip(states, model.model.layers, strict=True):
            layer.mlp.gate.register_forward_pre_hook(
                lambda _module, inputs, found=found: found.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
            )
        for ids_T in ids_N.split(1024):
            model(ids_T[None], use_cache=False)
        self.states_NLH = torch.stack([torch.cat(found) for found in states], dim=1)
        logits = [self.states_NLH[:, layer] @ router.T for layer, router in enumerate(self.routers)]
        self.routes_NLK = torch.stack([logits_NE.topk(ACTIVE).indices for logits_NE in logits], dim=1)
        self.embedded_NH = model.get_input_embeddings().weight.detach()[ids_N]

    def by_next_router(self, ahead: int) -> Tensor:
        """Return scores_NLE of each layer's experts by the state `ahead` layers before; below all others for the first ones."""
        scores_NLE = torch.full((len(self.states_NLH), LAYERS, EXPERTS), -1e9)
        for layer in range(ahead, LAYERS):
            scores_NLE[:, layer] = self.states_NLH[:, layer - ahead] @ self.routers[layer].T
        return scores_NLE

    def by_network(self) -> Tensor:
        """Return scores_NLE by a small network from the embeddings of the present token and the one before."""
        before_NH = torch.cat([self.embedded_NH[:1], self.embedded_NH[:-1]])
        x_NI = torch.cat([self.embedded_NH, before_NH], dim=1)
        x_NI = x_NI / x_NI.std()
        half = len(x_NI) // 2
        torch.manual_seed(0)
        networks = nn.ModuleList(
            nn.Sequential(nn.Linear(x_NI.shape[1], 64), nn.GELU(), nn.Linear(64, EXPERTS)) for _ in range(LAYERS)
        )
        wanted_NLE = functional.one_hot(self.routes_NLK, EXPERTS).sum(2).float()
        optimizer = torch.optim.AdamW(networks.parameters(), lr=3e-3, weight_decay=0.05)
        for _ in range(6):
            for rows in torch.randperm(half).split(512):
                scores = torch.stack([network(x_NI[rows]) for network in networks], dim=1)
                loss = functional.binary_cross_entropy_with_logits(scores, wanted_NLE[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.inference_mode():
            return torch.stack([network(x_NI) for network in networks], dim=1)


def named(scores_NLE: Tensor, routes_NLK: Tensor, count: int) -> float:
    """Return the share of the chosen experts among the `count` that the scores put first."""
    first_NLC = scores_NLE.topk(count).indices
    return float((routes_NLK[..., None] == first_NLC[..., None, :]).any(-1).float().mean())


def with_prediction(chosen: Choices, predicted: Choices, slots: int) -> tuple[float, float]:
    """Return the hits of one layer's slots, and reads for a token, if predicted experts are read before the layer is reached."""
    last: dict[int, int] = {}
    found = reads = 0

    def read(expert: int, number: int, keep: set[int]) -> None:
        nonlocal reads
        if expert not in last:
            reads += 1
            if len(last) >= slots:
                del last[min((one for one in last if one not in keep), key=lambda one: last[one])]
            last[expert] = number

    for number, (wanted, guesses) in enumerate(zip(chosen, predicted, strict=True)):
        for expert in guesses:
            read(expert, number, set(guesses))
        found += sum(expert in last for expert in wanted)
        for expert in wanted:
            read(expert, number, set(wanted))
            last[expert] = number
    return found / sum(map(len, chosen)), reads / len(chosen)


def decode(recorded: Recorded, predictors: dict[str, Tensor], slots: int) -> Iterator[dict[str, Any]]:
    """Yield the hits by each way of keeping experts, in the second half of the text, means over layers but the first two."""
    half = len(recorded.routes_NLK) // 2
    routes = [layer.tolist() for layer in recorded.routes_NLK[half:, 2:].unbind(1)]
    recency = sum(kept_by_use(layer, slots) for layer in routes) / len(routes)
    oracle = sum(kept_by_oracle(layer, slots) for layer in routes) / len(routes)
    yield {
        "row": "decode",
        "slots": slots,
        "by": "recency",
        "hits": round(recency, 3),
        "reads": round(4 * (1 - recency), 2),
    }
    yield {
        "row": "decode",
        "slots": slots,
        "by": "oracle",
        "hits": round(oracle, 3),
        "reads": round(4 * (1 - oracle), 2),
    }
    for name, scores_NLE in predictors.items():
        for count in (2, 4, 6):
            guesses = [layer.topk(count).indices.tolist() for layer in scores_NLE[half:, 2:].unbind(1)]
            found = [with_prediction(*pair, slots) for pair in zip(routes, guesses, strict=True)]
            hits, reads = (sum(each) / len(found) for each in zip(*found, strict=True))
            gap = (hits - recency) / max(1e-9, oracle - recency)
            yield {
                "row": "decode",
                "slots": slots,
                "by": f"{name}, {count} named",
                "hits": round(hits, 3),
                "reads": round(reads, 2),
                "gap": round(gap, 2),
            }


def prompt(routes_NLK: Tensor, slots: int) -> dict[str, Any]:
    """Return experts read by prompts, a layer's mean."""
    by_token = once = first = 0.0
    prompts = routes_NLK[: len(routes_NLK) // PROMPT * PROMPT].unflatten(0, (-1, PROMPT))
    for text_TLK in prompts:
        for layer_TK in text_TLK.unbind(1):
            by_token += (1 - kept_by_use(layer_TK.tolist(), slots)) * layer_TK.numel()
            distinct = len(layer_TK.unique())
            once += distinct  # visiting them by their numbers finds the last ones of the text before only at the end
            first += max(0, distinct - slots)
    count = len(prompts) * LAYERS
    return {
        "row": "prompt",
        "slots": slots,
        "token_after_token": round(by_token / count, 1),
        "by_expert": round(once / count, 1),
        "by_expert_memory_first": round(first / count, 1),
    }


def company(routes_NLK: Tensor) -> dict[str, Any]:
    """Return the distinct experts that a step of eight sessions needs in a layer."""
    length = len(routes_NLK) // SESSIONS
    sessions = routes_NLK[: length * SESSIONS].unflatten(0, (SESSIONS, length))
    uses = functional.one_hot(sessions, EXPERTS).sum(3).bool()  # sessions, tokens, layers, experts
    steps = range(8, length, 7)
    one = two = alike = 0.0
    for step in steps:
        now = uses[:, step]
        one += float(now.any(0).sum())
        order = torch.randperm(SESSIONS, generator=torch.Generator().manual_seed(step)).tolist()
        two += sum(float(now[part].any(0).sum()) for part in (order[:4], order[4:]))
        before = uses[:, step - 8 : step].float().mean(1).flatten(1)
        likeness = before @ before.T
        seed = int(likeness.sum(1).argmin())
        nearest = likeness[seed].topk(4).indices.tolist()
        others = [number for number in range(SESSIONS) if number not in nearest]
        alike += sum(float(now[part].any(0).sum()) for part in (nearest, others))
    each = len(steps) * LAYERS
    return {
        "row": "company",
        "one_pass_of_8": round(one / each, 2),
        "two_at_random": round(two / each, 2),
        "two_alike": round(alike / each, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--slots", type=int, default=EXPERTS // 4)
    options = parser.parse_args()
    recorded = Recorded(options.folder, options.tokens)
    half = len(recorded.routes_NLK) // 2
    predictors = {f"router {ahead} ahead": recorded.by_next_router(ahead) for ahead in (1, 2)}
    predictors["network"] = recorded.by_network()
    for name, scores_NLE in predictors.items():
        first = 2 if name.startswith("router") else 0
        pair = scores_NLE[half:, first:], recorded.routes_NLK[half:, first:]
        print(
            json.dumps({"row": name, **{f"of_{count}": round(named(*pair, count), 3) for count in (4, 8)}}), flush=True
        )
    for row in decode(recorded, predictors, options.slots):
        print(json.dumps(row), flush=True)
    print(json.dumps(prompt(recorded.routes_NLK, options.slots)))
    print(json.dumps(company(recorded.routes_NLK)))


if __name__ == "__main__":
    main()
