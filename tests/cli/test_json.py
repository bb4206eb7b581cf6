"""`--json` of all commands: standard output holds JSON alone, one value a line, also if the command fails or a library prints."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.testing
from rich.console import Console

from swarmnode.errors import UsageError
from swarmnode.terminal.console import JSON, command, print_json, say, standard_output
from tests.cli.command import invoke
from tests.cli.test_help import commands
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.llama import save_llama
from tests.swarm.storage.test_joined_swarms import FRIENDS

HAS = {
    words: command for words, command in commands().items() if any("--json" in option.opts for option in command.params)
}
# Arguments with which commands work that need no other machine.
GOOD: dict[str, tuple[str, ...]] = {
    "join": (FRIENDS, "--as", "again"),
    "models": (),
    "adapter block": ("00" * 32,),
    "adapter unblock": ("00" * 32,),
    "ps": (),
    "config": (),
    "models weights": (),
    "models prune": (),
    "fit": ("tiny.gguf", "--memory", "1GB", "--device", "cpu"),
    "create": ("new", "--model", "model", "--open"),
    "quantize": ("tiny.gguf", "out.gguf", "--format", "q8_0", "--allow-requantize"),
    "invite": ("own.swarm",),
    "leave": ("again",),
}
MAY_WORK = {"adapter block", "adapter unblock"}  # with any word


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    save_llama(folder / "model", 2, vocab_size=64, hidden_size=64, intermediate_size=512)
    save_llama_gguf(folder / "tiny.gguf")
    made = invoke("create", "own", "--model", "model", home=folder / "home", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder


def values(printed: str) -> list[Any]:
    """Return the JSON values of the lines of an output. Raises ValueError if there is anything else."""
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_printed_parses(place: Path, name: str) -> None:
    if name not in HAS:
        pytest.skip("this command is called otherwise now")
    done = invoke(*name.split(), *GOOD[name], "--json", home=place / "home", cwd=place)
    assert done.returncode in (0, 1), done.stderr  # 1: nothing was found to do
    assert values(done.stdout) or done.returncode == 1, done.stderr


@pytest.mark.parametrize("name", HAS)
def test_a_command_that_fails_prints_its_sentence_elsewhere(place: Path, name: str) -> None:
    """Swarms, files and nodes that are not here, a file of another kind, and an option that there is not."""
    taken = [each for each in HAS[name].params if each.param_type_name == "argument"]
    for words in (["no-such-thing"] * len(taken), ["own.owner"] * len(taken), ["--nonsense"]):
        if words and name not in MAY_WORK:
            done = invoke(*name.split(), *words, "--json", home=place / "nobody", cwd=place)
            assert done.returncode and done.stderr.strip(), "a failure has a sentence"
            assert all(isinstance(value, dict) for value in values(done.stdout)), "events until then, if any"


@pytest.mark.parametrize("name", HAS)
def test_all_of_them_ask_for_json_by_the_same_name(name: str) -> None:
    """`command` keeps standard output for JSON by this name."""
    assert {each.name for each in HAS[name].params if "--json" in each.opts} == {"as_json"}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_texts_of_people_and_libraries_go_to_standard_error(as_json: bool, fails: bool) -> None:
    talkative = typer.Typer()

    @talkative.command()
    @command
    def talk(as_json: bool = JSON) -> None:
        """Say something in every way that there is."""
        say("for people")
        print("of a library")
        sys.stdout.write("of another one\n")
        typer.echo("by typer")
        Console().print("by rich")
        logging.getLogger("other").warning("logged")
        warnings.warn("warned", UserWarning, stacklevel=1)
        if as_json:
            print_json({"a": 1})
            print("again", file=sys.stdout)
            print_json([2])
            assert standard_output() is not sys.stdout
        if fails:
            raise UsageError("what is wrong")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = typer.testing.CliRunner().invoke(talkative, ["--json"] if as_json else [])
    assert done.exit_code == (2 if fails else 0)
    texts = ("for people", "of a library", "of another one", "by typer", "by rich")
    if as_json:
        assert values(done.stdout) == [{"a": 1}, [2]] and all(text in done.stderr for text in (*texts, "again"))
    else:
        assert all(text in done.stdout for text in texts)
    assert ("what is wrong" in done.stderr) == fails and standard_output() is sys.stdout
