"""Conversations: what the model is asked, turn by turn."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarmnode.cli.use.chat import Dialogue, TypedLines
from swarmnode.client.text_stream import GeneratedText
from swarmnode.client.tokenizer import ByteTokenizer, Turn
from swarmnode.client.tokenizer import Tokenizer as ModelTokenizer
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.serving.client.generation import GenerateOptions, Generation
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualSwarm

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
TURNS = [Turn("user", "hi"), Turn("assistant", "yes"), Turn("user", "why")]


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    """Every byte a token."""
    letters = {chr(code): code for code in range(33, 127)}
    characters = Tokenizer(models.BPE(vocab={**letters, "Ġ": 32, "Ċ": 10}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=characters, chat_template=template).save_pretrained(folder)


def test_a_conversation_is_asked_by_the_models_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TEMPLATE)
    tokenizer = ModelTokenizer(tmp_path)
    assert bytes(tokenizer.encode_chat(TURNS)) == b"<user>hi<assistant>yes<user>why<assistant>"
    assert bytes(tokenizer.encode("a b")) == b"a b"


def test_without_a_template_it_is_one_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert bytes(ModelTokenizer(tmp_path).encode_chat(TURNS)) == b"hi\nyes\nwhy\n"
    assert bytes(ByteTokenizer().encode_chat(TURNS)) == b"hi\nyes\nwhy\n"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for", "{{ messages.__class__.__mro__ }}"])
def test_a_template_that_fails_is_told(tmp_path: Path, template: str) -> None:
    """Also one that reaches for what a template must not have: it runs in a sandbox."""
    save_tokenizer(tmp_path, template)
    with pytest.raises(CheckpointError, match="chat template"):
        ModelTokenizer(tmp_path).encode_chat(TURNS)


@in_virtual_time
async def test_each_turn_is_asked_with_all_that_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "model", layers=1)
    save_tokenizer(tmp_path / "model", TEMPLATE)
    said = iter(["hello", "", "too long", "and now?", "/new", "bye", None])
    monkeypatch.setattr("swarmnode.cli.use.chat.TypedLines.next", lambda _self: asyncio.sleep(0, next(said)))
    async with VirtualSwarm(tmp_path / "swarm") as swarm:
        swarm.create(tmp_path / "model")
        await swarm.bootstrap()
        await swarm.node("a").wait_for("ready")
        async with swarm.client() as client:
            asked: list[str] = []
            stream = client.stream

            async def overheard(prompt: list[int], *options: object, **named: object) -> object:
                asked.append(bytes(prompt).decode())
                if "too long" in asked[-1]:
                    raise UsageError("shorten it")
                return await stream(prompt, *options, **named)  # type: ignore[arg-type]

            monkeypatch.setattr(client, "stream", overheard)
            await Dialogue(client, GenerateOptions(4), system="short").converse(TypedLines())
    told = capsys.readouterr()
    assert told.err.count("tokens/s, written by a]") == 3, "each answer tells its speed and its machines"
    system = "<system>short<user>"
    assert asked[0] == f"{system}hello<assistant>"
    assert asked[2].startswith(asked[0]) and asked[2].endswith("<user>and now?<assistant>")
    assert "too long" not in asked[2] and "shorten it" in told.err, "what cannot be asked is told, and forgotten"
    assert asked[3] == f"{system}bye<assistant>"


class Said:
    """An answer that never ends after its second piece."""

    def __init__(self) -> None:
        self.result = Generation(ids=[1], first_token_s=0.5, seconds=1.0)

    async def __aiter__(self) -> AsyncGenerator[GeneratedText, None]:
        yield GeneratedText(1, "one ")
        yield GeneratedText(2, "two")
        await asyncio.Event().wait()


class Listener:
    """A client that hears what is asked, and answers nothing but `Said`."""

    manifest = SimpleNamespace(name="friends")

    def __init__(self) -> None:
        self.asked: list[list[Turn]] = []

    async def stream_chat(self, turns: list[Turn], *_options: object, **_named: object) -> Said:
        self.asked.append(turns)
        return Said()

    def status(self) -> dict[str, Any]:
        return {"missing": [], "peers": []}


def typed(*lines: str | Callable[[], None]) -> TypedLines:
    """Lines that a user types; a function is called half a second after the line before it."""
    coming = iter(lines)

    class Lines(TypedLines):
        async def next(self) -> str | None:
            line = next(coming, None)
            if not callable(line):
                return line
            asyncio.get_running_loop().call_later(0.5, line)
            return await self.next()

    return Lines()


@in_virtual_time
async def test_commands_of_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    listener: Any = Listener()
    dialogue = Dialogue(listener, GenerateOptions(4))
    lines = ["/help", "/set x", '/system "Be short."', "/system", dialogue.interrupt, "hens", '/system ""', "/system"]
    lines += [dialogue.interrupt, '"""/two', '\x1blines"""', "/clear", dialogue.interrupt, " /etc", "/exit", "never"]
    await dialogue.converse(typed(*lines))
    told = capsys.readouterr()
    first, second, third = listener.asked
    assert first == [Turn("system", "Be short."), Turn("user", "hens")]
    assert second == [Turn("user", "hens"), Turn("assistant", "one two"), Turn("user", "/two\n\x1blines")]
    assert third == [Turn("user", "/etc")]
    assert told.out == "one two\n" * 3
    for words in ("There is no command /set. There are:", "Be short.", "There is no system text.", "/bye"):
        assert words in told.err
    assert told.err.count("tokens/s, written by") == 3


@in_virtual_time
async def test_a_second_interrupt_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    listener: Any = Listener()
    dialogue = Dialogue(listener, GenerateOptions(4))
    raised: list[int] = []
    monkeypatch.setattr("swarmnode.cli.use.chat.signal.raise_signal", raised.append)
    await dialogue.converse(typed(dialogue.interrupt, "hens"))
    assert not raised, "the first one stops the answer"
    dialogue.interrupt()
    assert raised == [signal.SIGTERM]


@in_virtual_time
async def test_a_model_without_a_template_is_told_to_be_none_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    listener: Any = Listener()
    listener.chat_tokenizer = lambda _adapter: asyncio.sleep(0, ByteTokenizer())
    await Dialogue(listener, GenerateOptions(4)).check_model()
    assert capsys.readouterr().err.startswith("This model has no chat template")
