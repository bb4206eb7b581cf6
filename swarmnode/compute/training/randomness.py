"""Randomness of a microbatch: its seed, the generators of its device, and dropout that is the same on every device.

The dropped elements depend only on (seed, layer, number of the draw, element).

With one seed, a CPU, a card and a card with more processors draw different numbers. A replica that recomputes a lost microbatch on
another device would then get another result, and a spot check would find an honest peer false. So masks are hashed from counters,
as in "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., SC 2011), with integer arithmetic only.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Odd constants of two rounds of multiplying and shifting (lowbias32, Ettinger 2018), which mix 32 bits well
_SPREAD, _FIRST, _SECOND = (word - (1 << 32) if word >> 31 else word for word in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))
_WORD = 1 << 32
_COUNTERS = 1 << 31  # of one key; further elements have the next one
_CPU_BLOCK, _CARD_BLOCK = 1 << 16, 1 << 26  # elements at a time: they stay in a CPU's cache; both divide _COUNTERS
_GENERATOR = threading.Lock()  # guards the CPU's generator


def microbatch_seed(run_seed: int, step: int, index: int) -> int:
    """Return the 63-bit seed of the microbatch `index` of `step`, from the seed of the run."""
    return hashed(run_seed, step, index)


def reseed(seed: int, unit: int, device: torch.device) -> None:
    """Set torch's generators, of the CPU and of `device`, for one layer's code on the microbatch of this seed."""
    value = hashed(seed, unit)
    torch.default_generator.manual_seed(value)  # torch.manual_seed would seed every card of the machine
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)


@contextmanager
def drawing(device: torch.device) -> Iterator[None]:
    """Keep other threads from drawing random numbers from the same generator within the `with` block. A GPU needs no such lock."""
    with nullcontext() if device.type == "cuda" else _GENERATOR:
        yield


def hashed(*numbers: int) -> int:
    """Hash the numbers to 63 well-mixed bits (the CPU's Mersenne twister uses only the lower 32)."""
    raw = struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFFFFFFFFFFFFFF for number in numbers))
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


class CounterDropout(TorchFunctionMode):
    """Mode that makes dropout draw by counters: torch's own, that inside attention, and a graph's operators.

    Other draws (bernoulli, normal, dropout of whole channels and of recurrent layers) still use the generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed, self._unit, self._draws = 0, 0, 0
        self._instead: Mapping[Callable[..., Any], Callable[..., Any]] = {
            functional.dropout: self.dropout,
            torch.dropout: self._operator,
            torch.ops.aten.dropout.default: self._operator,
            torch.ops.aten.native_dropout.default: self._native_dropout,
            functional.scaled_dot_product_attention: self._attention,
            torch.ops.aten.scaled_dot_product_attention.default: self._attention,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the functions that drop. Called by torch in place of each of its functions."""
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    def begin(self, seed: int, unit: int) -> None:
        """Begin a layer: the next draws are its own, for the microbatch of `seed`."""
        self._seed, self._unit, self._draws = seed, unit, 0

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply dropout as `torch.nn.functional.dropout` does, never in place. Raises ValueError if `p` is no probability."""
        return self._drop(input, p)[0] if training and p != 0 else input

    def _operator(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self.dropout(input, p, train)

    def _native_dropout(self, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return input.clone(), torch.ones_like(input, dtype=torch.bool)
        return self._drop(input, p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention as torch's function does, with this mode's dropout. Fused kernels draw for themselves, so dropout
        uses separate operators."""
        if dropout_p == 0:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self.dropout(torch._safe_softmax(scores, -1), dropout_p) @ value

    def _drop(self, input: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """Drop elements by the next draw. Returns the input with the kept elements scaled up, and the mask of these.

        Raises ValueError if `p` is no probability.
        """
        if not 0 <= p <= 1:
            raise ValueError(f"a dropout of {p}: it must be from 0 to 1")
        kept = keep_mask(hashed(self._seed, self._unit, self._draws), input.shape, p, input.device)
        self._draws += 1
        return (input * (1 / (1 - p) if p < 1 else 0.0)).masked_fill(~kept, 0), kept


def keep_mask(draw: int, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Return a mask (bool) that is True for each element with probability 1 - p. `draw` holds 63 bits, other ones for each mask."""
    kept_N = torch.empty(torch.Size(shape).numel(), dtype=torch.bool, device=device)
    least = min(round(p * _WORD) - (_WORD >> 1), (_WORD >> 1) - 1)
    block = _CPU_BLOCK if device.type == "cpu" else _CARD_BLOCK
    for first in range(0, len(kept_N), block):
        count = min(block, len(kept_N) - first)
        word_n = _mixed(hashed(draw, first // _COUNTERS), first % _COUNTERS, count, device)
        torch.ge(word_n, least, out=kept_N[first : first + count])
    return kept_N.view(shape)


def draws_dropout(model: nn.Module, config: Any) -> bool:
    """Return whether a transformers model has dropout in training."""
    modules = (module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))
    told = (value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float))
    return any(modules) or any(told)


def _mixed(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the words (int32, count) of the counters from `first` on. Products wrap around; the upper bits are the better ones."""
    x = torch.arange(first, first + count, dtype=torch.int32, device=device)
    x.mul_(_SPREAD).add_(_signed(key))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST).add_(_signed(key >> 31))
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)


def _signed(key: int) -> int:
    """Return the lower 32 bits of `key` as a signed number, as torch needs it."""
    word = key % _WORD
    return word - _WORD if word >> 31 else word
