"""Options of commands, each defined once: as a field of a frozen settings class, or as a parameter of one command.

The field defines the flag, the key in a file, the check and the help. The command gets the settings, checked and typed:

    @dataclass(frozen=True)
    class Lent:
        memory_bytes: int | None = option(None, "Memory to lend.", "--memory", metavar="SIZE", parse=parse_bytes)

    @command
    def fit(lent: Lent) -> None: ...

A command that takes some of a class's options names them, in the order of its help: `Annotated[Lent, "memory_bytes nice"]`.
A command with other defaults than the class's gives them as an instance: `lent: Lent = Lent(memory_bytes=...)`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from swarmnode.errors import UsageError

T = TypeVar("T")
_KEY = "option"  # in a field's metadata: its Definition, or the settings in it


@dataclasses.dataclass(frozen=True)
class Definition:
    """Definition of an option or argument. `show` is typer's function that describes the parameter, `text` the default as a user
    types it, `typed` the type of the text, and `parse(text, flag)` converts the text to the value."""

    show: Callable[..., Any]
    text: Any
    flags: tuple[str, ...]
    typed: Any
    parse: Callable[[Any, str], Any] | None
    details: Mapping[str, Any]

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the option as a keyword parameter called `name`, in the form that typer reads."""
        flags = () if self.show is typer.Argument else self.flags or (self.flag(name),)
        shown = self.show(self.text, *flags, **self.details)
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=self.typed)

    def read(self, name: str, text: Any) -> Any:
        """Return the value of `text`, which was typed for the parameter `name`. Raises UsageError if the text is not valid."""
        return text if self.parse is None else self.parse(text, self.flag(name))

    def flag(self, name: str) -> str:
        """Return the option's flag; if it has none of its own, the one that follows from the parameter's `name`."""
        return self.flags[0] if self.flags else f"--{name.replace('_', '-')}"


def file_key(flag: str) -> str:
    """Return the key of a flag in a TOML file."""
    return flag.lstrip("-").replace("-", "_")


def option(default: Any, help_text: str = "", *flags: str, choices: Sequence[str] = (), **details: Any) -> Any:
    """Define an option. Without `flags`, its flag follows from its name; `choices` are the only texts that are accepted.

    Args:
        default: The default as it is typed and as the help shows it; `...` makes the option required.
        text: The typed text of a default of None; the help does not show it.
        typed: The type of the typed text; by default that of `text`.
        parse: Converts the typed text and the flag to the value. Raises UsageError.
        factory: Makes the default value when it is needed.
        details: Further keywords for typer.
    """
    if choices:
        details = {"metavar": "|".join(choices), "parse": one_of(choices), **details}
    return _field(typer.Option, default, flags, help=help_text or None, **details)


def argument(default: Any, help_text: str, **details: Any) -> Any:
    """Define a positional argument of a command; the keywords are those of `option`."""
    return _field(typer.Argument, default, (), help=help_text, **details)


def path_option(help_text: str, *flags: str, metavar: str = "FILE", **details: Any) -> Any:
    """Define an option whose value is a path, or None if it is not given."""
    return option(None, help_text, *flags, typed=Path, metavar=metavar, **details)


def settings(cls: type, names: str = "", base: Any = None) -> Any:
    """Define a field that holds settings of `cls`. Its options are all of the class's, or those in `names`, with the defaults of
    `base`."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: _Inner(cls, names.split(), base)}, kw_only=True)


class _Inner(NamedTuple):
    cls: type
    names: Sequence[str]
    base: Any

    def definitions(self) -> dict[str, Definition]:
        found = definitions(self.cls, self.base)
        return {name: found[name] for name in self.names or found}

    def value(self, typed: Mapping[str, Any]) -> Any:
        return build(self.cls, {name: typed[name] for name in self.definitions() if name in typed}, self.base)


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
    if text is not None:
        details = {"show_default": False, **details}
    else:
        text = "" if default is None and typed is None else default
    if typed is None:
        typed = list[str] if isinstance(text, list) else str if text is ... else type(text)
    if default == []:
        factory = list if parse is None else functools.partial(parse, [], "")
    elif isinstance(default, str) and default and parse is not None:
        default = parse(default, "")
    made = {"default_factory": factory} if factory is not None else {} if default is ... else {"default": default}
    definition = Definition(show, text, flags, typed, parse, details)
    return dataclasses.field(**made, metadata={_KEY: definition}, kw_only=True)  # type: ignore[call-overload]


def one_of(choices: Sequence[str]) -> Callable[[str, str], str]:
    """Return a function that returns a text in `choices` unchanged and raises UsageError for any other."""
    told = f"choose {' or '.join(choices)}" if len(choices) == 2 else f"choose one of {', '.join(choices)}"

    def check(text: str, flag: str) -> str:
        if text not in choices:
            raise UsageError(f"{flag} {text}: {told}")
        return text

    return check


def definitions(cls: type, base: Any = None) -> dict[str, Definition]:
    """Return the definitions of a settings class, by the names of its fields, with the defaults of `base`."""
    return _definitions(dataclasses.fields(cls), base)


def build(cls: type[T], typed: Mapping[str, Any], base: T | None = None) -> T:
    """Build settings of `cls` from the texts in `typed`, by the names of the fields; the rest is as in `base`. Raises
    UsageError."""
    given = _typed_values(dataclasses.fields(cls), typed, base)  # type: ignore[arg-type]  # a settings class is a dataclass
    return cls(**given) if base is None else dataclasses.replace(base, **given)  # type: ignore[type-var]


def _definitions(fields: Sequence[Any], base: Any = None) -> dict[str, Definition]:
    by_name: dict[str, Definition] = {}
    for field in fields:
        name, entry = field.name, field.metadata[_KEY]
        if isinstance(entry, _Inner):
            new = entry.definitions()
        elif base is None or getattr(base, name) == _default(field):
            new = {name: entry}
        else:
            new = {name: dataclasses.replace(entry, text=getattr(base, name))}
        if twice := by_name.keys() & new.keys():
            raise TypeError(f"two options of one name: {', '.join(twice)}")
        by_name |= new
    return by_name


def _typed_values(fields: Sequence[Any], typed: Mapping[str, Any], base: Any = None) -> dict[str, Any]:
    """Return the values of the fields whose typed text differs from the default. Raises UsageError."""
    known, given = _definitions(fields, base), dict[str, Any]()
    for name, entry in ((field.name, field.metadata[_KEY]) for field in fields):
        if isinstance(entry, _Inner):
            given[name] = entry.value(typed)
        elif name in typed and typed[name] != known[name].text:
            given[name] = entry.read(name, typed[name])
    return given


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def of_same_names(cls: type[T], source: object, **more: Any) -> T:
    """Build a `cls` from its fields that `source` has as attributes, and from `more`."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a config is a dataclass
    found = {name: getattr(source, name, dataclasses.MISSING) for name in names if name not in more}
    return cls(**{name: value for name, value in found.items() if value is not dataclasses.MISSING}, **more)


def taking_settings(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function` in the form that typer needs: with one parameter per option. The function itself still gets whole
    settings."""
    fields, plain = list[Any](), list[inspect.Parameter]()
    for name, parameter in inspect.signature(function).parameters.items():
        field = parameter.default
        if not isinstance(field, dataclasses.Field):
            holder: Any = types.SimpleNamespace(__annotations__={name: function.__annotations__[name]})
            hint = get_type_hints(holder, function.__globals__, include_extras=True)[name]
            cls, *names = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if not dataclasses.is_dataclass(cls):
                plain.append(parameter.replace(annotation=cls))
                continue
            field = settings(cls, " ".join(names), None if field is parameter.empty else field)  # type: ignore[arg-type]
        fields.append(copy.copy(field))
        fields[-1].name = name
    shown = [*plain, *(definition.parameter(name) for name, definition in _definitions(fields).items())]

    @functools.wraps(function)
    def taking(**typed: Any) -> T:
        values = {each.name: typed[each.name] for each in plain} | _typed_values(fields, typed)
        usual = {field.name: _default(field) for field in fields if field.name not in values}
        return function(**values, **usual)

    taking.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    taking.__annotations__ = {each.name: each.annotation for each in shown}
    return taking
