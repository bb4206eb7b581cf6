"""Estimates for a causal language model's units, from its class and config alone: one training pass on fake tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from swarmnode.compute.graph.costs.estimate import UnitEstimate, storage_of
from swarmnode.compute.graph.costs.work import ComputeWork, WorkCounter, bytes_of
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS
from swarmnode.compute.training.losses.next_token import next_token_loss
from swarmnode.errors import CheckpointError

with lean():
    from transformers.initialization import no_init_weights


def estimate_span(checkpoint: Checkpoint, batch: int, sequence: int) -> list[UnitEstimate]:
    """Estimate all units (embedding, layers, head) for a microbatch in float32.

    Raises CheckpointError for models whose own code needs real numbers, as some mixtures of experts do.
    """
    try:
        return _Watch(checkpoint, batch, sequence).run()
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{checkpoint.path}: the work of its layers cannot be estimated: {error}; use another model"
        ) from error


class _Watch:
    """Record of the work done up to each point where the pass, or its gradient, crosses the boundary of a layer."""

    def __init__(self, checkpoint: Checkpoint, batch: int, sequence: int) -> None:
        self.family = checkpoint.family
        self.batch, self.sequence = batch, sequence
        self.counter = WorkCounter()
        self.forward: list[ComputeWork] = []  # work up to the begin of unit k, for k > 0, and up to the end
        self.backward: dict[int, ComputeWork] = {}  # work up to where the gradient leaves unit k
        self.kept: list[dict[Any, int]] = [{}]  # bytes by storage, by unit
        self.hidden_bytes = 0

    def run(self) -> list[UnitEstimate]:
        with FakeTensorMode():
            with no_init_weights():
                model = self.family.model_class(copy.deepcopy(self.family.config)).train()
            for number, layer in enumerate(model.get_submodule(self.family.stack_name)):
                layer.register_forward_pre_hook(self._entering(number + 1), with_kwargs=True)
            layer.register_forward_hook(self._leaving)
            ids_BT = torch.zeros(self.batch, self.sequence, dtype=torch.int64)
            held = {storage_of(parameter) for parameter in model.parameters()}
            with self.counter, saved_tensors_hooks(lambda tensor: self._keep(tensor, held), lambda tensor: tensor):
                loss = next_token_loss(model(input_ids=ids_BT, use_cache=False).logits, ids_BT)
                self.forward.append(self.counter.work)
                loss.backward()
            return self._collect(model, bytes_of(ids_BT))

    def _entering(self, unit: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            self._cross(unit, args[0] if args else kwargs["hidden_states"])

        return hook

    def _leaving(self, _: Any, __: Any, output: Any) -> None:
        self._cross(self.family.units - 1, output[0] if isinstance(output, tuple) else output)

    def _cross(self, unit: int, hidden_BTH: Tensor) -> None:
        self.forward.append(self.counter.work)
        self.kept.append({})
        self.hidden_bytes = bytes_of(hidden_BTH)

        def note(_: Tensor) -> None:
            self.backward[unit] = self.counter.work

        hidden_BTH.register_hook(note)

    def _keep(self, tensor: Tensor, held: set[Any]) -> Tensor:
        if storage_of(tensor) not in held:
            self.kept[-1][storage_of(tensor)] = bytes_of(tensor)
        return tensor

    def _collect(self, model: Any, ids_bytes: int) -> list[UnitEstimate]:
        units = self.family.units
        parameter_bytes = [0] * units
        for name, parameter in model.named_parameters():
            for unit in self.family.units_of_tensor(name):
                parameter_bytes[unit] += bytes_of(parameter)
        begins = [ComputeWork(), *self.forward]
        ends = {**self.backward, units: self.forward[-1], 0: self.counter.work}
        return [
            UnitEstimate(
                forward=begins[unit + 1] - begins[unit],
                backward=ends[unit] - ends[unit + 1],
                activation_bytes=sum(self.kept[unit].values()),
                parameter_bytes=parameter_bytes[unit],
                boundary_bytes=self.hidden_bytes if unit else ids_bytes,
            )
            for unit in range(units)
        ]
