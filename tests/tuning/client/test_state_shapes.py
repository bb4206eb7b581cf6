"""The owner knows which tensors a state has: a file with others is the fault of the hop that gave it."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from swarmnode.compute.executor import Executor
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import METHODS, AdapterRecipe
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.tuning.client.route_opener import LocalOpener
from swarmnode.tuning.client.state_shapes import StateShapes
from tests.net.virtual import in_virtual_time
from tests.tiny import TinyModel


@in_virtual_time
async def test_a_state_is_taken_only_with_the_adapters_own_tensors(tmp_path: Path) -> None:
    span = load_span(Checkpoint(TinyModel.save(tmp_path / "tiny", layers=2).folder), 0, 4, check=False)
    executor = Executor()
    for method in METHODS:
        recipe = AdapterRecipe(method=method, rank=2, alpha=4.0, prompt_tokens=3)
        shapes = StateShapes.of(span.family, recipe)
        route = await LocalOpener(span, executor, recipe, (1, 8)).open(None)
        for gradients in (False, True):
            files = (await route.fetch(0, gradients=gradients)).layers
            for unit, raw in files.items():
                shapes.check(unit, raw, 0, gradients=gradients, peer="hop")
                assert len(raw) <= shapes.most_bytes(unit)
        await route.close()
        if method == "lora":
            state = (await (await LocalOpener(span, executor, recipe, (1, 8)).open(None)).fetch(0)).layers[1]
            refuse_lies(shapes, safetensors.torch.load(state))
    await executor.close()


def refuse_lies(shapes: StateShapes, honest: dict[str, Tensor]) -> None:
    name = next(name for name in honest if name.startswith("exp_avg_sq/"))
    tensor = honest[name]
    lies: dict[str, tuple[dict[str, Tensor], ErrorCode]] = {
        "no tensor": ({key: one for key, one in honest.items() if key != name}, ErrorCode.MALFORMED),
        "one more": ({**honest, "weight/more": tensor.clone()}, ErrorCode.MALFORMED),
        "another shape": ({**honest, name: tensor[:1].clone()}, ErrorCode.MALFORMED),
        "another dtype": ({**honest, name: tensor.half()}, ErrorCode.MALFORMED),
        "squares below zero": ({**honest, name: tensor - 1}, ErrorCode.MALFORMED),
        "another step": ({**honest, "step": torch.tensor(7)}, ErrorCode.MALFORMED),
        "infinity": ({**honest, name: tensor + torch.inf}, ErrorCode.NOT_FINITE),
    }
    for what, (tensors, code) in lies.items():
        with pytest.raises(ProtocolError) as caught:
            shapes.check(1, safetensors.torch.save(tensors), 0, gradients=False, peer="liar")
        assert (caught.value.code, caught.value.peer) == (code, "liar"), what
    odd = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    for raw in (b"", bytes(16), len(odd).to_bytes(8, "little") + odd + b"\0"):
        with pytest.raises(ProtocolError, match="no state"):
            shapes.check(1, raw, 0, gradients=False, peer="liar")
