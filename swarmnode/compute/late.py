"""Modules that are imported when something of them is first used, not when it is named in an import.

`from package import Thing` on a late module gives a stand-in for the thing. Calling it, or asking it for an attribute, imports
the real one; an `isinstance` check does so only where somebody has imported the real one already, since there can be no
instances before.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class LateModule(types.ModuleType):
    """Stands in `sys.modules` for a module whose things are late."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} is late, and has no {name} yet")
        module = sys.modules.get(self.__name__)
        if module is not None and not isinstance(module, LateModule):
            return getattr(module, name)  # somebody has imported the real one since
        thing = _LateThing(name, (), {"__module__": self.__name__})
        setattr(self, name, thing)
        return thing


class _LateThing(type):
    """A class as which the real thing is known, whatever it is: it can be checked for, called, looked into and derived from."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, namespace)
        real = tuple(_real(base) if isinstance(base, _LateThing) else base for base in bases)
        return types.new_class(name, real, exec_body=lambda body: body.update(namespace))

    def __instancecheck__(cls, instance: Any) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or isinstance(module, LateModule):
            return False
        return isinstance(instance, getattr(module, cls.__name__))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} is late, and has no {name} yet")
        return getattr(_real(cls), name)


def _real(thing: _LateThing) -> Any:
    """The real thing. Late modules, its own and those that it imports, give way for good."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, LateModule):
            del sys.modules[name]
    return getattr(importlib.import_module(thing.__module__), thing.__name__)
