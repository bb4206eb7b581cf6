"""Models with random weights: fresh ones to begin a training with, and tiny ones to try a family on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint, load_config
from swarmnode.compute.model.family import OTHER_MEDIA, Family, causal_class, family_of, ropes
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.stack import CONFIG_KEY, Bottleneck, add_projections, begin_projections
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS, ONE_AT_A_TIME
from swarmnode.compute.packing.tensor_entry import STORED_DTYPES, TensorEntry
from swarmnode.errors import CheckpointError, SwarmnodeError

TINY_SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "max_seq_len"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), 32),
    "intermediate_size_mlp": 24,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 3),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "zero_expert_num"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "ple_embed_dim", "hc_lowrank", "o_lora_rank"), 8),
    **dict.fromkeys(("ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 64),
    **dict.fromkeys(("index_n_heads", "o_groups", "index_topk"), 4),
    **dict.fromkeys(("index_head_dim", "adapter_rank"), 8),
    "embedding_dim": 32,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "time_step_rank", "mamba_dt_rank", "chunk_size"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "block_size"), 4),
}
TINY_LAYERS = 4
WEIGHT_SUFFIXES = ("safetensors", "bin", "gguf")  # of files with weights, and of their indices
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_blocks", "n_layer", "num_decoder_layers", "num_encoder_layers")
LAYER_KINDS = ("layer_types", "layers_block_type")
FACTORS = {"long_factor", "short_factor"}
POSITION_NAMES = ("max_position_embeddings", "max_seq_len")  # names of the position table's size in configs

FamilyKey = tuple[type[Any], str]

_bounded: dict[FamilyKey, bool] = {}  # whether a family's position table ends


def family_key(family: Family) -> FamilyKey:
    """Return the key of a family's computations: its class, and its whole config as JSON."""
    return family.model_class, family.config.to_json_string()


@lean()
@torch.inference_mode()
def position_limit(family: Family) -> int | None:
    """Return the most positions that a sequence may have: the size of the family's position table.

    None if positions are computed (rotary, ALiBi), however many the model was trained on. Raises CheckpointError if no tiny
    model can be made.
    """
    key = family_key(family)
    if key not in _bounded:
        with tried(family) as tiny:
            positions, ends = _positions(tiny.config), False  # also if they are unknown or too many to try
            if positions is not None and positions <= TINY_SIZES["max_position_embeddings"]:
                model = tiny_model(tiny)
                try:  # one position more than those of the config
                    model(input_ids=torch.zeros((1, positions + 1), dtype=torch.int64), use_cache=False)
                except FOREIGN_ERRORS:  # an index out of its table, or a mask that is too short
                    ends = True
            _bounded[key] = ends  # not before the trial has ended: another one may ask meanwhile
    return _positions(family.config) if _bounded[key] else None


@contextlib.contextmanager
def tried(family: Family) -> Iterator[Family]:
    """Yield the family with a tiny config, for a trial that leaves torch's random generator unchanged.

    Raises CheckpointError if the trial fails.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            yield family_of(tiny_config(family.config))
    except (SwarmnodeError, *FOREIGN_ERRORS) as problem:
        name = family.model_class.__name__
        raise CheckpointError(
            f"{name} could not be tried on a tiny model: {problem}; choose another model"
        ) from problem


def tiny_model(tiny: Family) -> Any:
    """Return the whole model of a family with a tiny config, in float32 and with random weights."""
    torch.manual_seed(0)
    with ONE_AT_A_TIME:
        whole = tiny.model_class(copy.deepcopy(tiny.config)).to(torch.float32).eval()
    for parameter in whole.parameters():  # norms and biases start as ones and zeros, which hide mistakes
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return whole


def tiny_config(config: Any) -> Any:
    """Return a copy of `config` with few and small layers that keeps every switch and the kinds of layers."""
    written, config = config.to_dict(), copy.deepcopy(config)
    own = written.pop("per_layer_config", None)  # sizes that some layers have for themselves
    if own is not None:
        config.per_layer_config = None
    known = {name: getattr(config, name, value) for name, value in written.items()}  # some are written in another way
    tiny = copy.deepcopy(config)
    names = [name for name in LAYER_COUNTS if isinstance(known.get(name), int)]
    count = config.num_hidden_layers if not names else known[names[0]]
    kinds = next((each for name in LAYER_KINDS if len(each := list(getattr(config, name, None) or ())) >= count), [])
    kept = _kept_layers(kinds, count, getattr(config, "num_kv_shared_layers", None) or 0)
    for kind in set(kinds):
        for name in [
            name for name, value in known.items() if value == [at for at in range(count) if kinds[at] == kind]
        ]:
            setattr(tiny, name, [place for place, layer in enumerate(kept) if kinds[layer] == kind])
    for name, value in known.items():
        if isinstance(value, (list, tuple)) and len(value) == count and not name.endswith("token_id"):
            most = TINY_SIZES.get(name)
            few = [value[layer] for layer in kept]
            setattr(tiny, name, [min(size, most) for size in few] if most and isinstance(few[0], int) else few)
    for name in names:
        setattr(tiny, name, len(kept))
    if not names:
        tiny.num_hidden_layers = len(kept)
    if shared := getattr(config, "num_kv_shared_layers", None):
        tiny.num_kv_shared_layers = sum(layer >= count - shared for layer in kept)
    tiny.__dict__.pop(CONFIG_KEY, None)  # is not of the family
    for name in [name for name in config.sub_configs if name.startswith(OTHER_MEDIA)]:
        for layers in [each for each in LAYER_COUNTS if isinstance(getattr(getattr(tiny, name), each, None), int)]:
            setattr(getattr(tiny, name), layers, 1)
    for name, size in TINY_SIZES.items():
        value = getattr(tiny, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            setattr(tiny, name, size)
    # Heads share keys and values as in `config` (each its own, all one, or some); latent attention has its own head size.
    sharing = getattr(config, "num_key_value_heads", None)
    if sharing is not None:
        tiny.num_key_value_heads = {config.num_attention_heads: tiny.num_attention_heads, 1: 1}.get(sharing, 2)
    if getattr(config, "qk_rope_head_dim", None) is not None:
        tiny.head_dim = tiny.qk_rope_head_dim
    # State-space layers have as many heads as fill their inner width.
    inner = int((getattr(tiny, "mamba_expand", None) or getattr(tiny, "expand", None) or 2) * tiny.hidden_size)
    if hasattr(config, "mamba_n_heads"):
        tiny.mamba_n_heads, tiny.mamba_d_head = inner // 8, 8
        if getattr(tiny, "mamba_d_ssm", None):
            tiny.mamba_d_ssm = inner
    elif hasattr(config, "state_size") and hasattr(config, "num_heads"):
        tiny.num_heads = inner // tiny.head_dim
    _derive_sizes(tiny, config, known, inner)
    if own is not None:
        sizes_of = {int(layer): sizes for layer, sizes in own.items()}
        tiny.per_layer_config = {
            place: {name: TINY_SIZES.get(name, size) if size else size for name, size in sizes_of[layer].items()}
            for place, layer in enumerate(kept)
            if layer in sizes_of
        }
    # LongRoPE has one factor for each pair of a head's rotated numbers.
    head = getattr(tiny, "head_dim", None) or tiny.hidden_size // (getattr(tiny, "num_attention_heads", None) or 1)
    for rope in ropes(tiny):
        pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        for name in FACTORS & rope.keys():
            rope[name] = rope[name][:pairs]
    if getattr(config, "pad_token_id", None) is not None:
        tiny.pad_token_id = 0
    tiny.dtype = None
    return tiny


def _derive_sizes(tiny: Any, config: Any, known: dict[str, Any], inner: int) -> None:
    """Set the sizes of a tiny config that families derive from others. `known` are the values of `config`, and `inner` is the
    width of state-space layers."""
    if getattr(config, "attention_hidden_size", None):
        tiny.attention_hidden_size = config.attention_hidden_size * tiny.hidden_size // config.hidden_size
        if known.get("attention_head_dim"):
            tiny.attention_head_dim = tiny.attention_hidden_size // tiny.num_attention_heads
    if getattr(config, "mamba_headdim", None):
        tiny.mamba_headdim = inner // tiny.n_mamba_heads
    turned = min((rope.get("partial_rotary_factor") or 1.0 for rope in ropes(tiny)), default=1.0)
    if (
        getattr(tiny, "head_dim", None) and tiny.head_dim * turned < 2
    ):  # at least one pair of a head's numbers is rotated
        tiny.head_dim = int(2 / turned)
        if known.get("qk_rope_head_dim"):
            tiny.qk_rope_head_dim = 2
    if known.get("qk_head_dim"):
        tiny.qk_head_dim = tiny.qk_rope_head_dim + tiny.qk_nope_head_dim


def _kept_layers(kinds: Sequence[str], count: int, shared: int) -> list[int]:
    """Return the numbers of the layers of `count` that a tiny model keeps: from all places, and two of each kind. Of the last
    `shared` layers, which use others' keys and values, one of each kind stays, and the last of each kind before them."""
    kept = {round(step * (count - 1) / (TINY_LAYERS - 1)) for step in range(TINY_LAYERS)}
    places = {kind: [layer for layer in range(count) if kinds[layer] == kind] for kind in dict.fromkeys(kinds[:count])}
    first_shared = count - shared
    if shared and kinds:
        sharing = {kind: [layer for layer in own if layer >= first_shared] for kind, own in places.items()}
        return sorted(
            {own[0] for own in sharing.values() if own}
            | {layer for own in places.values() for layer in [each for each in own if each < first_shared][-1:]}
        )
    for own in places.values() if len(places) > 1 else ():
        kept |= set([layer for layer in own if layer not in kept][: max(0, 2 - len(kept & set(own)))])
    return sorted(kept)


def _positions(config: Any) -> int | None:
    sizes = (getattr(config, name, None) for name in POSITION_NAMES)
    return next((size for size in sizes if isinstance(size, int)), None)


with lean():
    from transformers.utils import logging as transformers_logging


@lean()
def write_fresh_model(config: Path, out: Path, seed: int, bottleneck: Bottleneck | None = None) -> None:
    """Write the config and float32 weights of the model described in folder `config` into the folder `out`, with a `bottleneck`
    between its units if there is one: at first the first R coordinates cross.

    The same seed gives the same weights. Raises CheckpointError if the config is invalid or its model cannot be split.
    """
    described = load_config(config / CONFIG_FILE)
    family = family_of(described)
    model = fresh_model(described, seed)
    if bottleneck is not None:
        setattr(model.config, CONFIG_KEY, bottleneck.described())
        layers = dict(enumerate(model.get_submodule(family.stack_name)))
        add_projections(layers, model.config)
        begin_projections(layers)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(out)


def config_alone(path: Path) -> Path | None:
    """Return the folder of a config without weights (`path`, or the folder of a config.json); None if there are weights, or no
    config."""
    folder = path.parent if path.name == CONFIG_FILE else path
    has_weights = any(any(folder.glob(f"*.{end}*")) for end in WEIGHT_SUFFIXES)
    return folder if (folder / CONFIG_FILE).is_file() and not has_weights else None


class FreshCheckpoint(Checkpoint):
    """Tensors of the weights that `write_fresh_model` would write for the config in `folder`, in the dtype that the config names.
    They are nowhere yet. Raises CheckpointError if the config is invalid or its model cannot be split."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        with torch.device("meta"):
            model = fresh_model(self.config, 0)
            add_projections(dict(enumerate(model.get_submodule(family_of(self.config).stack_name))), self.config)
        dtype = getattr(self.config, "dtype", None) or torch.float32
        saved = next(name for name, each in STORED_DTYPES.items() if each is dtype)
        tensors = model.state_dict(keep_vars=True)
        names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # of tied tensors the first is saved
        self.entries = {
            name: TensorEntry(folder, saved, tuple(tensors[name].shape), 0, tensors[name].numel() * dtype.itemsize)
            for name in names.values()
        }


@lean()
def fresh_model(config: Any, seed: int) -> Any:
    """Return the language model of a transformers config, with float32 weights drawn from `seed`.

    Raises CheckpointError if no model can be made of the config.
    """
    try:
        with ONE_AT_A_TIME, torch.random.fork_rng():
            torch.manual_seed(seed)
            return causal_class(config)(config).float()
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"no model can be made of the config: {error}; correct config.json") from error
