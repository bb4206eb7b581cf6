"""Attention and activation functions on the CPU whose result for a position depends on that position's own past alone, to the bit.

Fast products round activations to 8 bits, which turns the smallest difference into a whole step. So a session has the same text in
any company, with any number of threads, and after a failover, only if all operations between products give a position the same bits
whatever else a pass computes.

- torch's attention adds in an order that depends on the number of queries and columns. ggml's flash attention goes through the
  columns of each query one by one, skips those that are masked, and takes each query alone if it is a row of its own. A lone row
  with 512 columns or more is the exception: its columns are shared out among the threads. So no row is ever alone here.
- torch computes sigmoid, SiLU and the like with vectors, and the last elements of each thread's share one by one, with another
  rounding. `SameBits` cuts tensors so that each share is made of whole vectors.
- Routers and adapters are plain matrices, whose products have other sums for one to three rows than for more. `SameBits` gives
  these products rows within bounds (`equal_bits/equal_rows.py`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from swarmnode.compute.model.equal_bits.equal_rows import linear_in_equal_rows
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.traced_model import check_attention
from swarmnode.compute.packing.ggml import DATA_AT, FORMATS, SIZES_AT, STRIDES_AT, address_at, library, numbers_at
from swarmnode.compute.packing.ggml_graph import CannotBeLowered, gated_silu
from swarmnode.compute.packing.ggml_matrix import Prepared, threads
from swarmnode.compute.packing.packed_weight import SlotStack, experts_one_by_one, results_of_choices, sum_of_choices

with lean():
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BY_POSITION = "swarmnode_by_position"
NUMBERS = {torch.float32: FORMATS["F32"].number, torch.bfloat16: FORMATS["BF16"].number}
MASK_NUMBER = FORMATS["F16"].number
VECTORS = 64  # elements: a multiple of those that one turn of torch's vector loops takes, in any dtype and on any CPU
IN_VECTORS = frozenset(
    {
        *(torch.sigmoid, torch.special.expit, Tensor.sigmoid),
        *(functional.silu, functional.gelu, functional.softplus, functional.logsigmoid),
        *(functional.mish, functional.elu, functional.selu, functional.celu, functional.hardswish),
    }
)
"""Functions of each element whose last bits depend on whether torch computes it in a vector or alone"""
ALONE, SHARE = 1 << 14, 1 << 15
"""Elements that one thread takes, and elements of each thread from which on all take part, in torch"""


class _Attention(Prepared):
    """Attention of N queries, each of H heads, to keys and values of G heads in ggml's format `number`; N is 2 at least."""

    def __init__(
        self,
        ggml: Any,
        number: int,
        queries: int,
        heads: int,
        groups: int,
        width: int,
        value_width: int,
        scale: float,
        softcap: float,
        has_sinks: bool,
    ) -> None:
        super().__init__(ggml)
        q = ggml.new_tensor_4d(self.context, NUMBERS[torch.float32], width, 1, heads, queries)
        k, v = (ggml.new_tensor_4d(self.context, number, each, 1, groups, queries) for each in (width, value_width))
        mask = ggml.new_tensor_4d(self.context, MASK_NUMBER, 1, 1, 1, queries)
        y = ggml.attend(self.context, q, k, v, mask, scale, 0.0, softcap)
        if has_sinks:
            sinks = ggml.new_tensor(self.context, NUMBERS[torch.float32], heads, 1)
            ggml.add_sinks(y, sinks)
        ggml.expand(self.graph, y)
        places = (q, k, v, mask, y, *([sinks] if has_sinks else []))
        self._places = [address_at(tensor + DATA_AT) for tensor in places]
        self._sizes = [numbers_at(tensor + SIZES_AT) for tensor in (k, v, mask)]
        self._strides = [numbers_at(tensor + STRIDES_AT) for tensor in (q, k, v, mask)]

    def compute(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None) -> None:
        """Compute y (N, H, W) of q (N, H, D), k (N, G, C, D), v (N, G, C, W), mask (N, C) and sinks (H).

        Rows of all but y may share memory.
        """
        q_NHD, k, v, mask_NC, _ = tensors
        for place, tensor in zip(self._places, tensors if sinks is None else (*tensors, sinks), strict=True):
            place.value = tensor.data_ptr()
        self._strides[0][3] = q_NHD.element_size() * q_NHD.stride(0)
        for sizes, strides, tensor in zip(self._sizes, self._strides[1:], (k, v), strict=False):
            size_bytes, (by_row, by_head, by_column, _) = tensor.element_size(), tensor.stride()
            sizes[1] = tensor.shape[2]
            strides[1], strides[2], strides[3] = size_bytes * by_column, size_bytes * by_head, size_bytes * by_row
        self._sizes[2][0] = mask_NC.shape[1]
        self._strides[3][1] = self._strides[3][2] = mask_NC.element_size() * mask_NC.shape[1]
        self._strides[3][3] = mask_NC.element_size() * mask_NC.stride(0)
        threads().compute(self)


def attention_by_position(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention (B, T, H, W) of queries (B, H, T, D) to keys (B, G, C, D) and values (B, G, C, W), and None.

    transformers expects this pair. `attention_mask` is float16 (B, 1, T, C): 0 for columns that count, else minus infinity; None if
    all columns up to the position's own count. `softcap` bounds the scores, and `s_aux` are scores of sinks, one of each head.
    torch computes the attention instead if it takes gradients, has a dropout or a position bias or is not causal, or if the mask
    has another dtype, as in training. Its bits depend on the company.

    A pass that is recorded for a graph of ggml (`span_graph.py`) takes the attention as a whole.

    Raises ValueError if ggml cannot take these shapes.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    is_other = dropout or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False
    if (recorder := threads().recorder) is not None and hasattr(recorder, "attention"):
        if is_other:
            raise ValueError("attention with a dropout, a position bias or a view ahead has no counterpart")
        check_attention(query.shape, key.shape, value.shape)
        return recorder.attention(query, key, value, attention_mask, scale, softcap or 0.0, s_aux), None
    if recorder is not None and not is_other:  # a decode step is recorded, whose keys and mask stay in their memory
        options = {"scaling": scale, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return recorder.calling(
            lambda q_BHTD: attention_by_position(module, q_BHTD, key, value, attention_mask, **options)[0], query
        ), None
    rows, heads, count, width = query.shape
    columns = key.shape[2]
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    is_other = is_other or trains or (attention_mask is not None and attention_mask.dtype != torch.float16)
    if is_other and softcap is None and s_aux is None:
        mask = None if attention_mask is None else attention_mask.to(query.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)[0], None
    if attention_mask is None:  # a causal pass whose queries belong to the last columns
        hidden_TC = torch.full((count, columns), -math.inf, dtype=torch.float16).triu_(columns - count + 1)
        mask_BTC = hidden_TC.expand(rows, count, columns).contiguous()
    else:
        mask_BTC = attention_mask.expand(rows, 1, count, columns).reshape(rows, count, columns)
    if is_other:
        own = sys.modules[type(module).__module__].eager_attention_forward  # the family's, with cap and sinks
        mask, kwargs = mask_BTC[:, None].to(query.dtype), {**kwargs, "softcap": softcap, "s_aux": s_aux}
        return own(module, query, key, value, mask, scaling=scale, dropout=dropout, **kwargs)[0], None
    check_attention(query.shape, key.shape, value.shape)
    if key.dtype not in NUMBERS or not key.stride(-1) == value.stride(-1) == 1:
        key, value = key.float().contiguous(), value.float().contiguous()
    q_BTHD = query.transpose(1, 2).float().contiguous()
    y_BTHW = torch.empty(rows, max(2, count), heads, value.shape[3])  # columns of a lone row would be shared out
    kind = NUMBERS[key.dtype], y_BTHW.shape[1], heads, key.shape[1], width, value.shape[3], scale, softcap or 0.0
    attention = threads().prepared(_Attention, *kind, s_aux is not None)
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    for part in zip(q_BTHD, key[:, None], value[:, None], mask_BTC, y_BTHW, strict=True):
        q, k, v, mask_TC, y = part
        places = [each.expand(len(y), *each.shape[1:]) for each in (q, k, v, mask_TC)]
        attention.compute((places[0], places[1], places[2], places[3], y), sinks)
    return y_BTHW[:, :count].to(query.dtype), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask as `attention_by_position` takes it."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is None:
        return None
    hidden = torch.full((), -math.inf, dtype=torch.float16)
    return torch.where(mask, torch.zeros((), dtype=torch.float16), hidden).contiguous()


def attend_by_position(model: Any) -> None:
    """Let a model compute attention in this way, if its family leaves the choice.

    Caps and sinks need a build of ggml that knows sinks. A family's own code computes them otherwise.
    """
    ggml, chosen = library(), model.config._attn_implementation
    if ggml is None or chosen not in ("sdpa", "eager") or not model._supports_attention_backend:
        return
    if chosen == "eager" and ggml.add_sinks is None:
        return
    ALL_ATTENTION_FUNCTIONS.register(BY_POSITION, attention_by_position)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BY_POSITION, _mask)
    model.config._attn_implementation = BY_POSITION
    model.config._experts_implementation = BY_POSITION


def activation_of_graphs(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that computes what is between the products of a family's `experts`, with a graph's bits. Raises
    CannotBeLowered if it is something else than SiLU of the gate times the rest."""
    own = getattr(getattr(experts, "_apply_gate", None), "__func__", None)
    is_usual = own is _default_apply_gate and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
    if not experts.has_gate or experts.has_bias or not is_usual:
        raise CannotBeLowered("its experts on the disk have another activation than gated SiLU, or biases")
    return gated_silu


@contextlib.contextmanager
def attending_by_position(model: Any) -> Iterator[None]:
    """Let a model compute attention in this way within the block. Raises ValueError if its family does not leave the choice."""
    config = model.config
    own = config._attn_implementation, getattr(config, "_experts_implementation", None)
    if own[0] != BY_POSITION:
        attend_by_position(model)
    if config._attn_implementation != BY_POSITION:
        raise ValueError("the family leaves attention to nobody else")
    try:
        yield
    finally:
        config._attn_implementation, config._experts_implementation = own


def experts_by_position(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """Return the weighted sums (N, H) of the experts that `top_k_index` (N, K) chooses for each row, one choice after the other.

    This is an implementation for transformers' experts interface: `self` is the family's module of all experts. A pass that is
    recorded for a graph of ggml (`span_graph.py`) takes the products as a whole.
    """
    recorder = threads().recorder
    if not hasattr(recorder, "chosen_products"):
        return experts_one_by_one(self, hidden_states, top_k_index, top_k_weights)

    if isinstance(self.down_proj, SlotStack):  # a graph on each side of the experts, which some are read for
        activate, among = activation_of_graphs(self), top_k_index.shape[1]

        def compute(_cohort: Any, x: Tensor, index_NK: Tensor) -> Tensor:
            return results_of_choices(self, x, index_NK, activate).view(len(x), among, -1)

        like = hidden_states[:, None].expand(-1, among, -1)
        results: Tensor = recorder.by_torch("experts_on_disk", compute, [hidden_states, top_k_index], like)
        results = results.view(-1, hidden_states.shape[-1])
        return sum_of_choices(self, results, top_k_weights).to(hidden_states.dtype)

    def products(name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None
        y: Tensor = recorder.chosen_products(weight, bias, x, top_k_index, is_transposed=self.is_transposed)
        return y

    x = products("gate_up_proj" if self.has_gate else "up_proj", hidden_states)
    x = products("down_proj", self._apply_gate(x) if self.has_gate else self.act_fn(x))
    return sum_of_choices(self, x, top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(BY_POSITION, experts_by_position)


def attends_by_position(model: Any) -> bool:
    """Return whether the passes of a model give a position the same bits in any company."""
    return getattr(model.config, "_attn_implementation", "") == BY_POSITION


class SameBits(TorchFunctionMode):
    """Mode in which torch's functions `IN_VECTORS` give an element the same bits in tensors of any shape, with any threads. If it
    `multiplies`, products with plain matrices on the CPU, as of routers and adapters, give a row the same bits among any others."""

    def __init__(self, *, multiplies: bool = True) -> None:
        super().__init__()
        self._linear = functional.linear if multiplies else None

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        is_lowered = library() is not None and hasattr(threads().recorder, "attention")  # to a graph of ggml
        if torch.is_grad_enabled() or is_lowered:
            return function(*args, **given)
        if function is self._linear:
            return linear_in_equal_rows(*args, **given)
        if function not in IN_VECTORS or not args:
            return function(*args, **given)
        original = x = args[0]
        others = args[1:]
        inplace = given.pop("inplace", False)
        width = x.shape[-1] if x.dim() else 1
        missing = -width % VECTORS
        if missing or not x.is_contiguous():
            x = functional.pad(x.view(1) if x.dim() == 0 else x, (0, missing)).contiguous()
        count, elements = torch.get_num_threads(), x.numel()
        rest = elements % (count * VECTORS)
        if count == 1 or elements <= ALONE or (elements >= SHARE * count and not rest):
            y = function(x, *others, **given)
        else:
            sizes: int | list[int] = ALONE if elements < SHARE * count else [elements - rest, rest]
            y = torch.cat([function(part, *others, **given) for part in x.view(-1).split(sizes)]).view(x.shape)
        y = y[..., :width].contiguous() if missing else y
        return original.copy_(y) if inplace else y
