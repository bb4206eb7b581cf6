"""transformers without the parts that a node does not use: torch's compiler, distributed checkpoints, sympy, scipy's optimisers.

transformers' modelling code imports them all, for decorators, for `isinstance` checks and for one loss. In a process that serves
they cost 100 MiB and two seconds (measured: docs/decisions/lean-imports.md). While `lean()` lasts, their imports find stand-ins.
Afterwards an import finds the real module as always, which takes over the work left to its stand-in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import Any

TRUTHS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")

Filling = Callable[["LateModule"], None]
"""Function that fills a new late module with names that need not wait for the real module"""


class LateModule(types.ModuleType):
    """Stand-in for a module: any name in it is a stand-in, too, which imports the real object when it is called or looked into.

    The functions in `__put_right__` are called with the real module once it is executed.
    """

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
        """Execute the real module in this object, and replace the stand-ins that other modules hold.

        Raises any error of the import; the module then stays late.
        """
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
    """Stand-in for an object of unknown kind: it can be called, searched for attributes, derived from and used in `isinstance`.

    In an `except` clause it catches nothing: the real exception cannot have been raised before its module was imported.
    """

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
    """Import finder that provides late modules: those in `fillings` and their submodules, except `real`.

    It also lets the real module take the place of a late one, and calls the functions in `changes` with the modules of their names
    when these are imported.
    """

    def __init__(
        self,
        fillings: Mapping[str, Filling | None],
        real: Collection[str] = (),
        changes: Mapping[str, Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:
        self._fillings = fillings
        self._real = real
        self._changes = changes
        self._late: dict[str, LateModule] = {}
        self._users = 0
        self._gave_way = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have imports find late modules until all users have left this context. Modules already imported stay."""
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
        """Let all imports find the real modules until no user is left in `in_place`."""
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
        """Return the spec of a module that is or was late; None for other modules, so that other finders find them."""
        is_inner = fullname not in self._real and fullname.rpartition(".")[0] in self._late
        is_wanted = fullname in self._fillings or fullname in self._changes or is_inner
        if fullname not in self._late and not (self.are_importable and is_wanted):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and isinstance(spec.loader, SourceLoader):
            change = self._changes.get(fullname)
            spec.loader = _StandInLoader(self, spec.loader) if change is None else _ChangingLoader(spec.loader, change)
        return spec

    def create(self, name: str) -> LateModule:
        """Return the late module of this name: the same one until it becomes real."""
        module = self._late.get(name)
        if module is None:
            module = self._late[name] = LateModule(name)
            fill = self._fillings.get(name)
            if fill is not None:
                fill(module)
        return module

    def forget(self, name: str) -> None:
        """Forget a late module that became real."""
        del self._late[name]

    @property
    def are_importable(self) -> bool:
        """Whether imports find late modules now."""
        return self._users > 0 and not self._gave_way


class _StandInLoader(Loader):
    def __init__(self, stand_ins: StandIns, real: Loader) -> None:
        self.stand_ins = stand_ins
        self.real = real

    def create_module(self, spec: ModuleSpec) -> LateModule:
        return self.stand_ins.create(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        assert isinstance(module, LateModule)
        if not self.stand_ins.are_importable:  # else the module stays late
            module.become_real(self.real)
            self.stand_ins.forget(module.__name__)


class _ChangingLoader(Loader):
    def __init__(self, real: Loader, change: Callable[[Any], None]) -> None:
        self.real = real
        self.change = change

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.real.exec_module(module)
        self.change(module)


def _replace(names: dict[str, Any], real: Mapping[int, Any]) -> None:
    """Replace in `names` each object whose id is a key of `real`."""
    for name, thing in list(names.items()):
        if id(thing) in real:
            names[name] = real[id(thing)]


def _real(thing: _LateThing) -> Any:
    """Return the real object. All stand-ins give way, since modules that it imports may need real modules, too."""
    for finder in sys.meta_path:
        if isinstance(finder, StandIns):
            finder.give_way()
    return getattr(importlib.import_module(thing.__module__), thing.__name__)


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import and build models with the stand-ins in place. Usable as a decorator; modules already imported stay."""
    with STAND_INS.in_place():
        yield


def _list_models_late(utils: Any) -> None:
    """Make transformers read the sources of all its models for their names only when somebody asks for a name that it does not know
    otherwise. `utils` is its module `import_utils`.

    The package and its part `models` each read all 1,650 files at their import, for 0.6 s of CPU, though a process uses one family.
    """
    define, lazy = utils.define_import_structure, utils._LazyModule
    models = Path(utils.__file__).parent.parent / "models"

    class Unlisted(dict[Any, Any]):
        """Names of a package without those of the models. `place` has the arguments that list them."""

        def __init__(self, *place: Any) -> None:
            super().__init__({frozenset(): {}})
            self.place = place

    def define_late(module_path: Any, prefix: str | None = None) -> Any:
        folder = Path(module_path)
        is_all = (folder.parent if folder.name == "__init__.py" else folder) == models
        return Unlisted(module_path, prefix) if is_all else define(module_path, prefix)

    class ListedLate(lazy):  # type: ignore[misc, valid-type]
        """Package of transformers that lists its models when it is asked for a name that it lacks."""

        def __init__(self, name: str, file: str, names: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(name, file, names, *args, **kwargs)
            self._unlisted = None
            if isinstance(names, Unlisted):
                self._unlisted = names
                del self.__all__

        def __getattr__(self, name: str) -> Any:
            own = self.__dict__
            unlisted = own.get("_unlisted")
            known = ("_objects", "_object_missing_backend", "_class_to_module", "_modules")
            is_known = any(name in own[table] for table in known) or (name.startswith("__") and name != "__all__")
            place = Path(own["__file__"]).with_name(name)
            if unlisted is not None and not is_known and (place.is_dir() or place.with_suffix(".py").is_file()):
                return self._get_module(name)  # a part of it, as `from transformers.models import auto` asks for it
            if unlisted is not None and not is_known:
                self._unlisted = None
                listed = dict(define(*unlisted.place))
                listed[frozenset()] = {**listed.get(frozenset(), {}), **unlisted[frozenset()]}
                whole = vars(lazy(own["_name"], own["__file__"], listed))
                tables = ("_object_missing_backend", "_class_to_module", "_modules", "_import_structure", "__all__")
                own.update({table: whole[table] for table in tables})
                return getattr(self, name)
            return super().__getattr__(name)

    utils.define_import_structure, utils._LazyModule = define_late, ListedLate


def _fill_compiler(module: LateModule) -> None:
    """Fill torch's compiler with its decorators. They do nothing until the real compiler is imported."""

    def mark(decorator: str) -> Callable[[Any], Any]:
        """Return a decorator that returns its function unchanged, and marks it once the compiler is real."""

        def marked(function: Any) -> Any:
            module.__put_right__.append(lambda real: getattr(real, decorator)(function))
            return function

        return marked

    def disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            return lambda function: disable(function, *args, **kwargs)
        called = function

        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        def disable_for_compiler(real: Any) -> None:
            nonlocal called
            called = real.disable(function, *args, **kwargs)

        module.__put_right__.append(disable_for_compiler)
        return disabled

    vars(module).update(
        disable=disable,
        allow_in_graph=mark("allow_in_graph"),
        assume_constant_result=mark("assume_constant_result"),
    )


def _fill_symbols(module: LateModule) -> None:
    """Fill symbolic shapes with the questions about sizes that torch asks at each step on the meta device.

    For plain numbers the answers are simple. Symbolic sizes are left to the real module, which imports all of sympy.
    """

    def plain(name: str, answer: Callable[..., bool]) -> Callable[..., Any]:
        symbolic = getattr(module, name)
        return lambda *sizes: answer(*sizes) if _are_numbers(sizes) else symbolic(*sizes)

    answers: dict[str, Callable[..., bool]] = {name: lambda truth, *_skipped_frames: truth for name in TRUTHS}
    answers["sym_and"] = lambda *truths: all(truths)
    answers["sym_eq"] = lambda ours, theirs: ours == theirs
    answers["sym_or"] = lambda *truths: any(truths)
    answers["is_nested_int"] = lambda _size: False
    vars(module).update({name: plain(name, answer) for name, answer in answers.items()})


def _are_numbers(sizes: Any) -> bool:
    """Return whether `sizes` are numbers, booleans, or shapes of them."""
    return isinstance(sizes, int) or (isinstance(sizes, tuple) and all(map(_are_numbers, sizes)))


STAND_INS = StandIns(
    {
        "httpx._main": None,
        "scipy.optimize": None,
        "sympy": None,
        "torch._dynamo": _fill_compiler,
        "torch.distributed._composable.fsdp": None,
        "torch.distributed.checkpoint": None,
        "torch.distributed.fsdp": None,
        "torch.fx.experimental.symbolic_shapes": _fill_symbols,
        "trio": None,
    },
    real=["torch._dynamo._trace_wrapped_higher_order_op"],  # transformers' masks are made there
    changes={"transformers.utils.import_utils": _list_models_late},
)
