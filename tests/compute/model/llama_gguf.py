"""A small random Llama in a GGUF file, with a tokenizer of bytes, and the logits of packed models in two spans."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarmnode.compute.gguf.repack import PYTHON_FORMATS, quantise
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing import ggml, ggml_matrix
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 128, 4, 2, 2
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
WORDS = [
    *map(chr, PRINTABLE),
    *(chr(256 + place) for place in range(256 - len(PRINTABLE))),
    "th",
]  # bytes, as GPT-2 writes them


def save_llama_gguf(
    path: Path,
    *,
    form: str = "Q8_0",
    without: str = "",
    architecture: str = "llama",
    beside: Mapping[str, Sequence[float]] | None = None,
    pre: str | None = "llama-bpe",
    words: Sequence[str] = (),
    say: Callable[[Any], None] = lambda _writer: None,
    only: Callable[[str], bool] = lambda _name: True,
    sharp: bool = False,
) -> None:
    """Matrices in the format `form`, norms as F32; all but the tensor `without`, and those `beside`, as F32.

    The vocabulary ends with control tokens `words`; `say` may write more keys; `only` chooses tensors.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*WORDS, *words]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(WORDS) + [3] * len(words))
    writer.add_token_merges(["t h"])
    say(writer)
    shapes = {name: shape for name, shape in _shapes(len(tokens)).items() if name != without and only(name)}
    _add_tensors(writer, shapes, form, sharp=sharp)
    for name, numbers in (beside or {}).items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    _write(writer)


def save_moe_gguf(
    path: Path,
    *,
    form: str = "Q8_0",
    experts: int = 6,
    width: int = 1,
    used: int = 2,
    values: Callable[[str, Any], Any] = lambda _name, values: values,
    shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda _name, shape: shape,
) -> None:
    """Qwen3 with experts, whose gate and up matrices llama.cpp keeps apart. Its sizes are `width` times the usual ones.

    `values` may change a tensor's values, `shape_of` its shape.
    """
    import gguf

    hidden, inner = HIDDEN * width, INNER * width

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(hidden // HEADS)
    writer.add_value_length(hidden // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    writer.add_expert_feed_forward_length(inner)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["t h"])
    shapes = {
        name: shape
        for name, shape in _shapes(len(WORDS), hidden, inner).items()
        if "ffn_" not in name or "norm" in name
    }
    for number in range(LAYERS):
        shapes[f"blk.{number}.attn_q_norm.weight"] = shapes[f"blk.{number}.attn_k_norm.weight"] = (hidden // HEADS,)
        shapes[f"blk.{number}.ffn_gate_inp.weight"] = (experts, hidden)
        shapes[f"blk.{number}.ffn_gate_exps.weight"] = (experts, inner, hidden)
        shapes[f"blk.{number}.ffn_up_exps.weight"] = (experts, inner, hidden)
        shapes[f"blk.{number}.ffn_down_exps.weight"] = (experts, hidden, inner)
    shapes = {name: shape_of(name, shape) for name, shape in shapes.items()}
    _add_tensors(writer, shapes, form, values=values)
    _write(writer)


def _add_tensors(
    writer: Any,
    shapes: Mapping[str, tuple[int, ...]],
    form: str,
    *,
    sharp: bool = False,
    values: Callable[[str, Any], Any] = lambda _name, values: values,
) -> None:
    """Add random tensors that bfloat16 holds: vectors and routers as F32, matrices in the format `form`."""
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    for name, shape in shapes.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        # Sharp attention, so that positions count.
        strength = 0.25 if name.endswith(("attn_q.weight", "attn_k.weight")) and sharp else 0.1
        drawn = random.normal(len(shape) == 1, strength, shape).astype(np.float32)
        drawn = values(name, (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
        if len(shape) == 1 or "gate_inp" in name:
            writer.add_tensor(name, drawn)
        elif form in PYTHON_FORMATS:
            writer.add_tensor(name, gguf.quantize(drawn, kind), raw_dtype=kind)
        else:
            rows = quantise(torch.from_numpy(drawn.reshape(-1, shape[-1])), ggml.FORMATS[form], name)
            writer.add_tensor(name, rows.view(*shape[:-1], -1).numpy(), raw_dtype=kind)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(vocabulary: int, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, tuple[int, ...]]:
    kv = hidden // HEADS * KV_HEADS
    layer = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    ends = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden), "output_norm": (hidden,)}
    layers = {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | layers).items()}


def lose_ggml(monkeypatch: pytest.MonkeyPatch, why: str = "") -> None:
    """Let the package with ggml be missing, as after `pip install --no-deps`; or unusable, for the reason `why`."""
    found = importlib.util.find_spec
    monkeypatch.setattr(ggml, "_load", lambda: why)
    for module in (ggml, ggml_matrix):
        monkeypatch.setattr(module, "library", lambda: None)
    if not why:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == ggml.PACKAGE else found(name))


def logits_in_parts(checkpoint: Checkpoint, cut: int, ids_BT: Tensor, products: str) -> Tensor:
    """The logits of two spans that meet at unit `cut`, of ids that come in a prompt's chunks and then one by one."""
    runners = [
        StageRunner(load_span(checkpoint, *units, dtype=torch.float32, products=products), RunnerConfig(1 << 26))
        for units in ((0, cut), (cut, checkpoint.units))
    ]
    found = []
    for begin, end in ((0, 8), (8, 12), (12, 13), (13, 14)):
        x = ids_BT[:, begin:end]
        for runner in runners:
            if not begin:
                runner.open(0, rows=1, max_length=32)
            x = runner.run([StepInput(0, x, WANT_ALL)])[0].output
        found.append(x)
    return torch.cat(found, 1)
