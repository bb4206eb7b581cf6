"""`swarmnode host`: what it founds, goes on with, and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import typer
from transformers import GPT2Config

from swarmnode.cli.host import host as command
from swarmnode.cli.use.serve import _tell_served
from swarmnode.compute.packing.ggml import library
from swarmnode.errors import ExecutorDied
from swarmnode.gateway import gateway_address as gateway
from swarmnode.gateway.gateway_address import GatewayAddress, Served, free_gateway_port
from swarmnode.lending.control import CommandSocket, ControlRequest
from swarmnode.net.addressing.addresses import bound
from swarmnode.net.identity import hosting_alone
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.node.bootstrap import SwarmHost
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED, GRAPH, TRAIN, encode_manifest
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm, new_swarm
from swarmnode.terminal import process
from tests.cli.command import assert_clear, invoke
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.encoders import save_encoder
from tests.llama import save_llama
from tests.swarm.records.test_manifest import make_manifest

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


async def opens(self: SwarmHost, stop: Any, opened: Any) -> None:
    """Say where the door would be, and that the node serves."""
    await opened(self._swarm, ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"])
    self.node._tell("ready", "Serving.")


def invite_in(output: str) -> str:
    return next(word for word in output.split() if word.startswith("swarm2"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in it, and a host that says where it would stand instead of standing there."""
    save_llama(tmp_path / "tiny", 1, vocab_size=64, hidden_size=16, intermediate_size=32)

    monkeypatch.setattr(SwarmHost, "run", opens)
    monkeypatch.setattr(command, "TRY_S", 0.5)
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_command_founds_and_says_what_a_friend_types(folder: Path) -> None:
    done = invoke("host", "./tiny", "--uses", "3", "--expires", "7d", "--no-page", *LOOPBACK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Reading tiny …\n")
    assert "volunteer, 3 machines, for 7 days" in done.stdout and "\nswarmnode join\nswarm2" in done.stdout
    assert "does not answer from here" in done.stdout and "swarmnode chat tiny\n" in done.stdout
    last = done.stdout.partition("Serving.\n")[2]
    assert "Web page" not in done.stdout and last.startswith("\nTerminal:") and "\nswarmnode join\nswarm2" in last
    assert load_swarm(invite_in(done.stdout)).id == load_swarm(folder / "tiny.swarm").id


def test_the_next_time_it_goes_on_with_the_same_swarm(folder: Path) -> None:
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0
    founded = load_swarm(folder / "tiny.swarm")
    listening = ("--listen", founded.bootstrap_listen[0])
    for again in (("./tiny",), ("tiny.swarm",), ("./tiny", *LOOPBACK), ("./tiny", *listening), ("./tiny", "--private")):
        done = invoke("host", *again)
        assert done.returncode == 0, done.stderr
        assert load_swarm(folder / "tiny.swarm").bootstraps == founded.bootstraps
    save_llama(folder / "other", 1, vocab_size=64, hidden_size=16, intermediate_size=32)
    assert_clear(invoke("host", "./other", "--name", "tiny"), 2, "another model", "--name")
    for other in (
        ("--listen", "/ip4/127.0.0.1/tcp/9"),
        ("--listen", "/ip4/0.0.0.0/tcp/0"),
        ("--announce", "/ip4/5.5.5.5/tcp/9"),
    ):
        assert_clear(invoke("host", "./tiny", *other), 2, "other addresses", "--name")
    for kind in ("--open", "--public"):
        assert_clear(invoke("host", "./tiny", kind), 2, "a private swarm", "--name")


def save_config(folder: Path, **changes: int) -> None:
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, **changes}
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)


def test_one_command_founds_a_swarm_that_trains(folder: Path) -> None:
    """From a config, a checkpoint or a module; the same command goes on, and another model or mode is refused."""
    save_config(folder / "gpt2")
    save_llama(folder / "bytes", 1, vocab_size=256, hidden_size=16, intermediate_size=32)
    (folder / "vision.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = torch.nn.Linear(4, 4)\n\n    def forward(self, x):\n"
        "        return self.inner(x).square().mean()\n\n\ndef digits():\n    return Net(), {'x': torch.ones(2, 4)}\n"
    )
    ways = {
        "gpt2": ("--config", "./gpt2", "--mode", "train"),
        "letters": ("--config", "gpt2/config.json", "--mode", "train", "--name", "letters", "--seed", "3"),
        "verses": ("./bytes", "--mode", "train", "--byte-level", "--name", "verses"),
        "digits": ("--module", "vision:digits", "--mode", "train"),
    }
    for name, way in ways.items():
        for _ in range(2):
            done = invoke("host", *way, *LOOPBACK, "--no-page")
            assert done.returncode == 0, done.stderr
            assert f"swarmnode train {name} --data PATH" in done.stdout and "swarmnode join" in done.stdout
        manifest = load_swarm(folder / f"{name}.swarm").manifest
        assert manifest is not None and manifest.mode == TRAIN
    assert invoke("host", "letters.swarm").returncode == invoke("host", "letters").returncode == 0
    save_config(folder / "larger" / "gpt2", n_embd=32)
    other = ("--config", "larger/gpt2", "--mode", "train")
    assert_clear(invoke("host", *other), 2, "another model", "--name")
    assert_clear(invoke("host", "./tiny", "--name", "gpt2"), 2, "another model", "--name")
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0
    assert_clear(invoke("host", "./tiny", "--mode", "train"), 2, "serves", "--mode serve", "--name")
    assert_clear(invoke("host", "--config", "./gpt2"), 2, "--mode train")
    assert_clear(invoke("host", "./tiny", "--model", "./tiny"), 2, "once")
    assert_clear(invoke("host"), 2, "which model?", "GGUF")


def save_parts(folder: Path) -> list[Path]:
    """A GGUF file in two parts, as `llama-gguf-split` writes them."""
    parts = [folder / f"small-0000{number}-of-00002.gguf" for number in (1, 2)]
    save_llama_gguf(
        parts[0],
        form="Q4_0",
        only=lambda name: "blk.0" in name,
        say=lambda writer: writer.add_uint16("split.count", 2),
    )
    save_llama_gguf(parts[1], form="Q4_0", only=lambda name: "blk.0" not in name)
    return parts


def save_whole(folder: Path) -> list[Path]:
    save_llama_gguf(folder / "small.gguf", form="Q4_0")
    return [folder / "small.gguf"]


@pytest.mark.skipif(library() is None, reason="the package xllamacpp is not installed, or not for this machine")
def test_a_gguf_file_gets_a_short_name_and_a_second_file_of_its_model_another(folder: Path) -> None:
    save_llama_gguf(folder / "Tiny-1B-Instruct-Q4_0.gguf", form="Q4_0")
    for expected in ("tiny-1b", "tiny-1b"):  # the second time it goes on
        done = invoke("host", "Tiny-1B-Instruct-Q4_0.gguf", *LOOPBACK)
        assert done.returncode == 0 and f"Hosting {expected}," in done.stdout, done.stderr
    save_llama_gguf(folder / "Tiny-1B-Instruct-Q8_0.gguf", form="Q8_0")
    assert invoke("host", "Tiny-1B-Instruct-Q8_0.gguf", *LOOPBACK).returncode == 0
    assert sorted(path.name for path in folder.glob("*.swarm")) == ["Tiny-1B-Instruct-Q8_0.swarm", "tiny-1b.swarm"]


def test_a_swarm_of_an_earlier_version_is_found_by_its_long_name(folder: Path) -> None:
    (folder / "tiny").rename(folder / "Tiny-1B-bf16")
    assert invoke("host", "./Tiny-1B-bf16", "--name", "Tiny-1B-bf16", *LOOPBACK).returncode == 0
    assert "Hosting Tiny-1B-bf16," in invoke("host", "./Tiny-1B-bf16").stdout
    assert [path.name for path in folder.glob("*.swarm")] == ["Tiny-1B-bf16.swarm"]


@pytest.mark.parametrize("quantised", ["", "-Q4_1", ".Q4_K_M", "-UD-IQ2_XXS", "-BF16", "-f32", "-q8", "-MXFP4_MOE"])
@pytest.mark.parametrize("tuned", ["", "-Instruct", "-it", "-chat-hf"])
@pytest.mark.parametrize("end", [".gguf", ".GGUF", "-00001-of-00003.gguf"])
def test_the_proposed_name_has_no_quantisation(quantised: str, tuned: str, end: str) -> None:
    assert command.names_of(f"models/SmolLM2-135M{tuned}{quantised}{end}")[0] == "smollm2-135m"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", "qwen2.5-7b"),
        ("org/tiny-8b@0123abcd", "tiny-8b"),
        ("./my-checkpoint", "my-checkpoint"),
        ("./my-chat", "my-chat"),
        ("./q4_0.gguf", "q4_0"),
        ("./Mein Modell", "mein-modell"),
    ],
)
def test_the_proposed_name_is_short(model: str, name: str) -> None:
    assert command.names_of(model)[0] == name


@pytest.mark.skipif(library() is None, reason="the package xllamacpp is not installed, or not for this machine")
@pytest.mark.parametrize("save", [save_whole, save_parts])
def test_a_gguf_file_is_looked_at_first_and_found_at_its_new_place(folder: Path, save: Any) -> None:
    parts = save(folder)
    assert invoke("host", parts[0].name, "--name", "my", *LOOPBACK).returncode == 0
    swarm = load_swarm(folder / "my.swarm")
    links = [path for path in (folder / "my-weights").iterdir() if path.is_symlink()]
    assert len(links) == len(parts)
    again = ("host", "my.swarm", "--no-page")
    (folder / "else").mkdir()
    moved = [part.rename(folder / "else" / part.name) for part in parts]
    done = invoke(*again)
    assert_clear(done, 1, str(parts[0]), "No such file", "put it back", "host FILE.gguf --name my")
    assert "New machines" not in done.stdout and "swarm2" not in done.stdout
    changed = bytearray(moved[-1].read_bytes())
    changed[-1] ^= 1
    (folder / "changed").mkdir()
    others = [folder / "changed" / part.name for part in parts]
    for other, part in zip(others, moved, strict=True):
        other.write_bytes(changed if part is moved[-1] else part.read_bytes())
    assert_clear(invoke("host", str(others[0]), "--name", "my"), 2, "another model", "--name")
    assert all(link.readlink().parent == folder for link in links), "they lead where they led"
    done = invoke("host", f"else/{moved[0].name}", "--name", "my", "--no-page")
    assert done.returncode == 0, done.stderr
    assert f"my.swarm has this model, and serves it from else/{moved[0].name} now" in done.stdout
    assert sorted(link.readlink() for link in links) == moved
    assert load_swarm(folder / "my.swarm") == replace(swarm, original=str(moved[0]))
    done = invoke("host", f"else/{moved[0].name}", "--name", "my", "--no-page")
    assert done.returncode == 0 and "has this model" not in done.stdout
    moved[-1].write_bytes(changed)
    done = invoke(*again)
    assert_clear(done, 1, str(moved[-1]), "differs", "put it back")
    assert "swarm2" not in done.stdout
    moved[-1].write_bytes(changed[:-1])
    done = invoke(*again)
    assert_clear(done, 1, str(moved[-1]), "another size", "put it back")
    assert "swarm2" not in done.stdout


def test_an_encoder_goes_on_too(folder: Path) -> None:
    save_encoder(folder / "encoder")
    for _ in range(2):
        done = invoke("host", "./encoder", "--no-page", *LOOPBACK)
        assert done.returncode == 0, done.stderr
        assert "chat" not in done.stdout and "generate" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "owned", "begins"),
    [((), True, "swarm2"), (("--public",), True, "swarm2"), (("--open",), False, "swarm1")],
)
def test_a_new_swarm_is_private_unless_said(folder: Path, flags: tuple[str, ...], owned: bool, begins: str) -> None:
    done = invoke("host", "./tiny", "--no-page", *flags, *LOOPBACK)
    assert done.returncode == 0, done.stderr
    assert load_swarm(folder / "tiny.swarm").private == (not flags)
    assert (folder / "tiny.owner").exists() == owned
    assert f"\n{begins}" in done.stdout


def test_without_a_password_nothing_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARMNODE_OWNER_PASSWORD")
    done = invoke("host", "./tiny", "--no-page", *LOOPBACK)
    assert done.returncode == 0, done.stderr
    assert "Keep tiny.owner secret" in done.stdout
    for name in ("tiny.owner", "tiny.guests", "tiny.swarm"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert invoke("invite", "tiny").returncode == 0


def test_the_last_invite_is_shown_again_while_it_is_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*options: str) -> str:
        done = invoke("host", "./tiny", "--no-page", *options)
        assert done.returncode == 0, done.stderr
        return invite_in(done.stdout)

    two = ("--uses", "2")
    first = shown(*LOOPBACK, *two)
    assert shown(*two) == first
    monkeypatch.setattr(SwarmHost, "uses_of", lambda _self, _invite: 1)
    assert shown(*two) == first, "one use is left"
    monkeypatch.setattr(SwarmHost, "uses_of", lambda _self, _invite: 2)
    second = shown(*two)
    assert second != first, "it is used up"
    monkeypatch.setattr(SwarmHost, "uses_of", lambda _self, _invite: 0)
    monkeypatch.delenv("SWARMNODE_OWNER_PASSWORD")
    assert shown(*two) == second, "without the password, too"
    assert_nothing_to_show("--uses", "3")
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    third = shown("--uses", "3")
    assert third not in (first, second), "other terms"
    offline = contextlib.nullcontext()  # no machine is searched for
    monkeypatch.setattr("swarmnode.cli.host.members._owner_if_online", lambda *_: offline)
    assert invoke("revoke", "tiny", third).returncode == 0
    assert shown("--uses", "3") != third, "it is revoked"


def assert_nothing_to_show(*options: str) -> None:
    """A service goes on without the owner's password, and says how an invite is made."""
    done = invoke("host", "./tiny", "--no-page", *options)
    assert done.returncode == 0, done.stderr
    assert "swarm2" not in done.stdout and "swarmnode invite tiny" in done.stdout


def test_a_swarm_is_not_hosted_twice(folder: Path) -> None:
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0
    swarm = load_swarm(folder / "tiny.swarm")
    with hosting_alone(folder / "home", swarm.id, swarm.name):
        assert_clear(invoke("host", "./tiny"), 1, "tiny is hosted here already", str(os.getpid()))
    assert invoke("host", "./tiny").returncode == 0


@pytest.mark.parametrize(
    ("changes", "has", "lacks"),
    [
        ({}, ("http://127.0.0.1:8000/v1 ", "chat my"), ("infer", "embeddings")),
        ({"kind": GRAPH, "task": EMBED}, ("http://127.0.0.1:8000/v1/embeddings ",), ("chat", "infer")),
        ({"kind": GRAPH, "task": CLASSIFY}, ("http://127.0.0.1:8000/classify ",), ("chat", "infer")),
        ({"kind": GRAPH}, ("swarmnode infer my --input",), ("chat", "8000/v1")),
        ({"kind": GRAPH, "mode": TRAIN}, ("swarmnode train my --data",), ("chat", "8000/v1")),
        ({"mode": TRAIN}, ("swarmnode train my --data",), ("chat", "8000/v1")),
    ],
)
def test_what_is_said_fits_the_task(changes: dict[str, Any], has: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    task = changes.pop("task", None)
    manifest = make_manifest(**changes)
    manifest = msgspec.structs.replace(
        manifest, model=msgspec.structs.replace(manifest.model, task=task or msgspec.UNSET)
    )
    served = Served("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/#owner=x", ["my"])
    text = "\n".join(command._ways(manifest, Path("my.swarm"), served))
    assert "Web page:   http://127.0.0.1:8000/#owner=x\n" in text
    assert all(word in text for word in has) and not any(word in text for word in lacks), text


def test_a_taken_port_gives_way_to_a_free_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bound("127.0.0.1", 0, backlog=1) as taken:
        port = taken.getsockname()[1]
        other = free_gateway_port(port, tmp_path)
    assert other != port and str(port) in capsys.readouterr().err
    assert free_gateway_port(other, tmp_path) == other and not capsys.readouterr().err


def test_a_host_that_cannot_compute_any_more_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    async def dies(self: SwarmHost, stop: Any, opened: Any) -> None:
        raise ExecutorDied("the compute thread died")

    def execv(_program: str, arguments: list[str]) -> None:
        begun.append(arguments)
        raise SystemExit(0)

    monkeypatch.setenv(process.COUNT, "")  # afterwards it is as before
    monkeypatch.delenv(process.COUNT)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(process, "FIRST_PAUSE_S", 0.0)
    with monkeypatch.context() as dying:
        dying.setattr(SwarmHost, "run", dies)
        done = invoke("host", "./tiny", *LOOPBACK)
    assert (done.returncode, len(begun)) == (0, 1) and "Starting again" in done.stderr
    assert invoke("host", "./tiny", *LOOPBACK).returncode == 0, "the same command, whose swarm is founded already"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("./tiny", "--memory", "6"), ("6GB",)),
        (("./tiny", "--device", "gpu"), ("--device gpu",)),
        (("./tiny", "--expires", "soon"), ("not a duration",)),
        (("./tiny", "--listen", "4001"), ("not a multiaddr",)),
        (("./nowhere", *LOOPBACK), ("no such",)),
        (("nowhere.swarm",), ("no such file",)),
    ],
)
def test_nothing_is_left_of_what_cannot_be(folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_clear(invoke("host", *arguments, "--private"), 2, *words)
    assert sorted(path.name for path in folder.iterdir()) == ["tiny"]


def test_a_second_host_is_served_by_the_gateway_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked by the name of the swarm in the home folder; its addresses are told, once."""
    monkeypatch.setattr(gateway, "LOOK_S", 0.01)
    swarm, told = new_swarm(encode_manifest(make_manifest())), list[Served]()
    (tmp_path / gateway.PAGE_LINK).write_text("http://127.0.0.1:8123/#owner=x\n")

    def state(name: str, swarm_id: str) -> dict[str, Any]:
        return {"swarm": name, "swarm_id": swarm_id, "pid": os.getpid() + 1, "url": "http://127.0.0.1:8123/v1"}

    async def second() -> None:
        async with contextlib.AsyncExitStack() as sockets:

            async def serve(name: str, swarm_id: str) -> None:
                async def obey(request: ControlRequest) -> dict[str, Any]:
                    if request.command == "add":
                        await serve(request.about, swarm.id.hex())
                    return state(name, swarm_id)

                await sockets.enter_async_context(CommandSocket(obey).listening(tmp_path / gateway.GATEWAYS, name))

            await serve("first", "00")
            shown = asyncio.Event()

            def show(served: Served) -> None:
                told.append(served)
                shown.set()

            address = GatewayAddress(tmp_path, 8123, say=show)
            answering = asyncio.ensure_future(gateway.answer(swarm, address, "second"))
            await asyncio.wait_for(shown.wait(), 60.0)
            await asyncio.sleep(5 * gateway.LOOK_S)  # it looks again meanwhile
            await cancel_and_wait(answering)

    asyncio.run(second())
    assert [(one.url, one.page, one.models) for one in told] == [
        ("http://127.0.0.1:8123/v1", "http://127.0.0.1:8123/", ["first", "second"])
    ]


def test_the_port_of_a_gateway_of_this_home_is_no_other_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def look(port: int) -> int:
        async def obey(_request: ControlRequest) -> dict[str, Any]:
            return {"swarm": "first", "swarm_id": "00", "pid": 4711, "url": f"http://127.0.0.1:{port}/v1"}

        async with CommandSocket(obey).listening(tmp_path / gateway.GATEWAYS, "first"):
            return await asyncio.to_thread(free_gateway_port, port, tmp_path)

    with bound("127.0.0.1", 0, backlog=1) as taken:
        port = taken.getsockname()[1]
        assert asyncio.run(look(port)) == port
    told = capsys.readouterr().err
    assert "4711" in told and "first" in told and "another program" not in told


def test_serve_names_the_process_of_this_home_that_serves_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = gateway.OtherGateway(4711, tmp_path / "first", "http://127.0.0.1:8000/v1", {"first": "00"})
    (tmp_path / gateway.PAGE_LINK).write_text("http://127.0.0.1:8000/#owner=secret\n")
    one, another = (cast(Swarm, SimpleNamespace(id=bytes([number]))) for number in (0, 1))
    _tell_served(ours, {"first": one}, tmp_path, as_json=False)
    told = capsys.readouterr()
    assert "4711" in told.err and "http://127.0.0.1:8000/v1  (model first)" in told.out
    assert "secret" not in told.out, "a log has other readers"
    with pytest.raises(typer.Exit) as ended:
        _tell_served(ours, {"first": one, "second": another}, tmp_path, as_json=False)
    assert ended.value.exit_code == 2 and "without second: choose another --port" in capsys.readouterr().err
