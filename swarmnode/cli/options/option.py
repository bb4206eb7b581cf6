"""Options of commands, each defined once: as a field of a frozen settings class, or as a parameter of one command.

The field says the flag, the key in a file, the check and the help; the command gets the settings, checked and typed:

    @dataclass(frozen=True)
    class Lent:
        memory_bytes: int | None = option(None, "Memory to lend.", "--memory", metavar="SIZE", parse=parse_bytes)

    @command
    def fit(lent: Lent) -> None: ...

A command that takes some of a class's options names them, in the order of its help: `Annotated[Lent, "memory_bytes"]`. One with
other defaults than the class has gives them as an instance: `lent: Lent = Lent(memory_bytes=...)`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from swarmnode.errors import UsageError

T = TypeVar("T")
_KEY = "option"  # in a field's metadata: its Definition, or the class of the settings in it


@dataclasses.dataclass(frozen=True)
class Definition:
    """An option or argument: `text` is its default as a person types it, `parse(text, flag)` makes the value out of a text, and
    `show` is typer's function that describes the parameter, `typed` the type of the text."""

    show: Callable[..., Any]
    text: Any
    flags: tuple[str, ...]
    typed: Any
    parse: Callable[[Any, str], Any] | None
    details: Mapping[str, Any]

    def parameter(self, name: str) -> inspect.Parameter:
        """Describe the parameter to typer."""
        flags = () if self.show is typer.Argument else self.flags or (self.flag(name),)
        shown = self.show(self.text, *flags, **self.details)
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=self.typed)

    def read(self, name: str, text: Any) -> Any:
        """Return the value of what was typed for the parameter of this name. Raises UsageError if it has none."""
        return text if self.parse is None else self.parse(text, self.flag(name))

    def flag(self, name: str) -> str:
        """Return the flag: without one of its own, the parameter's name."""
        return self.flags[0] if self.flags else f"--{name.replace('_', '-')}"


def option(default: Any, help_text: str = "", *flags: str, choices: Sequence[str] = (), **details: Any) -> Any:
    """Define an option. Without `flags` its name is its flag; `choices` are all that may be typed.

    Args:
        default: the value where nothing else is typed than `text`; `...` has it required.
        text: the default as it is typed, and as the help shows it.
        typed: the type of what is typed; by default that of `text`.
        parse: makes the value of what is typed, and its flag. Raises UsageError.
        factory: makes the default.
        details: typer's keywords.
    """
    if choices:
        details = {"metavar": "|".join(choices), "parse": one_of(choices), **details}
    return _field(typer.Option, default, flags, help=help_text or None, **details)


def argument(default: Any, help_text: str, **details: Any) -> Any:
    """Define an argument, by the same keywords."""
    return _field(typer.Argument, default, (), help=help_text, **details)


def settings(cls: type) -> Any:
    """A field that holds settings of another class, whose options stand at this place."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: cls}, kw_only=True)


def _field(
    show: Callable[..., Any],
    default: Any,
    flags: tuple[str, ...],
    *,
    text: Any = None,
    typed: Any = None,
    parse: Callable[[Any, str], Any] | None = None,
    factory: Callable[[], Any] | None = None,
    **details: Any,
) -> Any:
    if text is None:
        text = "" if default is None and typed is None else [] if default == () else default
    if typed is None:
        typed = list[str] if isinstance(text, list) else str if text is ... else type(text)
    if factory is None and default == []:
        factory = list
    made = {"default_factory": factory} if factory is not None else {} if default is ... else {"default": default}
    definition = Definition(show, text, flags, typed, parse, details)
    return dataclasses.field(**made, metadata={_KEY: definition}, kw_only=True)  # type: ignore[call-overload]


def one_of(choices: Sequence[str]) -> Callable[[str, str], str]:
    """Return a check that a text is one of these."""
    told = f"it is {' or '.join(choices)}" if len(choices) == 2 else f"it is one of {', '.join(choices)}"

    def check(text: str, flag: str) -> str:
        if text not in choices:
            raise UsageError(f"{flag} {text}: {told}")
        return text

    return check


def definitions(cls: type, base: object = None) -> dict[str, Definition]:
    """Return the definitions of a settings class by the names of their fields, with defaults as `base` has them."""
    found: dict[str, Definition] = {}
    for field in dataclasses.fields(cls):
        entry = field.metadata[_KEY]
        if not isinstance(entry, Definition):
            found |= definitions(entry, base and getattr(base, field.name))
        elif base is None or getattr(base, field.name) == _default(field):
            found[field.name] = entry
        else:
            found[field.name] = dataclasses.replace(entry, text=getattr(base, field.name))
    return found


def build(cls: type[T], typed: Mapping[str, Any], base: T | None = None) -> T:
    """Build settings of what was typed, by the names of their fields; the rest is as in `base`. Raises UsageError."""
    known, given = definitions(cls, base), dict[str, Any]()
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a settings class is a dataclass
        if field.name not in known:
            inner = field.metadata[_KEY]
            given[field.name] = build(inner, typed, base and getattr(base, field.name))
        elif field.name in typed and typed[field.name] != known[field.name].text:
            given[field.name] = known[field.name].read(field.name, typed[field.name])
    return cls(**given) if base is None else dataclasses.replace(base, **given)  # type: ignore[type-var]


def of_same_names(cls: type[T], source: object, **more: Any) -> T:
    """Build a `cls` of those of its fields that `source` has, too, and of `more`."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a config is a dataclass
    found = {name: getattr(source, name, dataclasses.MISSING) for name in names if name not in more}
    return cls(**{name: value for name, value in found.items() if value is not dataclasses.MISSING}, **more)


def taking_settings(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function as typer takes it: with a parameter for each option of its settings, which it still gets whole."""
    shown: list[inspect.Parameter] = []
    readers: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    parameters = inspect.signature(function).parameters
    hints = _hints(
        function, [name for name, each in parameters.items() if not isinstance(each.default, dataclasses.Field)]
    )
    for name, parameter in parameters.items():
        if isinstance(parameter.default, dataclasses.Field):
            shown.append(parameter.default.metadata[_KEY].parameter(name))
            readers[name] = functools.partial(_value, parameter.default, name)
            continue
        cls, *names = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if dataclasses.is_dataclass(cls) and isinstance(cls, type):
            base = None if parameter.default is parameter.empty else parameter.default
            known = definitions(cls, base)
            chosen = names or [*known]
            shown += [known[each].parameter(each) for each in chosen]
            readers[name] = functools.partial(_settings, cls, base, chosen)
        else:
            shown.append(parameter.replace(annotation=cls, kind=parameter.KEYWORD_ONLY))
            readers[name] = operator.itemgetter(name)

    @functools.wraps(function)
    def taking(**typed: Any) -> T:
        return function(**{name: read(typed) for name, read in readers.items()})

    taking.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    taking.__annotations__ = {each.name: each.annotation for each in shown}
    return taking


def _hints(function: Callable[..., Any], names: Sequence[str]) -> dict[str, Any]:
    """Evaluate these parameters' annotations; others may name types that are imported for type checkers only."""
    annotations = {name: function.__annotations__[name] for name in names}
    holder: Any = types.SimpleNamespace(__annotations__=annotations)
    return get_type_hints(holder, function.__globals__, include_extras=True)


def _value(field: Any, name: str, typed: Mapping[str, Any]) -> Any:
    definition = field.metadata[_KEY]
    return _default(field) if typed[name] == definition.text else definition.read(name, typed[name])


def _settings(cls: type[T], base: T | None, names: Sequence[str], typed: Mapping[str, Any]) -> T:
    return build(cls, {name: typed[name] for name in names}, base)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
