"""Trained mixture of experts and its routes, for benchmarks of experts in memory and on disk.

    python contrib/benchmarks/expert_mixture.py train FOLDER [--tokens 3000000]
    python contrib/benchmarks/expert_mixture.py routes FOLDER [--tokens 16384]

`train` trains a Qwen3-MoE of 8 layers with 32 experts, 4 of them active, and 57 million parameters, with the project's own training
and the balance loss of each layer, on the standard library's sources; it continues a model that is in the folder. Products
are bfloat16, all else is float32. Its 4,096 tokens are learned from the same text. `routes` passes held-out
text through it, writes the experts of each token to FOLDER/routes.pt (tokens, layers, 4), and prints JSON: the load of the busiest
expert over the fair share, the entropy of a token's experts given the token before it, and the hits of rules that keep a quarter of
each layer's experts.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.datasets.batches import TokenBatches
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.swarm.records.run import RECIPE, Recipe, Run

VOCABULARY, LAYERS, EXPERTS, ACTIVE, HIDDEN, INNER = 4096, 8, 32, 4, 256, 256
SEQUENCE, BATCH, MICROBATCH = 256, 16, 16
HELD_OUT = 32_768  # tokens at the corpus's end


def read_text() -> list[str]:
    """Return the standard library's sources, without its tests, in a fixed order that mixes them."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [file for file in sorted(folder.rglob("*.py")) if not left_out & set(file.relative_to(folder).parts)]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return [files[number].read_text(errors="replace") for number in order]


def read_tokens(folder: Path) -> np.ndarray[Any, Any]:
    """Return the corpus as ids of a byte-level BPE, which is learned if the folder has none."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    texts, file = read_text(), folder / "tokenizer.json"
    if not file.is_file():
        learned = ByteLevelBPETokenizer()
        learned.train_from_iterator(texts, VOCABULARY, show_progress=False)
        learned.save(str(file))
    encoded = Tokenizer.from_file(str(file)).encode_batch(texts)
    return np.concatenate([np.asarray(one.ids, np.uint32) for one in encoded])


def write_model(folder: Path, seed: int = 0) -> None:
    """Write the model with random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def padded_experts(self: Any, x_NH: Tensor, index_NK: Tensor, weights_NK: Tensor, **_: Any) -> Tensor:
    """Return the weighted sums (N, H) of the chosen experts by one bfloat16 product of all, each padded to the busiest one's rows.

    An implementation for transformers' experts interface. oneDNN compiles a product for each new number of rows, which takes
    longer than the product; with padding in steps of 64 rows the sizes repeat.
    """
    chosen_R, order_R = index_NK.flatten().sort(stable=True)
    counts_E = torch.bincount(chosen_R, minlength=EXPERTS)
    capacity = -(-int(counts_E.max()) // 64) * 64
    within_R = torch.arange(len(chosen_R)) - (counts_E.cumsum(0) - counts_E)[chosen_R]
    places_R, rows_R = chosen_R * capacity + within_R, order_R // index_NK.shape[1]
    given = torch.zeros(EXPERTS * capacity, x_NH.shape[1], dtype=torch.bfloat16)
    given = given.index_copy(0, places_R, x_NH.bfloat16().index_select(0, rows_R)).view(EXPERTS, capacity, -1)
    hidden = self._apply_gate(given @ self.gate_up_proj.bfloat16().transpose(1, 2))
    found_RH = (hidden @ self.down_proj.bfloat16().transpose(1, 2)).flatten(0, 1).index_select(0, places_R).float()
    return torch.zeros_like(x_NH).index_add(0, rows_R, found_RH * weights_NK.flatten()[order_R, None])


def train(folder: Path, tokens: int, balance: float) -> Iterator[dict[str, Any]]:
    """Train on `tokens` of the corpus, one pass or more, and yield the loss of each tenth step. Writes the model each 20 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus_N = read_tokens(folder)[:-HELD_OUT]
    if not (folder / "config.json").is_file():
        write_model(folder)
    checkpoint = Checkpoint(folder)
    segment = load_segment(checkpoint, 0, checkpoint.units)
    torch.set_float32_matmul_precision("medium")  # bfloat16, where a CPU multiplies that faster
    ALL_EXPERTS_FUNCTIONS.register("padded", padded_experts)
    segment.span.model.config._experts_implementation = "padded"
    batches, steps = TokenBatches(corpus_N, VOCABULARY), tokens // (BATCH * SEQUENCE)
    run = Run(
        batches.fingerprint,
        steps,
        BATCH,
        MICROBATCH,
        SEQUENCE,
        learning_rate=1e-3,
        schedule=RECIPE,
        warmup_steps=min(50, steps // 10),
        weight_decay=0.1,
        recipe=Recipe("cosine", router_balance=balance, router_z_loss=1e-3, balance_by_layer=True),
    )
    model, began_s = segment.span.model, time.process_time()
    for summary in train_locally(segment, run, batches):
        if summary.step % 10 == 0 or summary.step == steps - 1:
            cpu_s = round(time.process_time() - began_s)
            yield {
                "step": summary.step,
                "of": steps,
                "loss": round(summary.loss, 3),
                "load": round(summary.expert_load, 2),
                "cpu_s": cpu_s,
            }
        if summary.step % 20 == 19 or summary.step == steps - 1:
            model.save_pretrained(folder)


@torch.inference_mode()
def record_routes(folder: Path, tokens: int) -> Tensor:
    """Return the experts of each held-out token, (tokens, layers, ACTIVE), by the trained model; writes them to the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids_N = torch.from_numpy(read_tokens(folder)[-HELD_OUT:][:tokens].astype(np.int64))
    windows = []
    for ids_T in ids_N.split(1024):
        found = model(ids_T[None], output_router_logits=True, use_cache=False)
        windows.append(torch.stack([logits_NE.topk(ACTIVE).indices for logits_NE in found.router_logits], dim=1))
    routes_NLK = torch.cat(windows)
    torch.save({"ids": ids_N[: len(routes_NLK)], "routes": routes_NLK}, folder / "routes.pt")
    return routes_NLK


def kept_by_use(chosen_NK: Sequence[Sequence[int]], slots: int) -> float:
    """Return the hits of one layer's slots as the node keeps them: the least recent expert goes, of these the rarest."""
    held: dict[int, int] = {}
    counts: Counter[int] = Counter()
    found = 0
    for number, chosen in enumerate(chosen_NK):
        counts.update(chosen)
        found += sum(expert in held for expert in chosen)
        for expert in chosen:
            if expert not in held and len(held) >= slots:
                free = [one for one in held if one not in chosen]
                del held[min(free, key=lambda one: (held[one], counts[one]))]
            held[expert] = number
        held.update(dict.fromkeys(chosen, number))
    return found / sum(map(len, chosen_NK))


def kept_by_oracle(chosen_NK: Sequence[Sequence[int]], slots: int) -> float:
    """Return the hits of slots that know the text to come (Belady): the expert that is chosen again last goes."""
    uses: dict[int, list[int]] = {}
    for number, chosen in reversed(list(enumerate(chosen_NK))):
        for expert in chosen:
            uses.setdefault(expert, []).append(number)
    held: set[int] = set()
    found = 0
    for chosen in chosen_NK:
        found += len(held & set(chosen))
        for expert in chosen:
            uses[expert].pop()
        for expert in set(chosen) - held:
            if len(held) >= slots:
                held.remove(max(held - set(chosen), key=lambda one: uses[one][-1] if uses[one] else math.inf))
            held.add(expert)
    return found / sum(map(len, chosen_NK))


def kept_by_list(chosen_NK: Sequence[Sequence[int]], slots: int) -> float:
    """Return the hits, in the second half of a text, of the experts that its first half chose most."""
    half = len(chosen_NK) // 2
    favourites = {expert for expert, _ in Counter(one for row in chosen_NK[:half] for one in row).most_common(slots)}
    later = [one for row in chosen_NK[half:] for one in row]
    return sum(one in favourites for one in later) / len(later)


RULES = {"list": kept_by_list, "recency": kept_by_use, "oracle": kept_by_oracle}


def entropies(ids_N: Tensor, routes_NL: Tensor) -> tuple[float, float]:
    """Return the entropy in bits of the first expert of a token, and the one given the token itself, means over layers.

    Estimated on the second half of the text with counts of the first half, of which one of each expert is added.
    """
    half = len(ids_N) // 2
    plain, given = [], []
    for routes_N in routes_NL.T:
        counts_VE = torch.zeros(VOCABULARY, EXPERTS)
        counts_VE.index_put_((ids_N[:half], routes_N[:half]), torch.ones(half), accumulate=True)
        total_E = counts_VE.sum(0) + 1
        shares_E = total_E / total_E.sum()
        plain.append(float(-shares_E[routes_N[half:]].log2().mean()))
        smoothed_VE = counts_VE + 4 * shares_E
        smoothed_VE /= smoothed_VE.sum(1, keepdim=True)
        given.append(float(-smoothed_VE[ids_N[half:], routes_N[half:]].log2().mean()))
    return sum(plain) / len(plain), sum(given) / len(given)


def judge_routes(folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield how evenly the routes use the experts, what the last token says of them, and the hits of each rule by slots."""
    routes_NLK = record_routes(folder, tokens)
    ids_N = torch.load(folder / "routes.pt")["ids"]
    loads = [torch.bincount(layer_NK.flatten(), minlength=EXPERTS) for layer_NK in routes_NLK.unbind(1)]
    busiest = [float(load_E.max() * EXPERTS / load_E.sum()) for load_E in loads]
    alone, given = entropies(ids_N, routes_NLK[:, :, 0])
    yield {
        "tokens": len(ids_N),
        "busiest_over_fair_share": round(max(busiest), 2),
        "mean_of_layers": round(sum(busiest) / len(busiest), 2),
        "bits_of_first_expert": round(alone, 2),
        "bits_given_last_token": round(given, 2),
        "bits_if_even": math.log2(EXPERTS),
    }
    for slots in (4, 6, EXPERTS // 4, 9, 12, EXPERTS // 2, 24):
        by_rule = {
            name: [rule(layer.tolist(), slots) for layer in routes_NLK.unbind(1)] for name, rule in RULES.items()
        }
        yield {"slots": slots, **{name: round(sum(found) / len(found), 3) for name, found in by_rule.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "routes"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, help="default: 3,000,000 to train, 16,384 of routes")
    parser.add_argument("--balance", type=float, default=0.5)
    options = parser.parse_args()
    if options.action == "train":
        rows = train(options.folder, options.tokens or 3_000_000, options.balance)
    else:
        rows = judge_routes(options.folder, options.tokens or 16_384)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
