"""The adapters that are loaded beside a span, and which of them the passes go through.

The model's own layers stay as they are. Each that some adapter changes has a hook, which adds what the chosen adapter has for it:
so an adapter costs its own two small products, and a pass without one a look at each of these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from swarmnode.compute.model.adapters.adapter_file import Lora
from swarmnode.errors import ErrorCode, ProtocolError

NOTHING: Mapping[str, Lora] = {}


class SpanAdapters:
    """By name. Used from the compute thread only: a hook that comes in the middle of a pass would break it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loaded: dict[str, Mapping[str, Lora]] = {}
        self._hooked: set[str] = set()
        self._chosen: Mapping[str, Lora] = NOTHING

    def __repr__(self) -> str:
        return f"<SpanAdapters {', '.join(self._loaded) or 'none'}>"

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def add(self, name: str, loras: Mapping[str, Lora]) -> None:
        """Have an adapter, by the names of the layers that it changes here."""
        self._loaded[name] = loras
        for module in loras.keys() - self._hooked:
            self._model.get_submodule(module).register_forward_hook(partial(self._add, module))
            self._hooked.add(module)

    def remove(self, name: str) -> None:
        """Let it go. An unknown one is no error."""
        self._loaded.pop(name, None)
        self._chosen = NOTHING

    def clear(self) -> None:
        """Let all go."""
        self._loaded.clear()
        self._chosen = NOTHING

    def choose(self, name: str) -> None:
        """From now on passes go through this one; "" is the model alone. Raises ProtocolError where it is not loaded."""
        if not name:
            self._chosen = NOTHING
        elif name in self._loaded:
            self._chosen = self._loaded[name]
        else:
            raise ProtocolError("the adapter is not loaded", code=ErrorCode.INTERNAL)

    def _add(self, module: str, _layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        lora = self._chosen.get(module)
        return None if lora is None else lora.add(inputs[0], y)
