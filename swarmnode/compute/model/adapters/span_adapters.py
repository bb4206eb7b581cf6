"""The adapters that are loaded beside a span, and the choice among them for a pass.

The model's own layers are not changed. Each layer that some adapter changes has a hook that adds the chosen adapter's product.
So an adapter costs its own two small products, and a pass without an adapter only a look-up at each of these layers.
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
    """The loaded adapters of a span, by name. Used only from the compute thread: a hook added within a pass would break it."""

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
        """Add an adapter. `loras` holds its matrices by the names of the layers that it changes here."""
        self._loaded[name] = loras
        for module in loras.keys() - self._hooked:
            self._model.get_submodule(module).register_forward_hook(partial(self._add, module))
            self._hooked.add(module)

    def remove(self, name: str) -> None:
        """Unload the adapter `name`; does nothing if it is not loaded."""
        self._loaded.pop(name, None)
        self._chosen = NOTHING

    def clear(self) -> None:
        """Unload all adapters."""
        self._loaded.clear()
        self._chosen = NOTHING

    def choose(self, name: str) -> None:
        """Send passes through the adapter `name` from now on; "" is the model alone. Raises ProtocolError if it is not loaded."""
        if not name:
            self._chosen = NOTHING
        elif name in self._loaded:
            self._chosen = self._loaded[name]
        else:
            raise ProtocolError("the adapter is not loaded", code=ErrorCode.INTERNAL)

    def _add(self, module: str, _layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        lora = self._chosen.get(module)
        return None if lora is None else lora.add(inputs[0], y)
