"""The tree of commands, made of one table. A command is imported when it is used, since importing one takes half of the time that
importing all takes. Its --help shows the options that most people need; --help-all shows all of them by topic."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from swarmnode.terminal.console import fail, say

ROOM = "swarmnode.cli"
HELP = ("-h", "--help", "--help-all")
ALL = "swarmnode.help_all"  # key in a context's meta: --help-all was given
MOST_OPTIONS = 10  # of a command without a choice of its own in the table
OPTIONS = "Options"
KINDS = {
    "str": " TEXT",
    "path": " PATH",
    "int": " N",
    "int range": " N",
    "float": " X",
    "float range": " X",
    "list[str]": "",
}
# Click's class, or typer's own copy of it: the base class of typer's public exception.
WrongUsage: Any = typer.BadParameter.__bases__[0]


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a usage error inside the context into one line on standard error and typer.Exit."""
    try:
        yield
    except WrongUsage as error:
        message = error.format_message()
        if "\n" in message:  # the help, if no command was given
            raise
        command = "swarmnode" if error.ctx is None else error.ctx.command_path
        similar = getattr(error, "possibilities", None) or re.findall(r"Did you mean (.*)\?$", message)
        message = re.sub(r"\.? (\(Possible options: |Did you mean ).*", "", message).rstrip(".")
        advice = f"did you mean {' or '.join(similar)}? See" if similar else "see"
        fail(f"{message}; {advice} {command} --help", error.exit_code)


class CommandPlace(NamedTuple):
    """Location of a command: a function in a `module` of this room, by default with the name of the command's last word.

    `shown` are the options of its --help, without dashes; empty for all. `settings` are further keywords for typer. Without a
    module the command only leads to those of two words that begin with it, and `about` says what they do.
    """

    module: str = ""
    function: str = ""
    shown: str = ""
    about: str = ""
    settings: Mapping[str, Any] = {}


class CommandTable(NamedTuple):
    """All commands of the program, by groups and names of one or two words.

    `first` are the names on the first screen. `renamed` holds older spellings with the new ones, `synonyms` other spellings that
    stay, `advice` a sentence for words of other programs, and `topics` the headings of --help-all with the options below them.
    """

    groups: Mapping[str, Mapping[str, CommandPlace]]
    first: Sequence[str]
    renamed: Mapping[str, str]
    synonyms: Mapping[str, str]
    advice: Mapping[str, str]
    topics: Mapping[str, str]


class CommandWithTopics(TyperCommand):
    """Command whose --help shows the options in `shown`, and whose --help-all shows all of them below the headings in `topics`.
    `tree` are all commands of the program."""

    shown: Sequence[str] = ()
    topics: Mapping[str, str] = {}
    tree: Mapping[str, Any] = {}

    @property
    def inner(self) -> list[str]:
        """Names of the commands of two words that begin with this one's name."""
        return [name for name in self.tree if name.startswith(f"{self.name} ")]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; for completion without arguments, if the next word may be that of another command."""
        found = super().get_params(ctx)
        return [
            each for each in found if each.param_type_name == "option" or not (ctx.resilient_parsing and self.inner)
        ]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without the second pair of brackets that some versions of typer put."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*)\}|^\[(\[.*\])\]", r"\1\2", piece).removesuffix("...") for piece in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does; with --help, if that shows a choice of the options, only the first paragraph and example."""
        paragraphs = (self.help or "").split("\n\n")
        if self.shown and not ctx.meta.get(ALL):
            paragraphs = [paragraphs[0], *[each for each in paragraphs if each.startswith("Example")][:1]]
        for each in paragraphs:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(each)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options and the commands that begin with this one's name."""
        shows_all = ctx.meta.get(ALL, False)
        parameters: list[Any] = self.params
        options = [each for each in parameters if each.param_type_name == "option" and not each.hidden]
        topics = self.topics if shows_all and len(options) > MOST_OPTIONS else {}
        headings = {name: topic for topic, names in topics.items() for name in names.split()}
        own = f"@{(self.name or '').split()[-1]}"
        sections: dict[str, list[Any]] = {heading: [] for heading in ("Arguments", *topics, OPTIONS)}
        for each in parameters:
            if each.param_type_name == "argument":
                sections["Arguments"].append(_record(each, ctx))
            elif each in options and (shows_all or not self.shown or key_of(each) in self.shown):
                heading = headings.get(key_of(each) + own) or headings.get(key_of(each), OPTIONS)
                sections[heading].append(_record(each, ctx))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if more := len(options) + len(sections["Arguments"]) - sum(map(len, sections.values())):
            formatter.write(f"\n{ctx.command_path} --help-all shows {more} more options.\n")
        if self.inner:
            write_commands("Commands", {name: self.tree[name] for name in self.inner}, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return completions: options, and the second words of commands that begin with this one's name."""
        own = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-") or not self.inner:
            return own
        group = TyperGroup(commands={name.split()[1]: self.tree[name] for name in self.inner})
        return [*group.shell_complete(type(ctx)(group, parent=ctx), incomplete), *own]


class CommandPrefix(CommandWithTopics):
    """First word of commands of two words, without a deed of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse --help. Without it, print the help to standard error and end with exit code 2."""
        if not args and not ctx.resilient_parsing:
            say(ctx.get_help(), err=True)
            ctx.exit(2)
        return list(super().parse_args(ctx, args))


def _record(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return the two columns of a parameter's help. With --help, they are without further flags, bounds and variables."""
    name, told = parameter.get_help_record(ctx)
    for kind, word in KINDS.items():
        name = name.replace(f" <{kind}>", "" if parameter.param_type_name == "argument" else word)
    if ctx.meta.get(ALL) or parameter.param_type_name == "argument":
        return name, told
    name = re.sub(r"(--[\w-]+), --[\w-]+", r"\1", name)
    return name, re.sub(r"  \[\]", "", re.sub(r"env var: \w+(; )?|(; )?[\d.]*(<=)?x(<=|>=)[\d.]+", "", told))


def key_of(option: Any) -> str:
    """Return the name of an option in the table: its first flag without dashes."""
    return str(option.opts[0]).lstrip("-")


def write_commands(heading: str, commands: Mapping[str, Any], formatter: Any) -> None:
    """Write a section with one line for each command: the first sentence of its help."""
    with formatter.section(heading):
        formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in commands.items()])


class LateCommands(Mapping[str, Any]):
    """Mapping of click's commands by their names, imported on access, in the order of the table."""

    def __init__(self, table: CommandTable) -> None:
        self._topics = table.topics
        self._places = {name: place for group in table.groups.values() for name, place in group.items()}
        self._built: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<LateCommands, {len(self._built)} of {len(self)} imported>"

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            place = self._places[name]
            if place.module:
                function = getattr(
                    importlib.import_module(f"{ROOM}.{place.module}"), place.function or name.split()[-1]
                )
                alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
                alone.command(name, **{"cls": CommandWithTopics, **place.settings})(function)
                built: Any = typer.main.get_group(alone).commands[name]
            else:
                built = CommandPrefix(name, help=place.about, rich_markup_mode=None)
            built.shown, built.topics, built.tree = place.shown.split(), self._topics, self
            self._built[name] = built
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class CommandTree(TyperGroup):
    """All commands of the program. A subclass gives the `table`."""

    table: CommandTable

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LateCommands(self.table)  # type: ignore[assignment]  # no command is added later

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the options before the command's name; report a usage error in one line."""
        with in_one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, which parses the options after its name; report a usage error in one line."""
        with in_one_line():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the program's name. Old spellings become new ones, and help may be asked for at any place."""
        before = args[: args.index("--")] if "--" in args else args
        if self._matching(args[:-1]) == " ".join(args[:-1]) and args[1:] and args[-1] == "help":  # `run help`
            before = [*args[:-1], "--help"]
        flags = [word for word in before if word in HELP]
        if ctx.resilient_parsing or (not flags and before[:1] != ["help"]):
            return list(super().parse_args(ctx, self._renamed(args, tells=not ctx.resilient_parsing)))
        ctx.meta[ALL] = HELP[-1] in flags
        words = [word for word in before if not word.startswith("-")]
        if before[:1] == ["help"]:
            words = [word for word in words if word != "help"]
            if len(words) == 1 and words[0] in self.table.groups:
                formatter = ctx.make_formatter()
                self._write_group(words[0], formatter)
                say(formatter.getvalue().strip())
                ctx.exit()
        words = self._renamed(words, tells=True)
        name = self._matching(words)
        return list(super().parse_args(ctx, [*name.split(), "--help"] if name or not words else words))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the command that `args` begin with, the command, and its arguments. A word that is none ends the
        program with advice and exit code 2."""
        name = self._matching(args)
        rest = args[len(name.split()) :]
        if name:
            command: Any = self.commands[name]
            # The word behind a command may be meant for the second word of another one.
            is_misspelled = bool(command.inner and rest) and not rest[0].startswith("-")
            if is_misspelled and not isinstance(command, CommandPrefix):
                takes_words = any(each.param_type_name == "argument" for each in command.params)
                close = difflib.get_close_matches(f"{name} {rest[0]}", command.inner, cutoff=0.8)
                is_misspelled = not takes_words and bool(close)
            if ctx.resilient_parsing or not is_misspelled:
                return name, command, rest
        if ctx.resilient_parsing:
            return None, None, args
        # A sentence about words that are no command, with the command that is probably meant
        typed = " ".join(args[: 2 if name else 1])
        other = {**self.table.renamed, **self.table.synonyms}
        meant = {name.split()[-1]: name for name in self.commands} | {name: name for name in self.commands} | other
        advice = {word: f"did you mean `swarmnode {name}`?" for word, name in meant.items()}
        advice |= {word: told for words, told in self.table.advice.items() for word in words.split()}
        near = difflib.get_close_matches(typed.lower(), advice, 1)
        return fail(
            f"there is no command {typed!r}; {advice[near[0]] if near else '`swarmnode help` lists the commands'}", 2
        )

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the first words of all commands."""
        return [name for name in self.commands if " " not in name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the first screen; with --help-all, all groups and options."""
        formatter.write(f"{self.help}\n")
        if ctx.meta.get(ALL):
            for group in self.table.groups:
                self._write_group(group, formatter)
            self.format_options(ctx, formatter)
            return
        write_commands("First steps", {name: self.commands[name] for name in self.table.first}, formatter)
        with formatter.section("More, by swarmnode help GROUP"):
            more = [name for name in self.list_commands(ctx) if name not in self.table.first]
            rows = (
                (group, ", ".join(name for name in more if name in names)) for group, names in self.table.groups.items()
            )
            formatter.write_dl(list(rows))
        formatter.write("\nswarmnode COMMAND --help explains a command; swarmnode --help-all lists all.\n")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: `format_help` has written the commands."""

    def _write_group(self, group: str, formatter: Any) -> None:
        write_commands(group, {name: self.commands[name] for name in self.table.groups[group]}, formatter)

    def _matching(self, words: Sequence[str]) -> str:
        """Return the longest name of a command that `words` begin with; empty if there is none."""
        names = (" ".join(words[:count]) for count in (2, 1))
        return next((name for name in names if name in self.commands), "")

    def _renamed(self, args: Sequence[str], *, tells: bool) -> list[str]:
        """Return `args` with the new spelling if they begin with another one; with `tells`, say so for one that ends."""
        for count in (2, 1):
            old = " ".join(args[:count])
            new = self.table.renamed.get(old)
            if new and tells:
                say(
                    f"`swarmnode {old}` is now `swarmnode {new}`; the old spelling ends with the next version.",
                    err=True,
                )
            if new := new or self.table.synonyms.get(old):
                return [*new.split(), *args[count:]]
        return list(args)
