"""The dense codecs: a tensor's own bytes (none), or every element rounded to bfloat16 or float16.

A finite value beyond float16's range becomes infinite, which the receiver notices; bfloat16 has the range of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode_half(x_N: Tensor, half: torch.dtype) -> Tensor:
    """Payload uint8_M of x_N rounded to `half` (bfloat16 or float16), on x's device."""
    return x_N.to(half).view(torch.uint8)


def decode_half(payload_M: Tensor, half: torch.dtype, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype` from a payload uint8_M of `half` values; a view where the two are the same."""
    return payload_M.view(half).to(dtype)
