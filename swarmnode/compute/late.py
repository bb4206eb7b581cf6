"""Stand-ins for modules: an import names things of a module, and the module is imported when one of them is first used.

While `StandIns` are in place, importing one of their modules gives a `LateModule`. `from package import Thing` on it gives a
stand-in for the thing. Calling it, or asking it for an attribute, imports the real module; an `isinstance` check does so only
if somebody has imported the real one already, since there can be no instances before.

Afterwards no stand-in is left in `sys.modules` or in a package. What modules still hold of them is put right as soon as
somebody imports the real module: the late module itself becomes the real one, and names of things become the real things.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from typing import Any

Filling = Callable[["LateModule"], None]
"""Puts things into a new late module that need not wait for the real one."""


class LateModule(types.ModuleType):
    """Stand-in for a module whose things are late. Functions in `__put_right__` are called with the real one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__put_right__: list[Callable[[Any], None]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} is late, and has no {name} yet")
        thing = _LateThing(name, (Exception,), {"__module__": self.__name__})
        setattr(self, name, thing)
        return thing

    def become_real(self, loader: Loader) -> None:
        """Execute the real module in this object, and put right what other modules hold of it. Raises what importing raises;
        the module is late then as before."""
        assert self.__spec__ is not None
        put_right = self.__put_right__
        held = {name: thing for name, thing in vars(self).items() if isinstance(thing, _LateThing | types.FunctionType)}
        for name in ("__put_right__", *held):
            delattr(self, name)
        self.__spec__.loader = self.__loader__ = loader
        try:
            self.__class__ = types.ModuleType  # type: ignore[assignment]
            loader.exec_module(self)
        except BaseException:
            self.__class__ = LateModule
            vars(self).update(held, __put_right__=put_right)
            raise
        real = {id(thing): getattr(self, name, thing) for name, thing in held.items()}
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType):
                _replace(vars(module), real)
        for put in put_right:
            put(self)


class _LateThing(type):
    """A class as which the real thing is known, whatever it is: it can be checked for, called, looked into and derived from.
    Behind an `except` it catches nothing, as nobody raises the real thing before it is imported."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not any(isinstance(base, _LateThing) for base in bases):
            return super().__new__(cls, name, bases, namespace)
        real = tuple(_real(base) if isinstance(base, _LateThing) else base for base in bases)
        return types.new_class(name, real, exec_body=lambda body: body.update(namespace))

    def __instancecheck__(cls, instance: Any) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or isinstance(module, LateModule) or not hasattr(module, cls.__name__):
            return False
        return isinstance(instance, getattr(module, cls.__name__))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} is late, and has no {name} yet")
        return getattr(_real(cls), name)


class StandIns(MetaPathFinder):
    """Finder of late modules, of those in `fillings` and of what is in these, but for `real`. Once a module has been late, this
    is how the real one takes its place."""

    def __init__(self, fillings: Mapping[str, Filling | None], real: Collection[str] = ()) -> None:
        self._fillings = fillings
        self._real = real
        self._late: dict[str, LateModule] = {}
        self._users = 0
        self._gave_way = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have imports find late modules until all who asked for it are done. Modules that are imported already stay."""
        with self._lock:
            self._users += 1
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self.give_way()
                    self._gave_way = False

    def give_way(self) -> None:
        """Let all imports find the real modules, until nobody has these in place any more."""
        self._gave_way = True
        for name, module in list(self._late.items()):
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, child = name.rpartition(".")
            package = self._late.get(parent) or sys.modules.get(parent)
            if package is not None and vars(package).get(child) is module:
                delattr(package, child)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is, or was, late; None of others, which other finders find."""
        if fullname not in self._late and not (self._are_found() and self._is_late(fullname)):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and isinstance(spec.loader, SourceLoader):
            spec.loader = _StandInLoader(self, spec.loader)
        return spec

    def create(self, name: str) -> LateModule:
        """The late module of that name, the same for everybody until it becomes the real one."""
        module = self._late.get(name)
        if module is None:
            module = self._late[name] = LateModule(name)
            fill = self._fillings.get(name)
            if fill is not None:
                fill(module)
        return module

    def execute(self, module: LateModule, loader: Loader) -> None:
        """Leave a module late while these are in place, else make it the real one."""
        if not self._are_found():
            module.become_real(loader)
            del self._late[module.__name__]

    def _are_found(self) -> bool:
        return self._users > 0 and not self._gave_way

    def _is_late(self, name: str) -> bool:
        return name in self._fillings or (name not in self._real and name.rpartition(".")[0] in self._late)


class _StandInLoader(Loader):
    def __init__(self, stand_ins: StandIns, real: Loader) -> None:
        self.stand_ins = stand_ins
        self.real = real

    def create_module(self, spec: ModuleSpec) -> LateModule:
        return self.stand_ins.create(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        assert isinstance(module, LateModule)
        self.stand_ins.execute(module, self.real)


def _replace(names: dict[str, Any], real: Mapping[int, Any]) -> None:
    """Let names of things, which are given by their ids, be those of the real ones."""
    for name, thing in list(names.items()):
        if id(thing) in real:
            names[name] = real[id(thing)]


def _real(thing: _LateThing) -> Any:
    """The real thing. All stand-ins give way, as modules that it imports may need the real ones, too."""
    for finder in sys.meta_path:
        if isinstance(finder, StandIns):
            finder.give_way()
    return getattr(importlib.import_module(thing.__module__), thing.__name__)
