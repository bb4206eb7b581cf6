"""Schedule-free AdamW (arXiv 2405.15682): a constant learning rate, and an average of the iterates in place of a schedule.

Gradients are computed at y; AdamW moves z; x is the average of z, and y lies between both: y = (1 - beta1) z + beta1 x. The
parameters are y until the last step, which sets them to x. The memory is z - y, because it begins at zero whatever the parameters
are.

Muon (https://kellerjordan.github.io/posts/muon/): momentum whose singular values are set to about 1, for weight matrices.

The learning rate of a matrix is scaled so that its update is as large as AdamW's (arXiv 2502.16982): one `--lr` serves both.
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` computes the same with bfloat16 products. Here products are float32: in
bfloat16, a difference of 1e-7 between two replicas would become one of 1e-2 of an update.

Eva (arXiv 2308.02123): K-FAC with rank-one factors, the running means of each layer's inputs and of its outputs' gradients.

An update is (G - (g'Ga) / (damping + |g|^2 |a|^2) ga') / damping, for a gradient G with a row for each output, the mean input a and
the mean gradient g. A bias is one more column, with an input of 1. `clip` bounds the KL divergence of the step: all updates are
multiplied by min(1, sqrt(clip / (learning_rate^2 * sum(update * G)))), with the sum over the whole model. Parameters that no linear
layer or convolution uses as its weights keep their own gradient.

Lion (arXiv 2302.06675): each parameter moves by the learning rate, in the direction of the sign of its momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from swarmnode.swarm.records.run import Run

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial
ITERATIONS = 5
RETRACTIONS = 12  # singular values of 0.05 of the bound come within 1e-6 of 1
SMALLEST_NORM = 1e-7
ADAMW_RMS = 0.2  # root mean square of AdamW's updates
NO_MATRICES = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*embed_out*", "*score.*", "*classifier*", "*.thin_anchor.*")
"""Patterns of the names of embeddings and heads, which AdamW updates"""
EXPERTS = "*experts*"
"""Pattern of the names of fused experts: parameters (experts, outputs, inputs)"""


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter. AdamW updates embeddings, heads, norms and biases."""
    return parameter.dim() >= 2 and not any(fnmatchcase(name, pattern) for pattern in NO_MATRICES)


def matrices(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of the matrices in a parameter: each of fused experts, otherwise one with a row for each output."""
    if tensor.dim() == 3 and fnmatchcase(name, EXPERTS):
        yield from tensor
    else:
        yield tensor.view(len(tensor), -1)


def working_bytes(name: str, parameter: Tensor) -> int:
    """Return the bytes of temporary tensors in an update of `parameter`: three as large as the matrix, and two products."""
    rows, columns = next(matrices(name, parameter)).shape
    return (3 * rows * columns + 2 * min(rows, columns) ** 2) * parameter.element_size()


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """Return a float32 matrix_RC with the same singular vectors, and singular values of about 0.7 to 1.2.

    Newton-Schulz iteration; zeros stay zeros.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_RC.size(0) > matrix_RC.size(1)
    x_MN = matrix_RC.T if is_tall else matrix_RC
    x_MN = x_MN / x_MN.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram_MM = x_MN @ x_MN.T
        polynomial_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, polynomial_MM, x_MN, beta=a)
    return x_MN.T if is_tall else x_MN


def retract(matrix: Tensor) -> None:
    """Replace a float32 matrix by the nearest one with orthonormal rows, or columns if it is tall.

    Newton-Schulz iteration. Divided by the root of a bound of its largest singular value, the matrix lies where the iteration
    converges; that of an orthonormal one is 1.
    """
    rows_MN = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    bound = (rows_MN @ rows_MN.T).abs().sum(1).amax().sqrt().clamp(min=SMALLEST_NORM)
    x_MN = rows_MN / bound
    for _ in range(RETRACTIONS):
        x_MN = torch.addmm(x_MN, x_MN @ x_MN.T, x_MN, beta=1.5, alpha=-0.5)
    rows_MN.copy_(x_MN)


def muon(
    name: str,
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    beta: float,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its `momentum` of the same shape in place. `beta`: the share of the momentum that is kept."""
    views = (matrices(name, tensor) for tensor in (parameter, gradient, momentum))
    for parameter_RC, gradient_RC, momentum_RC in zip(*views, strict=True):
        momentum_RC.lerp_(gradient_RC, 1 - beta)
        update_RC = orthogonalize(gradient_RC.lerp(momentum_RC, beta))  # Nesterov's
        parameter_RC.mul_(1 - learning_rate * weight_decay)
        parameter_RC.sub_(update_RC, alpha=learning_rate * ADAMW_RMS * math.sqrt(max(parameter_RC.shape)))


LINEAR = (functional.linear, torch.ops.aten.linear.default)
CONVOLUTION = (functional.conv2d, torch.ops.aten.conv2d.default)
DIMENSIONS = (2, 4)  # of weights of linear layers and of convolutions


class LayerMeans(NamedTuple):
    """Means of one layer: of its inputs (`input_I`) and of the gradients of its outputs (`output_O`), for outputs' mean loss."""

    input_I: Tensor
    output_O: Tensor


def is_watched(name: str, parameter: Tensor) -> bool:
    """Return whether the means of the layer with this weight are taken: matrices and kernels, but for embeddings and heads."""
    return parameter.requires_grad and parameter.dim() in DIMENSIONS and is_matrix(name, parameter)


def shapes_of(parameter: Tensor) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of the means of a weight's layer."""
    outputs = len(parameter)
    return torch.Size([parameter.numel() // outputs]), torch.Size([outputs])


def keys_of(name: str) -> tuple[str, str]:
    """Return the names of the means of the layer whose weight is `name`, among changes of statistics."""
    return f"{name}/input", f"{name}/output"


def clip_factor(clip: float, learning_rate: float, norm: float) -> float:
    """Return the factor of all updates. `norm` is the square root of the sum of update * G; a `clip` of 0 turns clipping off."""
    size = learning_rate * norm
    return min(1.0, math.sqrt(clip) / size) if clip and size else 1.0


def moved(mean: Tensor, newest: Tensor, decay: float, step: int) -> Tensor:
    """Return the running mean after step `step` (from 0). The first step's mean is the newest."""
    return mean.lerp(newest, 1 - decay) if step else newest.clone()


def curvature(gradient: Tensor, bias_O: Tensor | None, means: LayerMeans, damping: float) -> tuple[float, float]:
    """Return the factor of ga' that an update of damping 1 takes from the gradient, and the sum of update * G."""
    gradient_OI = gradient.reshape(len(gradient), -1)
    projected_O = gradient_OI @ means.input_I
    square, input_square = _square(gradient_OI.view(-1)), _square(means.input_I)
    if bias_O is not None:
        projected_O = projected_O + bias_O
        square += _square(bias_O)
        input_square += 1.0
    along = float(means.output_O @ projected_O)
    factor = along / (damping + input_square * _square(means.output_O))
    return factor, max(0.0, square - along * factor) / damping


def _square(vector_N: Tensor) -> float:
    return float(vector_N @ vector_N)


def precondition(gradient: Tensor, bias_O: Tensor | None, means: LayerMeans, *, damping: float, clipped: float) -> None:
    """Replace a layer's gradients by its update, multiplied by `clipped`."""
    factor, _ = curvature(gradient, bias_O, means, damping)
    gradient.view(len(gradient), -1).addr_(means.output_O, means.input_I, alpha=-factor).mul_(clipped / damping)
    if bias_O is not None:
        bias_O.sub_(means.output_O, alpha=factor).mul_(clipped / damping)


class LayerWatch(TorchFunctionMode):
    """Mode that writes down the means of the layers whose weights are `watched`, as a pass calls them.

    `watched` holds the target of each weight's means by its id: the changes of its layer's statistics, and the weight's name. The
    gradients come later, when the graph goes back.
    """

    def __init__(self, watched: Mapping[int, tuple[dict[str, Tensor], str]]) -> None:
        super().__init__()
        self._watched = watched

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and watch it if it is a layer."""
        output = func(*args, **(kwargs or {}))
        if func in LINEAR or func in CONVOLUTION:
            inputs, weight, *more = args
            if id(weight) in self._watched and (func in LINEAR or _is_plain(inputs, more, kwargs or {})):
                self._watch(func in LINEAR, output, inputs.detach(), weight, more, kwargs or {})
        return output

    @torch.no_grad()
    def _watch(
        self, is_linear: bool, output: Tensor, inputs: Tensor, weight: Tensor, more: list[Any], named: Mapping[str, Any]
    ) -> None:
        changes, name = self._watched[id(weight)]
        input_key, output_key = keys_of(name)
        mean_I = (
            inputs.float().reshape(-1, inputs.shape[-1]).mean(0)
            if is_linear
            else _mean_patch(inputs.float(), weight, output, _geometry(more, named))
        )
        _add(changes, input_key, mean_I)
        if output.requires_grad:
            others = [place for place in range(output.dim()) if place != (output.dim() - 1 if is_linear else 1)]
            output.register_hook(lambda gradient: _add(changes, output_key, gradient.detach().float().sum(others)))


def _add(changes: dict[str, Tensor], key: str, value: Tensor) -> None:
    changes[key] = changes[key] + value if key in changes else value


def _geometry(more: list[Any], named: Mapping[str, Any]) -> tuple[Any, Any, Any, int]:
    """Return stride, padding, dilation and groups of a convolution by its arguments behind the weight."""
    given = dict(zip(("bias", "stride", "padding", "dilation", "groups"), more, strict=False)) | dict(named)
    return given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1), given.get("groups", 1)


def _is_plain(inputs: Tensor, more: list[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a convolution has a batch of images, one group, and its padding in numbers."""
    _, padding, _, groups = _geometry(more, named)
    return inputs.dim() == 4 and groups == 1 and not isinstance(padding, str)


def _mean_patch(inputs_NCHW: Tensor, weight: Tensor, output: Tensor, geometry: tuple[Any, Any, Any, int]) -> Tensor:
    """Return the mean_I of all patches that a convolution multiplies, without making them: a view of the batch's mean image."""
    (row, column), (rows, columns), (down, right) = (_pair(one) for one in geometry[:3])
    image_CHW = functional.pad(inputs_NCHW.mean(0), (columns, columns, rows, rows)).contiguous()
    channel_step, row_step, column_step = image_CHW.stride()
    patches = image_CHW.as_strided(
        (*weight.shape[1:], *output.shape[2:]),
        (channel_step, down * row_step, right * column_step, row * row_step, column * column_step),
    )
    return patches.mean((-2, -1)).flatten()


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and of columns, which are equal if only one is given."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes[0], sizes[-1]


def lion(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    betas: tuple[float, float],
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its momentum `exp_avg` in place.

    `betas`: the shares of the momentum that are kept, in the direction of this update, and for the next one.
    """
    parameter.mul_(1 - learning_rate * weight_decay)
    parameter.sub_(exp_avg.lerp(gradient, 1 - betas[0]).sign_(), alpha=learning_rate)
    exp_avg.lerp_(gradient, 1 - betas[1])


def newest_share(run: Run, step: int) -> float:
    """Return the share of the iterate of step `step` (from 0) in the average. Iterates weigh by their squared learning rates, which
    rise within the warm-up and then stay."""

    def factor_at(step: int) -> float:
        return run.known_recipe.factor_at(step, run.steps, run.warmup_steps, run.final_share)

    warmup = run.warmup_steps
    count = (
        round(factor_at(min(step, warmup - 1)) * warmup) if warmup else 0
    )  # the last rate of the warm-up, in its units
    total = count * (count + 1) * (2 * count + 1) / 6 / warmup**2 if warmup else 0.0
    total += max(0, step - warmup + 1)
    return float(factor_at(step) ** 2 / total) if total else 0.0


def schedule_free(
    parameter: Tensor,
    gradient: Tensor,
    *,
    exp_avg_sq: Tensor,
    z_minus_y: Tensor,
    run: Run,
    step: int,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its memories in place, at the end of step `step` (from 0). The last step of `run` sets it to x."""
    beta, beta_sq = run.betas
    share = newest_share(run, step)
    exp_avg_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
    divisor = exp_avg_sq.div(1 - beta_sq ** (step + 1)).sqrt_().add_(run.epsilon)
    way = divisor.reciprocal_().mul_(gradient).add_(parameter, alpha=weight_decay)
    parameter.add_(z_minus_y, alpha=share).sub_(way, alpha=learning_rate * (1 - beta * (1 - share)))
    z_minus_y.sub_(way, alpha=learning_rate * beta).mul_(1 - share)
    if step == run.steps - 1:
        parameter.add_(z_minus_y, alpha=1 - 1 / beta)
