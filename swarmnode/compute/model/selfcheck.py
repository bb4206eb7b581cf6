"""Tries a family on a tiny random model before it is trusted: split into spans it must give the whole model's logits.

Most families that this project has never met pass, because nothing here knows families. One that hands more than hidden states
from layer to layer, or keeps state outside its KV cache, fails and is refused, rather than answer wrongly.
"""

from __future__ import annotations

import copy
import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.assemble import assemble
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.rope import ropes
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.model.trace import FOREIGN_ERRORS, ONE_AT_A_TIME
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.window import Window, sliding_layers
from swarmnode.errors import CheckpointError, SwarmnodeError

TINY_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "max_seq_len": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 24,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "n_inner": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": 3,
    "window_size": 3,
    "attention_chunk_size": 3,
}
TINY_LAYERS = 4
FACTORS = {"long_factor", "short_factor"}
PROMPT, LENGTH, PADDING = 5, 8, (0, 2)
TOLERANCE = 1e-3  # of the logits' standard deviation; float32 differs by 1e-6
POSITION_NAMES = ("max_position_embeddings", "max_seq_len")  # what configs call the size of their position tables


_bounded: dict[tuple[type[Any], str], bool] = {}  # of families that passed: whether their positions end


@lean()
def check_family(family: Family) -> None:
    """Raises CheckpointError where a split tiny model of this class and config does not equal the whole one."""
    key = _key(family)
    if key in _bounded:
        return
    name = family.model_class.__name__
    try:
        with torch.random.fork_rng(devices=[]):
            error, bounded = _try(family_of(tiny_config(family.config)))
    except (SwarmnodeError, *FOREIGN_ERRORS) as problem:
        raise CheckpointError(f"{name} could not be tried on a tiny model: {problem}") from problem
    if not error < TOLERANCE:
        raise CheckpointError(f"{name} cannot be split: a tiny model in spans differs from the whole by {error:.1%}")
    _bounded[key] = bounded


def position_limit(family: Family) -> int | None:
    """How many positions a sequence may have: the size of the family's position table, where it has one that ends. None where
    positions are computed (rotary, ALiBi), however many the model was trained on. Raises CheckpointError as `check_family`."""
    check_family(family)
    return _positions(family.config) if _bounded[_key(family)] else None


def _key(family: Family) -> tuple[type[Any], str]:
    return family.model_class, family.config.to_json_string()


def _positions(config: Any) -> int | None:
    sizes = (getattr(config, name, None) for name in POSITION_NAMES)
    return next((size for size in sizes if isinstance(size, int)), None)


def tiny_config(config: Any) -> Any:
    """A copy with few and small layers that keeps the kinds of layers and every switch."""
    tiny = copy.deepcopy(config)
    count = config.num_hidden_layers
    kept = sorted({round(step * (count - 1) / (TINY_LAYERS - 1)) for step in range(TINY_LAYERS)})
    for name, value in config.to_dict().items():
        if isinstance(value, (list, tuple)) and len(value) == count and not name.endswith("token_id"):
            setattr(tiny, name, [value[layer] for layer in kept])
    tiny.num_hidden_layers = len(kept)
    for name, size in TINY_SIZES.items():
        value = getattr(tiny, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            setattr(tiny, name, size)
    _shrink_attention(tiny, config)
    _shrink_factors(tiny)
    if config.pad_token_id is not None:
        tiny.pad_token_id = 0
    tiny.dtype = None
    return tiny


def _shrink_attention(tiny: Any, config: Any) -> None:
    """Heads that share keys and values go on to do so; latent attention has its own head sizes."""
    sharing = getattr(config, "num_key_value_heads", None)
    if sharing is not None:
        tiny.num_key_value_heads = {config.num_attention_heads: tiny.num_attention_heads, 1: 1}.get(sharing, 2)
    if getattr(config, "qk_rope_head_dim", None) is not None:
        tiny.head_dim = tiny.qk_rope_head_dim


def _shrink_factors(tiny: Any) -> None:
    """LongRoPE has a factor for each pair of a head's numbers that is turned."""
    head = getattr(tiny, "head_dim", None) or tiny.hidden_size // tiny.num_attention_heads
    for rope in ropes(tiny):
        pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        for name in FACTORS & rope.keys():
            rope[name] = rope[name][:pairs]


@torch.inference_mode()
def _try(family: Family) -> tuple[float, bool]:
    """Largest difference of logits between spans with cohort caches and one pass of the whole model without a cache; and
    whether the whole model cannot take one position more than its config says."""
    torch.manual_seed(0)
    with ONE_AT_A_TIME:
        whole = family.model_class(copy.deepcopy(family.config)).to(torch.float32).eval()
    for parameter in whole.parameters():
        parameter.add_(
            torch.randn_like(parameter) * 0.1
        )  # norms and biases start as ones and zeros, which hide mistakes
    ids_BT = torch.randint(2, family.config.vocab_size, (2, LENGTH))
    mask_BT = (torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None]).to(torch.int64)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    expected_BTV = _whole_logits(whole, ids_BT, mask_BT, positions_BT)
    logits_BTV = _split_logits(family, whole.state_dict(), ids_BT)
    difference_BT = (logits_BTV - expected_BTV).abs().amax(dim=-1) * mask_BT
    return float(difference_BT.max() / expected_BTV.std()), _ends(whole, _positions(family.config))


def _ends(model: Any, positions: int | None) -> bool:
    if positions is None or positions > TINY_SIZES["max_position_embeddings"]:
        return False
    try:
        model(input_ids=torch.zeros((1, positions + 1), dtype=torch.int64), use_cache=False)
    except FOREIGN_ERRORS:  # an index out of its table, or a mask that is too short
        return True
    return False


def _whole_logits(model: Any, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor) -> Tensor:
    positions = {"position_ids": positions_BT} if "position_ids" in inspect.signature(model.forward).parameters else {}
    logits_BTV: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **positions).logits
    return logits_BTV


def _split_logits(family: Family, tensors: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
    """Three spans; a prompt, then single positions. Sliding layers keep not one position that they do not see."""
    cuts = sorted({0, 2, max(2, family.layer_count), family.units})
    runners = []
    for start, end in pairwise(cuts):
        wanted = {n: t for n, t in tensors.items() if any(start <= u < end for u in family.units_of_tensor(n))}
        span = ModelSpan(family, assemble(family, wanted, start, end, dtype=torch.float32), start, end)
        windows = {layer: Window(size, slack=0, room=2) for layer, size in sliding_layers(family.config).items()}
        runners.append(StageRunner(span, RunnerConfig(cache_bytes=1 << 26, windows=windows)))
        runners[-1].open(0, rows=len(ids_BT), max_length=LENGTH, padding=PADDING)
    outputs = []
    for begin, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))]:
        x = ids_BT[:, begin:end]
        for runner in runners:
            (result,) = runner.run([StepInput(0, x, want=2)])
            x = result.output
        outputs.append(x)
    return torch.cat(outputs, dim=1)
