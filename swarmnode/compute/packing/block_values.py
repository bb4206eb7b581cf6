"""Values of packed blocks by torch's operators, on any device: to the bit those of ggml and of the package `gguf`.

No operator waits for the device, so they may be captured in a graph. The layouts are those of `gguf/quants.py`
(https://github.com/ggml-org/llama.cpp/tree/master/gguf-py). N counts blocks; a block's values come in their order in the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import DTYPES, Format

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled; the exponents are halved
TABLES = {"IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES, "MXFP4": FP4_VALUES}
"""Values that a format's 4 bits stand for"""


def values_of(packed_B: Tensor, form: Format) -> Tensor:
    """Return the values of whole blocks (uint8) as float32 (elements,), on their device."""
    if form.name in DTYPES:
        return packed_B.view(DTYPES[form.name]).float()
    values: Tensor = _VALUES[form.name](packed_B.view(-1, form.block_bytes)).reshape(-1)
    return values


@functools.cache
def table_on(name: str, device: torch.device) -> Tensor:
    """Return the values of a format's codes, one of TABLES, as float32 (16,) on a device."""
    return torch.tensor(TABLES[name], dtype=torch.float32, device=device)


def _half(blocks_NB: Tensor, place: int) -> Tensor:
    """Return the float16 at a place of each block, as float32 (N, 1)."""
    return blocks_NB[:, place : place + 2].view(torch.float16).float()


def _shifted(bytes_NB: Tensor, run: int, bits: int) -> Tensor:
    """Return the codes of `bits` bits in runs of `run` bytes (N, codes): of a run first the lowest bits of all its bytes."""
    runs_NKW = bytes_NB.reshape(len(bytes_NB), -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_NB.device)[:, None]
    codes: Tensor = (runs_NKW >> shifts) & (2**bits - 1)
    return codes.view(len(bytes_NB), -1)


def _bits(bytes_NB: Tensor) -> Tensor:
    """Return the bits of each byte in turn (N, 8 x bytes)."""
    return _shifted(bytes_NB.reshape(-1, 1), 1, 1).view(len(bytes_NB), -1)


def _of_32(b: Tensor, bits: int, *, least: bool) -> Tensor:
    """Return the values of Q4_0, Q5_0, Q4_1 and Q5_1: codes of `bits`, with an offset of half their range or a `least` value."""
    place = 4 if least else 2
    codes = _shifted(b[:, -16:], 16, 4)
    if bits == 5:
        codes = codes | (_bits(b[:, place : place + 4]) << 4)
    if least:
        return _half(b, 0) * codes.float() + _half(b, 2)
    return _half(b, 0) * (codes.float() - 2 ** (bits - 1))


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8).float()


def _grouped(scale_NG: Tensor, codes_NE: Tensor) -> Tensor:
    """Return codes times their group's scale (N, groups, group)."""
    return scale_NG[:, :, None] * codes_NE.view(*scale_NG.shape, -1)


def _q2_k(b: Tensor) -> Tensor:
    scale_NG, least_NG = _half(b, 80) * (b[:, :16] & 15).float(), _half(b, 82) * (b[:, :16] >> 4).float()
    return _grouped(scale_NG, _shifted(b[:, 16:80], 32, 2).float()) - least_NG[:, :, None]


def _q3_k(b: Tensor) -> Tensor:
    scales = _shifted(b[:, 96:104], 8, 4) | (_shifted(b[:, 104:108], 4, 2) << 4)
    highs = _shifted(b[:, :32], 32, 1) ^ 1  # a bit that is not set takes 4 away
    codes = _shifted(b[:, 32:96], 32, 2).float() - (highs << 2).float()
    return _grouped(_half(b, 108) * (scales.float() - 32), codes)


def _six_bit_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima (N, 8) of Q4_K and Q5_K, with the block's own factors."""
    first, second, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), dim=1)
    return _half(b, 0) * scales.float(), _half(b, 2) * minima.float()


def _q4_k(b: Tensor) -> Tensor:
    scale_NG, least_NG = _six_bit_scales(b)
    return _grouped(scale_NG, _shifted(b[:, 16:], 32, 4).float()) - least_NG[:, :, None]


def _q5_k(b: Tensor) -> Tensor:
    scale_NG, least_NG = _six_bit_scales(b)
    codes = _shifted(b[:, 48:], 32, 4) | (_shifted(b[:, 16:48], 32, 1) << 4)
    return _grouped(scale_NG, codes.float()) - least_NG[:, :, None]


def _q6_k(b: Tensor) -> Tensor:
    codes = _shifted(b[:, :128], 64, 4) | (_shifted(b[:, 128:192], 32, 2) << 4)
    return _grouped(_half(b, 208) * b[:, 192:208].view(torch.int8).float(), codes.float() - 32)


def _looked_up(name: str, codes_NE: Tensor) -> Tensor:
    return table_on(name, codes_NE.device)[codes_NE.int()]


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _looked_up("IQ4_NL", _shifted(b[:, 2:], 16, 4))


def _iq4_xs(b: Tensor) -> Tensor:
    lows = _shifted(b[:, 4:8].reshape(-1, 1), 1, 4).view(len(b), -1)
    highs = _shifted(b[:, 2:4].reshape(-1, 1), 1, 2).view(len(b), -1)
    scale_NG = _half(b, 0) * ((lows | (highs << 4)).float() - 32)
    return _grouped(scale_NG, _looked_up("IQ4_XS", _shifted(b[:, 8:], 16, 4)))


def _mxfp4(b: Tensor) -> Tensor:
    exponent = b[:, :1].int()
    tiny = torch.full_like(exponent, 0x00200000) << exponent.clamp(max=1)  # below 2 the number is subnormal
    scale_N1 = torch.where(exponent < 2, tiny, (exponent - 1) << 23).view(torch.float32)
    return scale_N1 * _looked_up("MXFP4", _shifted(b[:, 1:], 16, 4))


_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": partial(_of_32, bits=4, least=False), "Q4_1": partial(_of_32, bits=4, least=True),
    "Q5_0": partial(_of_32, bits=5, least=False), "Q5_1": partial(_of_32, bits=5, least=True), "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
