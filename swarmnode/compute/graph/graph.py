"""Graph: a module's forward pass as a list of operators, from its inputs to its mean loss (in training mode) or to its outputs
(in evaluation mode). It is data, without code.

Every value has a name: an input's, a weight's or a node's. Sizes that grow with the batch are polynomials of it.

The operators that a graph may use: functions of tensors only, without access to files, processes or foreign memory.

A graph file comes from a stranger. Its operators are looked up here by name, so the file can only ask for arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, Union

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.errors import CheckpointError

FORMAT = 1

PARAMETER = "parameter"
BUFFER = "buffer"  # changes in training
CONSTANT = "constant"

NAMED = "kwargs_"  # prefix of torch.export's name for an argument given by name


class Poly(msgspec.Struct, frozen=True, tag_field="is", tag="size"):
    """Integer that depends on the batch: c0 + c1 * batch + c2 * batch^2 ..."""

    coefficients: tuple[int, ...]

    def at(self, batch: int) -> int:
        """Return the value for a batch of `batch` samples."""
        return sum(coefficient * batch**power for power, coefficient in enumerate(self.coefficients))


Size = Union[int, Poly]


class Ref(msgspec.Struct, frozen=True, tag_field="is", tag="value"):
    """Reference to a value. `item` is its place among several results of a node; None if the node has one."""

    name: str
    item: int | None = None


class Real(msgspec.Struct, frozen=True, tag_field="is", tag="real"):
    """Float that JSON cannot write: "inf", "-inf" or "nan"."""

    text: str


class Constant(msgspec.Struct, frozen=True, tag_field="is", tag="torch"):
    """Dtype, memory format or layout of torch, by name."""

    name: str


class Here(msgspec.Struct, frozen=True, tag_field="is", tag="device"):
    """Placeholder, among an operator's arguments, for the device that the graph runs on."""


Atom = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here]
Argument = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here, list[Atom]]


class TensorType(msgspec.Struct, frozen=True):
    """Dtype and shape of a value in a graph; sizes may depend on the batch."""

    dtype: str
    shape: tuple[Size, ...]

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the shape for a batch of `batch` samples."""
        return tuple(size_at(size, batch) for size in self.shape)

    @property
    def tells_batch(self) -> bool:
        """Whether a tensor's shape shows the size of the batch."""
        return any(map(_is_multiple, self.shape))

    def batch_of(self, shape: tuple[int, ...]) -> int:
        """Return the batch of a tensor of that shape. Only if `tells_batch`."""
        return next(
            actual // size.coefficients[1] for size, actual in zip(self.shape, shape, strict=True) if _is_multiple(size)
        )


class GraphInput(msgspec.Struct, frozen=True):
    """Input of the module. A graph lists its inputs in the order of a batch's values."""

    name: str
    type: TensorType

    @property
    def argument(self) -> str:
        """Name of the input in the module's own code, and of its array in the data."""
        return self.name.removeprefix(NAMED)


class Weight(msgspec.Struct, frozen=True):
    """A tensor of the weights' file. `tensor` is its name there and in the module's state dict.

    `values`: its elements, if labels are counted by them."""

    name: str
    tensor: str
    kind: str
    trained: bool
    type: TensorType
    values: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET


class OperatorCall(msgspec.Struct, frozen=True):
    """Call of an operator. `types` are those of its results; None for a result that is no tensor."""

    name: str
    operator: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    types: tuple[TensorType | None, ...]

    def refs(self) -> Iterator[Ref]:
        """Yield references to the values that the operator takes."""
        for argument in (*self.args, *self.kwargs.values()):
            for atom in argument if isinstance(argument, list) else (argument,):
                if isinstance(atom, Ref):
                    yield atom


class GraphOutput(msgspec.Struct, frozen=True):
    """Output of the module in evaluation mode, with its name for users."""

    name: str
    value: Ref


class BufferUpdate(msgspec.Struct, frozen=True):
    """Update of a buffer (its value's name) by a value, at the end of the pass."""

    buffer: str
    value: Ref


class Graph(msgspec.Struct, frozen=True):
    """Graph of a module's forward pass. `cuts` are the numbers of the nodes at which the units after the first begin.

    `batch` is the example's; unless `any_batch`, no other one works. A trained graph has a `loss`, a served graph has `outputs`.
    """

    inputs: tuple[GraphInput, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[OperatorCall, ...]
    moves: tuple[BufferUpdate, ...]
    loss: Ref | None
    batch: int
    any_batch: bool
    cuts: tuple[int, ...] = ()
    format: int = FORMAT
    outputs: tuple[GraphOutput, ...] = ()

    def __repr__(self) -> str:
        batch = "any batch" if self.any_batch else f"batches of {self.batch}"
        return f"Graph({len(self.nodes)} nodes in {self.units} units, {len(self.weights)} weights, {batch})"

    @property
    def sources(self) -> tuple[tuple[str, TensorType], ...]:
        """Names and types of the values that exist before any node computes: inputs, then weights."""
        return tuple((item.name, item.type) for item in self.inputs) + tuple(
            (weight.name, weight.type) for weight in self.weights
        )

    @property
    def results(self) -> tuple[Ref, ...]:
        """Values that the graph returns: its loss, or its outputs, each value once."""
        wanted = [output.value for output in self.outputs] if self.loss is None else [self.loss]
        return tuple(dict.fromkeys(wanted))

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.cuts) + 1


def size_at(size: Size, batch: int) -> int:
    """Return a size for a batch of `batch` samples."""
    return size if isinstance(size, int) else size.at(batch)


def _is_multiple(size: Size) -> TypeGuard[Poly]:
    return isinstance(size, Poly) and len(size.coefficients) == 2 and size.coefficients[0] == 0 < size.coefficients[1]


BATCH_NORM = "aten.batch_norm.default"
_ALIGNED_BYTES = 16  # of the rows of grouped products
_CONSTANTS: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"),
        *("complex128", "strided", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    )
}


def torch_constant(name: str) -> Any:
    """Return the dtype, memory format or layout of that name. Raises CheckpointError for any other name."""
    if name not in _CONSTANTS:
        raise CheckpointError(
            f"the graph names {name!r:.80}, which is no dtype or "
            "format that a graph may use; export the module without it"
        )
    return _CONSTANTS[name]


def argument_value(argument: Argument, device: torch.device) -> Any:
    """Return the value that an operator gets for an argument that is neither a graph's value nor a size."""
    if isinstance(argument, Constant):
        return torch_constant(argument.name)
    if isinstance(argument, Real):
        return float(argument.text)
    return device if isinstance(argument, Here) else argument


# BATCH_NORM is the one operator that writes: it updates its running statistics, which are buffers of its unit.

FUNCTIONAL_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""Form that torch.export gives to a batch norm in training mode; it has no derivative"""

BATCH_NORM_WITHOUT_STATISTICS = "aten._native_batch_norm_legit.no_stats"
"""The same where nothing is kept of a batch."""

EVALUATED_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
"""Form that torch.export gives to a batch norm in evaluation mode: it only reads the running statistics"""

_ALLOWED_NAMES = """
batch_norm linear mm bmm addmm baddbmm addmv mv dot outer ger matmul einsum bilinear kron tensordot cdist _euclidean_dist
conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d unfold im2col col2im
vdot addr cross block_diag matrix_power matrix_exp _weight_norm _grouped_mm
scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm _fused_rms_norm
linalg_vector_norm linalg_matrix_norm linalg_norm norm renorm cosine_similarity pairwise_distance
linalg_inv linalg_inv_ex inverse linalg_solve linalg_solve_ex linalg_solve_triangular linalg_cholesky linalg_cholesky_ex
cholesky_solve linalg_qr linalg_svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_det linalg_slogdet logdet linalg_pinv
linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_power linalg_matrix_exp linalg_multi_dot
linalg_householder_product linalg_cross linalg_diagonal linalg_vecdot
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn
fft_rfftn fft_irfftn fft_fftshift fft_ifftshift fft_fftfreq fft_rfftfreq stft istft
view_as_real view_as_complex real imag angle polar complex conj _conj _conj_physical conj_physical resolve_conj resolve_neg
add sub subtract rsub mul multiply div divide true_divide floor_divide negative absolute
remainder fmod pow neg abs sign sgn reciprocal sqrt rsqrt square exp exp2
expm1 log log2 log10 log1p logaddexp sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc erf erfc erfinv
lgamma digamma floor ceil round trunc frac maximum minimum fmax fmin clamp clamp_min clamp_max lerp addcmul addcdiv
hypot xlogy logit nan_to_num heaviside copysign polygamma special_xlog1py special_entr special_ndtr special_log_ndtr
special_ndtri special_erfcx special_i0 special_i0e special_i1 special_i1e i0 ldexp float_power positive deg2rad rad2deg
logaddexp2
eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ where
masked_fill masked_scatter _is_all_true _is_any_true
relu relu6 leaky_relu prelu _prelu_kernel elu celu selu gelu silu mish hardtanh hardswish hardsigmoid
sigmoid log_sigmoid softplus threshold glu softmax log_softmax _softmax _log_softmax _safe_softmax hardshrink
softshrink logsumexp
sum mean prod var std var_mean std_mean amax amin max min argmax argmin any all cumsum cumprod logcumsumexp cummax cummin
topk sort argsort kthvalue median nanmedian mode nansum nanmean count_nonzero trace diff bincount searchsorted bucketize
histc aminmax isin cov corrcoef trapezoid cumulative_trapezoid msort
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices avg_pool1d
avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
_adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator
pixel_shuffle pixel_unshuffle channel_shuffle
pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d _pad_circular
embedding embedding_bag one_hot index index_put index_add index_copy index_fill index_select gather scatter scatter_add
scatter_reduce take take_along_dim nonzero_static slice_scatter select_scatter diagonal_scatter
reshape view_as reshape_as ravel expand expand_as permute transpose t swapaxes swapdims movedim numpy_T mT
squeeze unsqueeze flatten unflatten slice select narrow split split_with_sizes tensor_split chunk unbind cat concat stack
hstack vstack dstack column_stack atleast_1d atleast_2d atleast_3d adjoint mH narrow_copy
repeat repeat_interleave tile roll flip rot90 tril triu diagonal diag diag_embed broadcast_to
broadcast_tensors meshgrid contiguous clone detach alias _to_copy to type_as lift_fresh_copy view_copy slice_copy
permute_copy expand_copy select_copy t_copy transpose_copy squeeze_copy unsqueeze_copy detach_copy copy
zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor arange
linspace logspace eye fill zero tril_indices triu_indices
cross_entropy_loss nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd mse_loss l1_loss smooth_l1_loss
huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div margin_ranking_loss hinge_embedding_loss
cosine_embedding_loss triplet_margin_loss soft_margin_loss multi_margin_loss multilabel_margin_loss poisson_nll_loss
ctc_loss
_assert_async
"""
_RANDOM_NAMES = """
dropout native_dropout feature_dropout alpha_dropout bernoulli rand randn rand_like randn_like randint randint_like randperm
normal normal_functional uniform multinomial exponential log_normal geometric cauchy random rrelu rrelu_with_noise_functional
"""
_SHAPED_NAMES = """
bernoulli.p bernoulli.Tensor normal_functional.default uniform.default exponential.default log_normal.default geometric.default
cauchy.default random.default random.to random.from
"""
_RANDOM = frozenset(_RANDOM_NAMES.split())
_ALLOWED = _RANDOM | set(_ALLOWED_NAMES.split())
_RANDOM_WITH_DROPOUT = {"scaled_dot_product_attention": 4, "lstm": 5, "gru": 5, "rnn_tanh": 5, "rnn_relu": 5}
"""Operators that draw random numbers if they get a dropout, with the place of the dropout among their arguments"""
_COUNTED = frozenset({"dropout", "native_dropout", "scaled_dot_product_attention"})
"""Operators that `CounterDropout` draws for, the same on every device"""

SHAPED = frozenset(f"aten.{name}" for name in _SHAPED_NAMES.split())
"""Draws that were written in place: they use only the shape of their first argument"""

INSTEAD = {
    "aten.view.default": "aten.reshape.default",  # strides may differ from the export's: what came over a link is contiguous
    "aten._unsafe_view.default": "aten.reshape.default",
    "aten.empty.memory_format": "aten.zeros.default",  # uninitialised memory would disclose a volunteer's data
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.lift_fresh_copy.default": "aten.clone.default",
    "transformers.grouped_mm_fallback.default": "aten._grouped_mm.default",  # its experts, on rows sorted by expert
    FUNCTIONAL_BATCH_NORM: BATCH_NORM,
    EVALUATED_BATCH_NORM: BATCH_NORM,
    BATCH_NORM_WITHOUT_STATISTICS: BATCH_NORM,
}
"""Replacements that the export makes for some operators"""

SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.default": 5}
"""Operators that may give sparse gradients, which are added up as dense ones here, and which argument says so."""

COPY = "aten.copy.default"
"""Form that torch.export gives to an assignment to a slice; it has no derivative"""

DETACH = "aten.detach.default"

ASSERT = "aten._assert_async.default"
"""Assertion that other operators of the export rely on; `graph_segment.py` checks it in each pass"""


def resolve(operator: str, *, is_source: bool = False) -> Callable[..., Any]:
    """Return the function behind a name like "aten.linear.default". Raises CheckpointError for a name that is not on the list.

    `is_source`: for a program that will be exported, which may also write in place, and use operators that the export replaces.
    """
    namespace, _, rest = operator.partition(".")
    base, _, overload = rest.partition(".")
    known = {base, base.removesuffix("_")} if is_source else {base}
    is_allowed = bool(known & _ALLOWED) or (is_source and operator in INSTEAD)
    if namespace != "aten" or not is_allowed or not overload.replace("_", "").isalnum():
        raise CheckpointError(
            f"the operator {operator:.80} is not one that a graph may use; write the module with other torch operators"
        )
    function = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if function is None or not isinstance(function, torch._ops.OpOverload):
        raise CheckpointError(
            f"the operator {operator:.80} is unknown to this version of torch ({torch.__version__}); upgrade torch"
        )
    if function._schema.is_mutable and operator != BATCH_NORM and not is_source:
        raise CheckpointError(
            f"the operator {operator:.80} writes into its arguments, which "
            "a graph may not; write the module without in-place operators"
        )
    return function


def gives_list(function: Callable[..., Any]) -> bool:
    """Return whether an operator's result is a list of tensors, however many."""
    returns = function._schema.returns  # type: ignore[attr-defined]
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def is_random(operator: str, args: tuple[Any, ...]) -> bool:
    """Return whether the operator draws random numbers when called with these arguments."""
    base = operator.split(".")[1]
    place = _RANDOM_WITH_DROPOUT.get(base)
    if place is not None:
        dropout = args[place] if len(args) > place else 0
        return bool(dropout) if isinstance(dropout, int | float) else True
    return base in _RANDOM


def draws_by_device(operator: str, args: tuple[Any, ...]) -> bool:
    """Return whether the operator draws random numbers that differ between devices."""
    return is_random(operator, args) and operator.split(".")[1] not in _COUNTED


def moved_by_batch_norm(node: OperatorCall) -> tuple[str, ...]:
    """Return the names of the buffers that the node updates while it computes; empty unless it is a batch norm in training mode."""
    if node.operator != BATCH_NORM or not node.args[5]:  # not in training mode: it only reads them
        return ()
    return tuple(ref.name for ref in node.args[3:5] if isinstance(ref, Ref))


def grouped_product(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Return `_grouped_mm` of groups of rows with a matrix each, also for rows that autocast made of another dtype, and for widths
    that are no multiple of 16 bytes."""
    rows, even = self.to(mat2.dtype), _ALIGNED_BYTES // mat2.itemsize
    inner, outer = (-size % even for size in mat2.shape[-2:])
    if not (inner or outer) or bias is not None or mat2.dim() != 3:
        return torch._grouped_mm(rows, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
    padded = functional.pad(mat2, (0, outer, 0, inner))
    product = torch._grouped_mm(functional.pad(rows, (0, inner)), padded, offs=offs, out_dtype=out_dtype)
    return product[..., : mat2.shape[-1]]


INSTEAD_OF_OPERATOR: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": grouped_product}
"""Functions that do what an operator does, and more, by its name."""
