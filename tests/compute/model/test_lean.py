"""What is left out while models are built comes back as itself for everybody else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

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
    from swarmnode.compute.serving.loading import check_family
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


FORKS = """
import json, os, tempfile
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as printed:
        if (child := os.fork()) == 0:
            os.dup2(printed.fileno(), 1)
            exec(json.loads(line), globals())
            sys.exit()
        status = os.waitpid(child, 0)[1]
        printed.seek(0)
        print(json.dumps([status, printed.read().splitlines()]), flush=True)
"""


@pytest.fixture(scope="module")
def run_built() -> Iterator[Callable[[str], list[str]]]:
    """Return a function that runs a program in a process of its own, forked from one that has built a model, and returns the
    lines that both print."""
    command = [sys.executable, "-c", TORCH + BUILDS + FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as built:
        assert built.stdin is not None and built.stdout is not None
        requests, answers = built.stdin, built.stdout
        left_out = answers.readline().strip()

        def run_forked(program: str) -> list[str]:
            print(json.dumps(program), file=requests, flush=True)
            status, lines = json.loads(answers.readline())
            assert status == 0, lines
            return [left_out, *lines]

        yield run_forked


@pytest.fixture(scope="module")
def said(run_built: Callable[[str], list[str]]) -> list[str]:
    return run_built(NAMES + BEFORE + AFTERWARDS)


def test_building_a_model_imports_neither_sympy_nor_the_compiler(said: list[str]) -> None:
    assert said[0] == "[]"


def test_a_late_thing_is_checked_for_called_looked_into_and_derived_from(said: list[str]) -> None:
    assert said[1:5] == ["False False", "4 True False True", "6 FunctionClass", "True False False"]


def test_afterwards_everybody_gets_the_real_ones(said: list[str]) -> None:
    assert said[5:] == ["7 True True", "False", "6.0 True"]


HOLDERS = """
import importlib, sys, types
import torch
from swarmnode.compute.model.lean import LateModule
from swarmnode.compute.model.lean import STAND_INS

def held():
    ours = ("swarmnode.compute.model.lean", "swarmnode.compute.model.lean")
    spaces = {name: vars(module) for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)}
    return [
        f"{module}.{name}" for module, names in spaces.items() for name, thing in names.items()
        if type(thing) is LateModule or type(thing).__name__ == "_LateThing"
        or type(thing) is types.FunctionType and thing.__module__ in ours and not module.startswith(("swarmnode.", "__"))
        and name != "define_import_structure"  # lists models late, for the life of the process
    ]
"""
REAL = """
names = ["scipy.optimize", "sympy", "torch._dynamo", "torch.distributed._composable.fsdp", "torch.distributed.fsdp"]
names += ["torch.distributed.checkpoint.hf_storage", "torch.fx.experimental.symbolic_shapes", "trio", "httpx._main"]
for name in names:
    importlib.import_module(name)
print(held())
late = [name for name in sys.modules if name.startswith(tuple(f"{name}." for name in names))]
print([name for name in late if not hasattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])])
"""


def test_what_is_held_of_stand_ins_becomes_real_with_the_real_modules(run_built: Callable[[str], list[str]]) -> None:
    before, *afterwards = run_built(HOLDERS + "print(len(held()) > 0)" + REAL)[1:]
    assert before == "True" and afterwards == ["[]", "[]"]


def test_modules_imported_meanwhile_are_found_in_the_real_package() -> None:
    """accelerate failed of it: `torch._dynamo.utils` was imported, but no attribute of `torch._dynamo`."""
    imported = """
with lean():
    import torch._dynamo.config, torch._dynamo.utils as utils, torch._dynamo.eval_frame
print(utils.is_compile_supported("cpu"), torch._dynamo.utils is utils, torch._dynamo.config.suppress_errors)
"""
    assert run(TORCH + imported + HOLDERS + REAL).splitlines() == ["True True False", "[]", "[]"]


def test_what_the_stand_in_lacks_is_had_of_the_real_module() -> None:
    used = """
with lean():
    import sympy, torch._dynamo
    torch._dynamo.graph_break()
    from torch.utils.checkpoint import checkpoint
    print(checkpoint(lambda x: x * 2, torch.ones(1), use_reentrant=False).item())
    print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(), sympy.Integer(3) + 4)
"""
    assert run(TORCH + used + HOLDERS + REAL).splitlines() == ["2.0", "2.0 7", "[]", "[]"]


LISTED = """
import sys
from swarmnode.compute.model.lean import lean
with lean():
    import transformers
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig]
both = transformers, sys.modules["transformers.models"]
print([package._unlisted is None for package in both], hasattr(transformers, "__wrapped__"))
print(transformers.LlamaConfig is LlamaConfig, both[1].LlamaConfig is LlamaConfig)
from transformers import GPT2LMHeadModel, PreTrainedModel  # `*` would import every model of the list, 15 s long
names = transformers.__all__
print("GPT2LMHeadModel" in names, "PreTrainedModel" in names, "BertConfig" in dir(both[1]), hasattr(transformers, "NoSuchModel"))
print([package._unlisted is None for package in both], transformers.PreTrainedModel.__name__)
"""


def test_transformers_lists_its_models_when_it_is_asked_for_a_name_that_it_lacks() -> None:
    assert run(LISTED).splitlines() == [
        "[False, False] False",
        "True True",
        "True True True False",
        "[True, True] PreTrainedModel",
    ]


def test_nothing_is_left_behind_an_error() -> None:
    raised = """
import transformers, transformers.utils.import_utils as utils
read_names = utils.create_import_structure_from_path
try:
    with lean(), lean():
        import scipy.optimize, torch._dynamo
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as Guard
        print(utils.create_import_structure_from_path is read_names)
        try:
            raise ValueError
        except Guard:
            print("caught")
except ValueError:
    print(utils.create_import_structure_from_path is read_names, "torch._dynamo" in sys.modules)
    print("_dynamo" in vars(torch), "optimize" in vars(scipy), torch._dynamo.eval_frame.__name__)
"""
    assert run(TORCH + raised).splitlines() == ["False", "True False", "False False torch._dynamo.eval_frame"]


def test_decorators_for_the_compiler_take_effect_when_it_comes() -> None:
    decorated = """
with lean():
    disabled = torch.compiler.disable(lambda x: x + 1)
    constant = torch.compiler.assume_constant_result(lambda: 3)
    print(disabled(torch.ones(1)).item(), hasattr(constant, "_dynamo_marked_constant"))
print(torch.compile(lambda x: disabled(x) * constant(), backend="eager")(torch.ones(1)).item(), constant._dynamo_marked_constant)
try:
    torch.compile(lambda x: disabled(x), backend="eager", fullgraph=True)(torch.ones(1))
except torch._dynamo.exc.Unsupported:
    print("left alone")
"""
    assert run(TORCH + decorated).splitlines() == ["2.0 False", "6.0 True", "left alone"]


MODEL = """
from transformers import LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()
ids = torch.arange(6)[None]
"""
COMPILED = """
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    print(torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5))
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0)
    torch._dynamo.reset()
print(torch.compiler.is_compiling(), torch.compile(lambda x: x.sin() * 2, backend="eager")(torch.zeros(2)).sum().item())
"""
ACCELERATE = """
with lean():
    from transformers import Trainer  # imports parts of accelerate, which import parts of the compiler
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters()))
accelerator.backward(model(ids, labels=ids).loss)
optimizer.step()
compiled = torch.compile(accelerator.unwrap_model(model), backend="eager")
compiled(ids)
print(type(extract_model_from_parallel(compiled, keep_torch_compile=False)).__name__)
"""
PEFT = """
from peft import LoraConfig, get_peft_model
adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
adapted(ids, labels=ids).loss.backward()
print(all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name))
print(adapted.generate(input_ids=ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape)
"""


def test_a_model_compiles_in_a_process_that_has_built_one(run_built: Callable[[str], list[str]]) -> None:
    assert run_built(MODEL + COMPILED)[1:] == ["True"] * 4 + ["False 0.0"]


@pytest.mark.parametrize(
    ("package", "program", "expected"),
    [
        ("accelerate", ACCELERATE, ["LlamaForCausalLM"]),
        ("peft", PEFT, ["True", "torch.Size([1, 8])"]),
    ],
)
def test_other_libraries_work_in_a_process_that_has_built_a_model(
    package: str, program: str, expected: list[str], run_built: Callable[[str], list[str]]
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; docs/testing.md says how to have it for a run")
    assert run_built(MODEL + program)[1:] == expected
