"""Plain products and attention on the CPU that give a position the same bits alone, in any company and in any chunk
(`--equal-bits`).

A library chooses its kernel, and with it the order of its sums, by the number of rows. oneDNN with AMX splits long sums
from 33 rows on, MKL with two threads in small products. So each product has between `least` and `most` rows: fewer are
filled up with zeros, more are cut. A trial of each matrix on this machine, with the node's threads, finds bounds between
which the rows' bits do not change.

torch's attention for the CPU goes through blocks of 512 columns. Its sums depend on the place of a column in its block and on the
number of queries. So each row of a batch is taken from its own first position on, with columns filled up to whole pieces and with
queries in blocks of 32, by numbers of columns and queries that a trial finds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.linear import OneDnnLinear, release_pages
from swarmnode.compute.packing.packed_weight import Block, frozen_product, held_by, tiles
from swarmnode.errors import LocalError

with lean():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

EQUAL_ROWS = "swarmnode_equal_rows"
PIECES = (32, 128, 256, 512)  # columns that attention's are filled up to, the cheapest first
WIDTHS = 64  # the numbers of a head are filled up to a multiple: torch takes the rest of a vector in other ways
KEY_BLOCK = 512  # columns of a block of torch's attention
QUERIES = (512, 128)  # most rows of one call: torch makes its blocks of them larger from 192 on
QUERY_BLOCK = 32
LARGE = 1 << 25  # elements of a matrix that is tried with few rows


class Bounds(NamedTuple):
    """Least and most rows of a product."""

    least: int
    most: int


BOUNDS = (Bounds(16, 1024), Bounds(16, 256), Bounds(48, 512), Bounds(48, 256), Bounds(48, 128), Bounds(16, 32))
"""Bounds in the order of their costs, as measured with AVX-512 and AMX for one row and for 512"""
SMALL = 1 << 20  # elements of a matrix whose product takes no longer than filling up its rows
FEW = Bounds(4, 1024)  # of small matrices, tried first
TRIED = (
    *(5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 36, 37, 49, 63, 64, 65, 97, 128),
    *(129, 160, 183, 192, 256, 300, 352, 364, 442, 507, 512, 573, 700, 1024),
)
"""Numbers of rows of a trial"""
HUGE = 2.0**40

_local = threading.local()
_found: dict[Any, Bounds | None] = {}
_pieces: dict[Any, tuple[int, int]] = {}


@contextlib.contextmanager
def positions_of_rows(positions: Sequence[int] | None) -> Iterator[None]:
    """Compute a pass whose rows begin at these positions of their sessions; None: without equal bits, as other nodes do."""
    before, _local.positions = getattr(_local, "positions", None), positions
    try:
        yield
    finally:
        _local.positions = before


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """Let products and attention take their rows as they come, to measure what equal bits cost."""
    _local.is_unpadded = True
    try:
        yield
    finally:
        _local.is_unpadded = False


def is_padded() -> bool:
    """Return whether products of this thread are filled up at present."""
    return not getattr(_local, "is_unpadded", False)


class EqualLinear(nn.Linear):
    """Linear layer with another one's parameters, each of whose products has a number of rows within `bounds`.

    In half precision, oneDNN's blocks hold the weights if this CPU has products for them; `weight` is empty then.
    """

    def __init__(self, like: nn.Linear, bounds: Bounds, blocks: OneDnnLinear | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight if blocks is None else blocks.weight, like.bias
        self._forward_hooks = like._forward_hooks  # one shared table, so that adapters' hooks work on either layer
        self.bounds, self.in_blocks = bounds, blocks

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I)."""
        return frozen_product(x, self._multiply, self._blocks)

    def _multiply(self, x: Tensor) -> Tensor:
        product = self.in_blocks.multiply if self.in_blocks is not None else self._plain
        return _within(product, x, self.bounds) if is_padded() else product(x)

    def _plain(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def _blocks(self) -> Iterator[Block]:
        return tiles(self.weight) if self.in_blocks is None else self.in_blocks.blocks()


def _within(product: Callable[[Tensor], Tensor], x: Tensor, bounds: Bounds) -> Tensor:
    """Return product(x), computed with numbers of rows within `bounds`."""
    x_RI = x.reshape(-1, x.shape[-1])
    rows = len(x_RI)
    if bounds.least <= rows <= bounds.most:
        return product(x_RI).view(*x.shape[:-1], -1)
    results = []
    for first in range(0, rows, bounds.most):
        part = x_RI[first : first + bounds.most]
        missing = max(0, bounds.least - len(part))
        results.append(product(functional.pad(part, (0, 0, 0, missing)))[: len(part)])
    y_RO = results[0] if len(results) == 1 else torch.cat(results)
    return y_RO.reshape(*x.shape[:-1], -1)


@torch.inference_mode()
def give_equal_rows(model: Any) -> None:
    """Let all products of a model and its attention give a position the same bits in any company, on the CPU.

    Raises LocalError, with the reason in a sentence, if they cannot on this machine.
    """
    if next(iter(model.parameters())).device.type != "cpu":
        raise LocalError("--equal-bits: it is made for CPUs, and not measured on this device; leave it out")
    if any(True for _ in held_by(model)):
        raise LocalError("--equal-bits: packed weights multiply with equal bits by themselves; leave it out")
    others = [
        name
        for name, module in model.named_modules()
        if type(module) is not nn.Linear
        and not isinstance(module, nn.Embedding)
        and any(parameter.dim() > 1 and parameter.numel() for parameter in module.parameters(recurse=False))
    ]
    family = type(model).__name__
    if others:
        raise LocalError(f"--equal-bits: {others[0]} of {family} multiplies in a way of its own; leave it out")
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        raise LocalError(f"--equal-bits: {family} computes attention in a way of its own; leave it out")
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, linear in [each for each in model.named_modules() if type(each[1]) is nn.Linear]:
        takes_blocks = (
            linear.weight.dtype != torch.float32
            and owners[id(linear.weight)] == 1
            and OneDnnLinear.works(linear.weight.dtype)
        )
        blocks = OneDnnLinear(linear.weight, linear.bias) if takes_blocks else None
        bounds = _bounds_of(linear.weight, in_blocks=takes_blocks)
        if bounds is None:
            raise LocalError(
                f"--equal-bits: on this machine the bits of {name} depend on the number of rows; leave it out, or try --threads 1"
            )
        model.set_submodule(name, EqualLinear(linear, bounds, blocks))
        if blocks is not None:
            release_pages(linear.weight)
    ALL_ATTENTION_FUNCTIONS.register(EQUAL_ROWS, attention_in_equal_rows)
    ALL_MASK_ATTENTION_FUNCTIONS.register(EQUAL_ROWS, sdpa_mask)
    model.config._attn_implementation = EQUAL_ROWS


def has_equal_rows(model: Any) -> bool:
    """Return whether `give_equal_rows` has changed the model."""
    return getattr(model.config, "_attn_implementation", "") == EQUAL_ROWS


def linear_in_equal_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `functional.linear`'s product, whose arguments have the same names. With a plain matrix on the CPU a row has the same
    bits among any others.

    Its number of rows is within bounds. If this machine has none for the matrix, rows are multiplied one by one.
    """
    if type(weight) not in (Tensor, nn.Parameter) or weight.device.type != "cpu":
        return functional.linear(input, weight, bias)
    bounds = _bounds_of(weight, in_blocks=False) or Bounds(1, 1)
    return _within(lambda x_RI: functional.linear(x_RI, weight, bias), input, bounds)


def _bounds_of(weight_OI: Tensor, *, in_blocks: bool) -> Bounds | None:
    """Return the bounds of products with a matrix of this shape and dtype, by one trial for each number of threads."""
    key = weight_OI.dtype, weight_OI.shape, in_blocks, torch.get_num_threads()
    if key not in _found:
        _found[key] = _find_bounds(weight_OI, in_blocks=in_blocks)
    return _found[key]


def _find_bounds(like_OI: Tensor, *, in_blocks: bool) -> Bounds | None:
    """Return the first bounds between which products with a matrix of this shape keep the order of their sums; None if there are
    none.

    Each row of a trial has a huge number, its negative, and ones: the sum is the number of ones that were not lost beside a huge
    number, which shows the order. Its matrix has ones only.
    """
    inputs = like_OI.shape[1]
    ones_OI = torch.ones_like(like_OI)
    product = OneDnnLinear(ones_OI, None).multiply if in_blocks else lambda x: functional.linear(x, ones_OI)
    draw = torch.Generator().manual_seed(1)
    for least, most in (FEW, *BOUNDS) if like_OI.numel() <= SMALL and not in_blocks else BOUNDS:
        tried = Bounds(least, most if like_OI.numel() < LARGE else min(most, 128))
        x_RI = torch.ones(tried.most, inputs)
        for row in x_RI if inputs > 1 else ():
            one, other = torch.randperm(inputs, generator=draw)[:2].tolist()
            row[one], row[other] = HUGE, -HUGE
        x_RI = x_RI.to(like_OI.dtype)
        expected = _within(product, x_RI, Bounds(least, least))
        counts = [count for count in (least, *TRIED) if least <= count <= tried.most]
        if all(
            torch.equal(product(x_RI[at : at + count]), expected[at : at + count])
            for count in counts
            for at in {0, min(3, tried.most - count)}
        ):
            return tried
    return None


# -- attention


def attention_in_equal_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention (B, T, H, W) of queries (B, H, T, D) to keys (B, G, C, D) and values (B, G, C, W), and None, as
    transformers expects it.

    The last T of the C columns are the queries' own. `attention_mask` is bool (B, 1, T, C); None: all columns up to the position's
    own count. Outside of `positions_of_rows`, as in training, torch computes it as usual.

    Raises ValueError for scores with a cap, a bias or sinks.
    """
    positions = getattr(_local, "positions", None)
    if positions is None or not is_padded():
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)[0], None
    if dropout or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError("attention with a cap, a bias or sinks has no equal bits")
    rows, heads, count, width = query.shape
    columns, groups = key.shape[2], key.shape[1]
    # The column of a row's first position; below 0 if the oldest positions are kept no longer.
    begins = [columns - count - position for position in positions]
    y_BTHW = query.new_empty(rows, count, heads, value.shape[3])
    for begin in dict.fromkeys(begins):
        members = [row for row in range(rows) if begins[row] == begin]
        is_all = len(members) == rows
        q, k, v = (each if is_all else each[members] for each in (query, key, value))
        mask = (
            attention_mask if attention_mask is None or len(attention_mask) == 1 or is_all else attention_mask[members]
        )
        y = _attend(q.reshape(len(members), groups, -1, count, width), k, v, mask, begin, scaling)
        if is_all:
            return y, None
        y_BTHW[members] = y
    return y_BTHW, None


def _attend(
    q_BGNTD: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, begin: int, scaling: float | None
) -> Tensor:
    """Return the attention (B, T, H, W) of rows that begin at column `begin`. N queries of a position share a key."""
    rows, groups, shared, count, width = q_BGNTD.shape
    columns = key.shape[2]
    first, left = max(begin, 0), -begin % KEY_BLOCK if begin < 0 else 0
    scale = width**-0.5 if scaling is None else scaling
    wide = -(-max(width, value.shape[3]) // WIDTHS) * WIDTHS
    piece, most = _pieces_of(key.dtype, wide)
    filled = -(-(left + columns - first) // piece) * piece
    k, v = (each.new_zeros(rows, groups, filled, wide) for each in (key, value))
    for whole, each in ((k, key), (v, value)):
        whole[:, :, left : left + columns - first, : each.shape[3]] = each[:, :, first:]
    size = max(1, most // shared)
    results = []
    for start in range(0, count, size):
        end = min(count, start + size)
        seen = left + columns - count + end - first  # columns up to the last query's own
        used = -(-seen // piece) * piece
        hidden_BTC = torch.ones(rows if mask is not None else 1, end - start, used, dtype=torch.bool)
        if mask is None:
            hidden_BTC[:, :, left:seen] = torch.ones(end - start, seen - left, dtype=torch.bool).triu_(
                seen - left - (end - start) + 1
            )
        else:
            hidden_BTC[:, :, left:seen] = ~mask[:, 0, start:end, first : first + seen - left]
        queries = shared * (end - start)
        missing = -queries % QUERY_BLOCK
        q_BGQD = q_BGNTD[:, :, :, start:end].reshape(rows, groups, queries, width)
        q_BGQD = functional.pad(q_BGQD, (0, wide - width, 0, missing))
        added = torch.zeros(len(hidden_BTC), 1, queries + missing, used, dtype=key.dtype)
        added[:, 0, :queries].view(len(hidden_BTC), shared, end - start, used).masked_fill_(
            hidden_BTC[:, None], -torch.inf
        )
        y_BGQW = functional.scaled_dot_product_attention(
            q_BGQD, k[:, :, :used], v[:, :, :used], attn_mask=added, scale=scale
        )
        y_BGNTW = y_BGQW[:, :, :queries, : value.shape[3]].reshape(rows, groups, shared, end - start, -1)
        results.append(y_BGNTW.permute(0, 3, 1, 2, 4).reshape(rows, end - start, groups * shared, -1))
    return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def _pieces_of(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Return the number of columns that attention's are filled up to, and the most queries of a call: the first of PIECES
    and QUERIES by which a trial's queries keep their bits, else the last."""
    key = dtype, width, torch.get_num_threads()
    if key not in _pieces:
        draw = torch.Generator().manual_seed(2)
        k, v = (torch.randn(1, 1, 1536, width, generator=draw).to(dtype) for _ in range(2))
        q = torch.randn(1, 1, QUERIES[0], width, generator=draw).to(dtype)
        columns = torch.arange(1536)

        def attend(count: int, used: int, seen: int) -> Tensor:
            mask = torch.zeros(count, used, dtype=dtype).masked_fill_(columns[:used] >= seen, -torch.inf)
            parts = q.split(count, 2)[: QUERIES[-1] // count or 1]
            found = [
                functional.scaled_dot_product_attention(each, k[:, :, :used], v[:, :, :used], attn_mask=mask)
                for each in parts
            ]
            return torch.cat(found, 2)[:, :, : QUERIES[-1]]

        seen_by = range(31, 1136, 32)
        whole = {seen: attend(QUERY_BLOCK, 1536, seen) for seen in seen_by}
        piece = next(
            (
                piece
                for piece in PIECES
                if all(
                    torch.equal(attend(QUERY_BLOCK, -(-seen // piece) * piece, seen), whole[seen]) for seen in seen_by
                )
            ),
            PIECES[-1],
        )
        most = next(
            (
                count
                for count in QUERIES
                if all(torch.equal(attend(count, 1536, seen), whole[seen]) for seen in seen_by[::4])
            ),
            QUERIES[-1],
        )
        _pieces[key] = piece, most
    return _pieces[key]
