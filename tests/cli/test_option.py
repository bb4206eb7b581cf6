"""Options that are defined once: what a command gets of what is typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import typer
import typer.testing

from swarmnode.config import parse_bytes
from swarmnode.terminal.console import command
from swarmnode.terminal.option import argument, build, of_same_names, option, settings

if TYPE_CHECKING:
    from pathlib import Path

FRUIT = ("apple", "pear", "plum")


@dataclass(frozen=True)
class Inner:
    """Options that stand within others."""

    depth: int = option(1, "How deep.")


@dataclass(frozen=True)
class Basket:
    """One option of each kind."""

    size_bytes: int | None = option(None, "How large.", "--size", metavar="SIZE", parse=parse_bytes)
    fruit: str = option("apple", "Which.", choices=FRUIT)
    inner: Inner = settings(Inner)
    half: float = option("50%", parse=lambda text, _flag: float(text[:-1]) / 100)
    limit: int | None = option(None, "At most.", text=0)
    names: tuple[str, ...] = option([], "Who.", "--name", parse=lambda texts, _flag: tuple(texts))


@dataclass(frozen=True)
class Box:
    """A settings class that knows no options."""

    size_bytes: int | None = None
    half: float = 0.0
    lid: bool = False


def run(function: Any, *arguments: str) -> Any:
    """What the command got, and what it printed."""
    app = typer.Typer()
    app.command()(function)
    return typer.testing.CliRunner().invoke(app, arguments)


def test_what_is_not_typed_is_as_the_class_has_it() -> None:
    assert build(Basket, {}) == Basket() == Basket(size_bytes=None, fruit="apple", half=0.5, limit=None, names=())
    assert build(Basket, {"size_bytes": "", "limit": 0, "half": "50%", "names": []}) == Basket()


def test_what_is_typed_is_read() -> None:
    typed = {"size_bytes": "6GB", "fruit": "plum", "depth": 3, "half": "25%", "limit": 9, "names": ["a", "b"]}
    basket = build(Basket, typed)
    assert basket == Basket(
        size_bytes=6 * 10**9, fruit="plum", inner=Inner(depth=3), half=0.25, limit=9, names=("a", "b")
    )
    assert of_same_names(Box, basket, lid=True) == Box(6 * 10**9, 0.25, True)


def test_a_command_gets_settings() -> None:
    got: list[Any] = []

    @command
    def carry(
        *,
        where: str = argument(..., "Where to."),
        basket: Basket,
        folder: Path | None = option(None, "A type that is imported for type checkers only.", typed=str),
    ) -> None:
        got.extend((where, basket, folder))

    done = run(carry, "home", "--size", "1MB", "--fruit", "pear", "--name", "a", "--depth", "2")
    assert done.exit_code == 0, done.output
    assert got == ["home", Basket(size_bytes=10**6, fruit="pear", inner=Inner(depth=2), names=("a",)), None]


def test_defaults_and_order_may_be_a_commands_own() -> None:
    got: list[Basket] = []

    @command
    def carry(*, basket: Annotated[Basket, "limit fruit"] = Basket(fruit="plum")) -> None:
        got.append(basket)

    told = run(carry, "--help").output
    assert "[default: plum]" in told and told.index("--limit") < told.index("--fruit") and "--size" not in told
    assert run(carry, "--limit", "4").exit_code == 0 and got == [Basket(fruit="plum", limit=4)]
    assert run(carry, "--fruit", "apple").exit_code == 0 and got[1] == Basket()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fruit", "fig"), "--fruit fig: choose one of apple, pear, plum"),
        (("--size", "6"), "--size 6: the unit is missing"),
    ],
)
def test_what_cannot_be_names_its_flag(arguments: tuple[str, ...], says: str) -> None:
    @command
    def carry(*, basket: Basket) -> None:
        pytest.fail("it runs")

    done = run(carry, *arguments)
    assert done.exit_code == 2 and f"error: {says}" in done.stderr


def test_an_option_that_is_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(KeyError):

        @command
        def carry(*, basket: Annotated[Basket, "colour"]) -> None:
            pytest.fail("it runs")


def test_two_options_of_one_name_are_an_error() -> None:
    with pytest.raises(TypeError, match="depth"):

        @command
        def carry(*, basket: Basket, inner: Inner) -> None:
            pytest.fail("it runs")
