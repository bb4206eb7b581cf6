"""Source of a founder's module: a Python factory "package.module:function", or an exported program "file.pt2"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from swarmnode.compute.graph.archive import load_program
from swarmnode.compute.graph.exporting.export import Example, check_example, export_module
from swarmnode.compute.graph.exporting.gradient_check import check_gradients
from swarmnode.compute.graph.exporting.reader import Exported, source_of
from swarmnode.errors import UsageError

PROGRAM_SUFFIX = ".pt2"


def export_source(spec: str, *, trains: bool = True, check: bool = False) -> Exported:
    """Export the module that `spec` names, to be trained or to be served.

    Runs the code of a factory, but none of an exported program. With `check`, compares the gradients of the example batch with the
    module's own. Raises UsageError.
    """
    any_batch = True
    if spec.endswith(PROGRAM_SUFFIX):
        program, batch = load_program(Path(spec))
        any_batch = program.any_batch
        module: nn.Module = program
        example: Example = dict(zip(program.inputs, batch, strict=True))
    else:
        module, example = load_factory(spec)
    exported = export_module(module, example, any_batch=any_batch, trains=trains)
    remarks = check_gradients(module.train(), *check_example(module, example), exported) if check else ()
    return replace(exported, remarks=remarks)


def module_name(spec: str) -> str:
    """Return a name for the module that `spec` names: its factory's, or its file's."""
    return spec.rpartition(":")[2] if ":" in spec else Path(spec).stem


def load_factory(spec: str) -> tuple[nn.Module, Example]:
    """Call the function that `spec` names and return its module and example batch.

    Modules are found as Python finds them, and in the working folder.
    Raises UsageError if there is no such function, it fails, or it returns something else.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UsageError(
            f"{spec!r} is no factory: write package.module:function, or the name of a {PROGRAM_SUFFIX} file"
        )
    try:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        factory = getattr(importlib.import_module(module_name), function_name, None)
        if not callable(factory):
            raise UsageError(f"the module {module_name} has no function {function_name}; check its name")
        made = factory()
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{spec}: there is no module {error.name} here; is it installed, or in this folder?"
        ) from error
    except Exception as error:  # the user's own code
        raise UsageError(f"{spec} failed in {source_of(error)}: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{spec} must return a pair: a torch.nn.Module, and an example batch")
    module, example = made
    values = example.values() if isinstance(example, Mapping) else example
    if not isinstance(example, Mapping | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise UsageError(
            f"{spec} must return an example batch that is a tuple of tensors, or a dict of them by argument name"
        )
    return module, example
