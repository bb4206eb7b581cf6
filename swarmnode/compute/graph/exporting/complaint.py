"""Reasons why a module cannot be exported, for its author: the operator, the line of the code, and a remedy."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
DATA_DEPENDENT = "data-dependent"
REMEDY = "use torch.where or a mask in place of if, for, indexing by a mask and .item()"


class FailedCall(TorchFunctionMode):
    """Recorder of the innermost torch function that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function. Record its name if it raises."""
        try:
            return function(*args, **(kwargs or {}))
        except Exception:
            self.name = self.name or resolve_name(function) or getattr(function, "__name__", str(function))
            raise


def complaint(error: Exception, failed: FailedCall) -> str:
    """Return the text for the user about an error of torch.export: the operator, the line and the reason."""
    reason = str(error).strip().partition("\n")[0].partition(" (unhinted")[0] or type(error).__name__
    operator = f"the operator {failed.name}" if failed.name else "an operation"
    text = f"the module cannot be exported: {operator} in {source_of(error)} failed: {reason.rstrip('.')}"
    if DATA_DEPENDENT in reason:
        text += f". Which operators run must not depend on the values of tensors: {REMEDY}"
    return text


def source_of(error: Exception) -> str:
    """Return file, line and source text of the last frame in the user's own code; a fixed text if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    if not own:
        return "code that torch does not name"
    return f"{own[-1].filename}, line {own[-1].lineno}: `{own[-1].line}`"


def is_own(file: str) -> bool:
    """Return whether the code in `file` is the user's own, not torch's or that of swarmnode's export."""
    return not file.startswith((_TORCH, _HERE, "<"))


def source_of_node(node: Any) -> str:
    """Return file, line and text of the module's own code behind a node of torch.fx."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    places = [number for number, line in enumerate(lines) if line.startswith("File ") and _TORCH not in line]
    if not places:
        return "code that torch does not name"
    place = places[-1]
    file = lines[place].removeprefix("File ").replace('"', "").partition(", in ")[0]
    code = lines[place + 1] if place + 1 < len(lines) else ""
    return f"{file}: `{code}`"
