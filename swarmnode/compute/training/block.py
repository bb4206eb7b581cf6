"""Block: the trained part of one layer - parameters, running statistics, the step's sums of both, and the optimiser's memory.

Running statistics (buffers of batch norms) are changed in place by every forward pass in training mode. Here each pass starts from
the step's values, and only its change is kept, under its microbatch. When the step ends, the statistics move by the mean of
all microbatches' changes: as one machine's would with the whole batch. So order, replays and recomputations have no effect, and
replicas, which sum changes as they sum gradients, keep equal statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swarmnode.compute.training import update_rules
from swarmnode.compute.training.optimizer import Optimizer, clip_factor
from swarmnode.errors import CheckpointError, NotFinite, UsageError
from swarmnode.swarm.records.run import Averaging, Run, is_projection

EMA = "ema"  # begins the names of the averages in a state
Changes = dict[str, Tensor]
"""Changes of running statistics by one pass, by name"""


class OuterOptimizer:
    """Outer optimiser: the values that all replicas agreed on last (`anchor_N`), and the momentum, in float32.

    It changes only at a commit. The first `trained` elements are parameters; the statistics behind them are averaged.
    """

    def __init__(self, values_N: Tensor, trained: int, averaging: Averaging) -> None:
        self.learning_rate = averaging.outer_lr
        self.momentum = averaging.outer_momentum
        self.anchor_N = values_N
        self.velocity_N = torch.zeros(trained, device=values_N.device)

    def __repr__(self) -> str:
        return f"OuterOptimizer({len(self.velocity_N)} parameters, lr {self.learning_rate}, momentum {self.momentum})"

    def way(self, values_N: Tensor) -> Tensor:
        """Return the pseudo-gradient: the way of a replica since the last averaging. Written into `values_N`."""
        return torch.sub(self.anchor_N, values_N, out=values_N)

    def update(self, mean_way_N: Tensor) -> Tensor:
        """Take a step along the mean pseudo-gradient of the replicas. Returns the values that all go on with."""
        trained = len(self.velocity_N)
        mean_way_P = mean_way_N[:trained]
        self.velocity_N.mul_(self.momentum).add_(mean_way_P)
        self.anchor_N[:trained].sub_(mean_way_P, alpha=self.learning_rate)
        self.anchor_N[:trained].sub_(self.velocity_N, alpha=self.learning_rate * self.momentum)
        self.anchor_N[trained:].sub_(mean_way_N[trained:])
        return self.anchor_N


class Block:
    """Parameters and statistics of one layer, or the parameters that the first and the last layer share.

    `sums_N` (float32) strings together the gradients of the parameters, names in order, then the changes of the
    statistics, names in order; `shapes` are theirs. It is one permanent piece of memory: gradients that come and go among
    activations leave a heap that cannot shrink (measured: 1.8 instead of 1.3 times the memory).

    `ema` is the exponential moving average of the trained parameters, by name, if the recipe has one. As in torch's
    `swa_utils.AveragedModel`, the first step sets it to the parameters. Runs of held-out data take it in their place.

    A block that `follows` is a copy of a block on another device of this node: it is never updated, and so has no optimiser.
    """

    def __init__(
        self,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        run: Run,
        device: torch.device,
        *,
        follows: bool = False,
    ) -> None:
        wrong = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
        if wrong:
            raise UsageError(
                f"{wrong[0]} is not float32: training needs all parameters "
                "in it (autocast is for speed); call module.float()"
            )
        self.number = number
        self.run = run
        self.parameters = dict(sorted(parameters.items()))
        for name, parameter in self.parameters.items():  # of a frozen one no gradient is computed: its sums stay zero
            parameter.requires_grad_(not run.treat(name, parameter.dim()).frozen)
        self.buffers = dict(sorted(buffers.items()))
        self.statistics = {name: buffer for name, buffer in self.buffers.items() if buffer.dtype != torch.bool}
        watches = run.optimizer == "eva" and number >= 0
        self.watched = [name for name, one in self.parameters.items() if watches and update_rules.is_watched(name, one)]
        self.shapes = [tensor.shape for tensor in (*self.parameters.values(), *self.statistics.values())]
        self.shapes += [shape for name in self.watched for shape in update_rules.shapes_of(self.parameters[name])]
        self.optimizer = Optimizer({} if follows else self.parameters, run)
        averaged = self.parameters if run.known_recipe.ema else {}
        self.ema = {name: one.detach().clone() for name, one in averaged.items() if one.requires_grad}
        self._sizes = [shape.numel() for shape in self.shapes]
        self.sums_N = torch.zeros(sum(self._sizes), device=device)
        self._gradient = slice(0, sum(self._sizes[: len(self.parameters)]))
        parts = torch.split(self.sums_N, self._sizes)
        views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        for parameter, view in zip(self.parameters.values(), views, strict=False):
            parameter.grad = view  # autograd adds to it in place
        summed = (*self.statistics, *(key for name in self.watched for key in update_rules.keys_of(name)))
        self._changes = dict(zip(summed, views[len(self.parameters) :], strict=True))
        apart = run.averaging.every > 1 and not follows
        self.outer = (
            OuterOptimizer(self._write_values(torch.zeros_like(self.sums_N)), self._gradient.stop, run.averaging)
            if apart
            else None
        )

    def __repr__(self) -> str:
        return f"Block({self.number}, {self._gradient.stop / 1e6:.1f} M parameters, {len(self.buffers)} buffers)"

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimiser's memory, of the parameters' average, and of the outer optimiser's, if replicas update apart."""
        slots = [tensor for named in self.optimizer.slots.values() for tensor in named.values()]
        outer = [] if self.outer is None else [self.outer.anchor_N, self.outer.velocity_N]
        return sum(tensor.nbytes for tensor in (*slots, *self.ema.values(), *outer))

    @property
    def gradient_N(self) -> Tensor:
        """Step's sum of the parameters' gradients: a reference."""
        return self.sums_N[self._gradient]

    # -- statistics

    def save(self) -> Changes:
        """Return copies of the running statistics, to restore them after a pass."""
        return {name: buffer.clone() for name, buffer in self.statistics.items()}

    def restore(self, saved: Changes) -> Changes:
        """Restore the statistics from `saved`. Returns the changes that the pass between had made."""
        changes = {name: (self.statistics[name] - value).float() for name, value in saved.items()}
        for name, value in saved.items():
            self.statistics[name].data.copy_(value)  # data: autograd must not see it as a change of kept graphs
        return changes

    def count(self, changes: Changes) -> None:
        """Add the changes of one microbatch to the sums."""
        for name, change in changes.items():
            self._changes[name] += change

    # -- the end of a step

    def squared_norm(self, sums_N: Tensor, step: int) -> float:
        """Return the squared norm of the gradient in `sums_N`: own sums, or those of all replicas; with Eva, its product with
        the updates of `step`.

        Raises NotFinite if it is NaN or infinite.
        """
        gradient_N = sums_N[self._gradient]
        norm = torch.linalg.vector_norm(gradient_N).item()
        if not math.isfinite(norm) and gradient_N.isfinite().all():  # squares overflow before float64 holds them
            norm = torch.linalg.vector_norm(gradient_N, dtype=torch.float64).item()
        if not math.isfinite(norm):
            unit = max(self.number, 0)
            raise NotFinite(
                f"the gradient of layer {unit} holds NaN or infinity; lower --lr or --clip, or check the data",
                unit=unit,
            )
        if self.run.optimizer == "eva":
            return self.optimizer.kl_square(step, *self._parts(sums_N))
        return float(norm * norm)

    def _parts(self, sums_N: Tensor) -> tuple[dict[str, Tensor], dict[str, update_rules.LayerMeans]]:
        """Return views of the gradients in `sums_N` by parameter, and the step's means of the watched layers by weight."""
        parts = torch.split(sums_N, self._sizes)
        views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        gradients = dict(zip(self.parameters, views, strict=False))
        means = iter(views[len(self.parameters) + len(self.statistics) :])
        return gradients, {
            name: update_rules.LayerMeans(next(means) / self.run.microbatches, next(means)) for name in self.watched
        }

    @torch.no_grad()
    def update(self, step: int, norm: float) -> None:
        """End step `step` with the sums, clipped by the `norm` of the whole model; then set the sums to zero."""
        if self.run.optimizer == "eva":
            self.optimizer.precondition(step, norm, self._parts(self.sums_N)[1])
        else:
            self.gradient_N.mul_(clip_factor(self.run.clip, norm))
        self.optimizer.update(step)
        self._retract()
        for name, average in self.ema.items():
            average.lerp_(self.parameters[name], 1 - self.run.known_recipe.ema if step else 1.0)
        for name, buffer in self.statistics.items():
            mean = self._changes[name] / self.run.microbatches
            buffer.data.add_(mean if buffer.is_floating_point() else mean.round().to(buffer.dtype))
        self.sums_N.zero_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average of the parameters in their place in the `with` block; do nothing if there is none."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, average in self.ema.items():
            parameter = self.parameters[name]
            self.ema[name], parameter.data = parameter.data, average

    # -- copies on several devices of one node

    def hand_over(self, leader: Block) -> None:
        """Add the step's sums to those of `leader`, the same block on another device, and clear them here."""
        leader.sums_N += self.sums_N.to(leader.sums_N.device)
        self.sums_N.zero_()

    @torch.no_grad()
    def follow(self, leader: Block) -> None:
        """Copy parameters and statistics from `leader`, the same block on another device."""
        values = leader.state()
        for name, tensor in self.state().items():
            tensor.data.copy_(values[name])  # data: a served model may share it

    # -- replicas that update apart

    def way(self, *, out_N: Tensor) -> None:
        """Write the pseudo-gradient into `out_N`, which is as long as `sums_N` and is averaged like it."""
        assert self.outer is not None
        self._write_values(out_N)
        self.outer.way(out_N)

    def agree(self) -> None:
        """Record the present values as those of all replicas: pseudo-gradients start from here."""
        if self.outer is not None:
            self._write_values(self.outer.anchor_N)

    @torch.no_grad()
    def average(self, mean_way_N: Tensor) -> None:
        """Set the block's values to those that the outer optimiser computes from the replicas' mean pseudo-gradient
        `mean_way_N`."""
        assert self.outer is not None
        parts = torch.split(self.outer.update(mean_way_N), self._sizes)
        for tensor, part in zip((*self.parameters.values(), *self.statistics.values()), parts, strict=True):
            value = part.view(tensor.shape)
            tensor.data.copy_(value if tensor.is_floating_point() else value.round())
        if self._retract():
            self.agree()

    def _retract(self) -> bool:
        """Make a bottleneck's projections orthonormal again. Returns whether there are any."""
        projections = [one for name, one in self.parameters.items() if is_projection(name) and one.requires_grad]
        for projection in projections:
            update_rules.retract(projection)
        return bool(projections)

    @torch.no_grad()
    def _write_values(self, out_N: Tensor) -> Tensor:
        """Write parameters and statistics, strung together, into `out_N`, which is as long as `sums_N`. Returns it."""
        tensors = (*self.parameters.values(), *self.statistics.values())
        parts = torch.split(out_N, self._sizes)
        for tensor, part in zip(tensors, parts, strict=False):
            part.copy_(tensor.reshape(-1))
        return out_N

    # -- state

    def state(self) -> dict[str, Tensor]:
        """Return the training state of the block (parameters, buffers, the optimiser's memory) by name: references, not copies."""
        tensors: dict[str, Tensor] = {f"parameter/{name}": value.detach() for name, value in self.parameters.items()}
        tensors.update({f"buffer/{name}": buffer for name, buffer in self.buffers.items()})
        for slot, named in self.optimizer.slots.items():
            tensors.update({f"{self.run.optimizer}/{slot}/{name}": tensor for name, tensor in named.items()})
        tensors.update({f"{EMA}/{name}": average for name, average in self.ema.items()})
        if self.outer is not None:
            tensors.update({"outer/anchor": self.outer.anchor_N, "outer/velocity": self.outer.velocity_N})
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state. Raises CheckpointError, and changes nothing, if names, shapes or dtypes differ, or it holds NaN."""
        own = self.state()
        if own.keys() != tensors.keys():
            name = min(own.keys() ^ tensors.keys())
            missing = "lacks" if name in own else "has an unknown"
            raise CheckpointError(
                f"the training state of layer {self.number} {missing} tensor {name}: it belongs to another training"
            )
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(own[name].shape)}"
                raise CheckpointError(
                    f"the training state of layer {self.number} has {name} "
                    f"of shape {shapes}: it belongs to another training"
                )
            if tensor.dtype != own[name].dtype:
                raise CheckpointError(
                    f"the training state of layer {self.number} has {name} in "
                    f"{tensor.dtype}, not {own[name].dtype}: it belongs to another training"
                )
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise CheckpointError(f"the training state of layer {self.number} has NaN in {name}; fetch it again")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
