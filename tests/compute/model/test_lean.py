"""What is left out while models are built comes back as itself for everybody else."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH = """
import sys
from swarmnode.compute.model.lean import lean
with lean():
    import torch
"""
NAMES = """
with lean():
    import torch.distributed.tensor as tensor
    import sympy as named
    from torch.fx.experimental import symbolic_shapes
    from torch.distributed.fsdp import FullyShardedDataParallel
"""


def run(program: str) -> str:
    """In a process of its own: imports cannot be undone."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BUILDS = """
with lean():
    from transformers import LlamaConfig
    from swarmnode.compute.model.family import family_of
    from swarmnode.compute.model.selfcheck import check_family
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    check_family(family_of(LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=4)))
left_out = ("sympy", "torch._dynamo", "torch.distributed.fsdp", "scipy.optimize")
print([name for name in left_out if name in sys.modules])
"""
BEFORE = """
print(isinstance(4, named.Integer), "sympy.core" in sys.modules)
number = named.Integer(4)
print(number, isinstance(number, named.Integer), isinstance(4, named.Integer), named.Integer.is_integer)
class Twice(named.Function):
    @classmethod
    def eval(cls, x):
        return 2 * x
print(Twice(3), type(Twice).__name__)
print(symbolic_shapes.expect_true(True), symbolic_shapes.sym_and(True, False), symbolic_shapes.is_nested_int(3))
"""
AFTERWARDS = """
import sympy, torch.fx.experimental.symbolic_shapes as shapes
from torch.distributed.fsdp import FullyShardedDataParallel as Real
print(sympy.Integer(3) + 4, sympy.oo == named.oo, hasattr(shapes, "ShapeEnv"))
print(isinstance(torch.nn.Linear(1, 1), FullyShardedDataParallel))
function = torch.compile(lambda x: x * 2, backend="eager", dynamic=True)
print(function(torch.ones(3)).sum().item(), issubclass(type("Mine", (Real,), {}), Real))
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    return run(TORCH + BUILDS + NAMES + BEFORE + AFTERWARDS).splitlines()


def test_building_a_model_imports_neither_sympy_nor_the_compiler(said: list[str]) -> None:
    assert said[0] == "[]"


def test_a_late_thing_is_checked_for_called_looked_into_and_derived_from(said: list[str]) -> None:
    assert said[1:5] == ["False False", "4 True False True", "6 FunctionClass", "True False False"]


def test_afterwards_everybody_gets_the_real_ones(said: list[str]) -> None:
    assert said[5:] == ["7 True True", "False", "6.0 True"]
