"""GPTQ and AWQ: integers of a few bits, packed into words of 32, with a scale and a zero point for each group of inputs.

The formats are those that AutoGPTQ (https://github.com/AutoGPTQ/AutoGPTQ) and AutoAWQ (https://github.com/casper-hansen/AutoAWQ)
write and transformers reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.compute.model.dequantize.packed_matrix import PackedMatrix

WORD_BITS = 32
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # at which of a word's eight places column 0, 1, … lies


def unpack(words_WC: Tensor, bits: int) -> Tensor:
    """int64 values_VC of a stream of `bits` each, lowest bits first, along dimension 0; a value may lie across two words."""
    words = words_WC.long() & 0xFFFFFFFF
    following = torch.cat([words[1:], torch.zeros_like(words[:1])])
    first_bit = torch.arange(words.shape[0] * WORD_BITS // bits) * bits
    word, shift = first_bit // WORD_BITS, (first_bit % WORD_BITS)[:, None]
    return (words[word] >> shift | following[word] << (WORD_BITS - shift)) & ((1 << bits) - 1)


def dequantize_gptq(matrix: PackedMatrix) -> Tensor:
    """float32 weight_OI of qweight (packed along inputs), qzeros_GO (packed along outputs), scales_GO, and g_idx_I where inputs are
    not in their groups' order. Version 1 stores zero points less one."""
    bits = int(matrix.settings["bits"])
    values_IO = _unpacked(matrix, matrix.packed, bits)
    zeros_GO = _unpacked(matrix, matrix[".qzeros"].mT, bits).mT
    if matrix.settings.get("checkpoint_format", "gptq") == "gptq":
        zeros_GO = (zeros_GO + 1) & ((1 << bits) - 1)
    return _scaled(matrix, values_IO, zeros_GO)


def dequantize_awq(matrix: PackedMatrix) -> Tensor:
    """float32 weight_OI of qweight_IO and qzeros_GO (both packed along outputs, in an order of their own) and scales_GO."""
    values_IO, zeros_GO = (
        _unpacked(matrix, packed.mT, AWQ_BITS).unflatten(0, (-1, 8))[:, list(AWQ_ORDER)].flatten(0, 1).mT
        for packed in (matrix.packed, matrix[".qzeros"])
    )
    return _scaled(matrix, values_IO, zeros_GO)


def _unpacked(matrix: PackedMatrix, words: Tensor, bits: int) -> Tensor:
    whole = words.dtype == torch.int32 and words.ndim == 2 and words.shape[0] * WORD_BITS % bits == 0
    matrix.require(whole, f"not a matrix of {bits} bits packed into int32")
    return unpack(words, bits)


def _scaled(matrix: PackedMatrix, values_IO: Tensor, zeros_GO: Tensor) -> Tensor:
    scales_GO = matrix[".scales"]
    inputs, outputs = values_IO.shape
    fits = scales_GO.shape == zeros_GO.shape and zeros_GO.ndim == 2 and zeros_GO.shape[1] == outputs
    matrix.require(fits and scales_GO.is_floating_point(), "scales and zero points do not fit the matrix")
    group_I = matrix.beside.get(".g_idx")
    if group_I is None:
        size = int(matrix.settings.get("group_size", -1))
        group_I = torch.arange(inputs) // (size if size > 0 else inputs)
    group_I = group_I.long()
    fits = group_I.shape == (inputs,) and int(group_I.min()) >= 0 and int(group_I.max()) < scales_GO.shape[0]
    matrix.require(fits, "its inputs are of groups that have no scales")
    return ((values_IO - zeros_GO[group_I]) * scales_GO[group_I].float()).mT
