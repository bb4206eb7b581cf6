"""What is typed wrongly: told in one line with what to do, exit code 2, before anything is written or joined."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from swarmnode.config import StageConfig, parse_bytes, parse_rate
from swarmnode.errors import UsageError
from swarmnode.founding.swarm_creation import Bootstraps
from swarmnode.net.addressing.addresses import port_of
from tests.cli.command import assert_clear, invoke
from tests.llama import save_llama

PEER = "12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"
PORT = "/ip4/127.0.0.1/tcp/4001"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, 1, vocab_size=64, hidden_size=16, intermediate_size=32)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0:4001"), ("--listen", "not a multiaddr", "/ip4/203.0.113.7/tcp/4001")),
        (("--listen", "4001"), ("--listen", "not a multiaddr")),
        (("--listen", ""), ("--listen", "empty")),
        (("--listen", "[::1]:0"), ("--listen", "not a multiaddr")),
        (("--listen", "/ip6/fe80::1%eth0/tcp/4001"), ("--listen", "not a multiaddr")),
        (("--listen", "/ip4/127.0.0.1"), ("--listen /ip4/127.0.0.1", "names no port")),
        (("--listen", "/ip4/127.0.0.1/udp/4001"), ("--listen", "names no port")),
        (("--listen", "/unix/tmp/x"), ("--listen", "names no port")),
        (("--listen", f"/p2p/{PEER}"), ("--listen", "names no port")),
        (("--listen", f"{PORT}/p2p/{PEER}"), ("--listen", "leave out /p2p/")),
        (("--listen", "/ip6/fe80::1/tcp/4001"), ("--listen", "link-local")),
        (("--listen", PORT, "--announce", "/ip4/169.254.1.1/tcp/4001"), ("--announce", "link-local")),
        (("--listen", PORT, "--announce", "/dns4/example.org/tcp/0"), ("--announce", "port 0")),
        (("--announce", "example.org"), ("--announce", "not a multiaddr")),
        (("--announce", PORT), ("--announce", "--listen")),
        (("--listen", PORT, "--announce", "/ip4/0.0.0.0/tcp/4001"), ("--announce", "peers cannot dial 0.0.0.0")),
        (("--listen", "/ip4/224.0.0.1/tcp/4001"), ("--listen", "peers cannot dial 224.0.0.1")),
        (("--listen", "/ip4/255.255.255.255/tcp/4001"), ("--listen", "peers cannot dial")),
        (("--listen", "/ip6/ff02::1/tcp/4001"), ("--listen", "peers cannot dial ff02::1")),
        (("--listen", "/ip4/127.0.0.1/tcp/65536"), ("--listen", "not a multiaddr")),
        (("--listen", PORT, "--announce", "/ip4/0.1.2.3/tcp/4001"), ("--announce", "peers cannot dial")),
        (("--listen", PORT, "--announce", "/ip6/ff0e::1/tcp/4001"), ("--announce", "peers cannot dial")),
        (("--bootstrap", PORT), ("--bootstrap", "must end with /p2p/")),
        (("--bootstrap", "0.0.0.0"), ("--bootstrap", "not a multiaddr")),
        (("--bootstrap", f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}"), ("--bootstrap", "peers cannot dial 0.0.0.0")),
        (("--bootstrap", f"/ip6/::/tcp/4001/p2p/{PEER}"), ("--bootstrap", "peers cannot dial ::")),
        (("--bootstrap", f"/ip4/240.0.0.1/tcp/4001/p2p/{PEER}"), ("--bootstrap", "peers cannot dial")),
        (("--bootstrap", f"/ip4/10.0.0.1/tcp/0/p2p/{PEER}"), ("--bootstrap", "names no port")),
        (("--bootstrap", f"/ip4/10.0.0.1/p2p/{PEER}"), ("--bootstrap", "names no port")),
        (("--bootstrap", f"{PORT}/p2p/{PEER}", "--listen", PORT), ("--bootstrap", "run already")),
        (("--mode", "dream"), ("--mode dream",)),
        (("--private", "--public"), ("not both",)),
        (("--units", "3"), ("--module",)),
        (("--byte-level",), ("--mode train",)),
    ],
)
@pytest.mark.parametrize("membership", [(), ("--private",)])
def test_create_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: tuple[str, ...],
    membership: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    done = invoke("create", str(tmp_path / "friends"), "--model", str(model), *membership, *options)
    assert_clear(done, 2, *words)
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "./",
        "-x",
        ".hidden",
        ".swarm",
        " ",
        " x",
        "x\ny",
        "x\u202ey",
        "é" * 65,
        "😀" * 64,
        "n" * 300,
    ],
)
def test_what_is_no_name_of_a_swarm(name: str, tmp_path: Path) -> None:
    for done in (
        invoke("create", "--model", "./model", "--", name, cwd=tmp_path),
        invoke("host", "./model", "--name", name or ".", cwd=tmp_path),
    ):
        assert_clear(done, 2, "is not a name for a swarm; use up to 64 letters")
        assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_folder_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "friends.swarm").mkdir()
    assert_clear(invoke("create", "friends", "--model", "./model", "--force", cwd=tmp_path), 2, "is a folder")


@pytest.mark.parametrize(
    "command",
    [
        ("status", "{}"),
        ("run", "{}"),
        ("join", "{}"),
        ("generate", "{}", "text"),
        ("invite", "{}"),
        ("revoke", "{}", "carol"),
        ("why", "credit", "{}"),
        ("fit", "{}"),
        ("create", "x", "--model", "{}"),
        ("create", "x", "--mode", "train", "--config", "{}"),
        ("create", "x", "--model", "./model", "--private", "--owner-key", "{}"),
        ("create", "{}/x", "--model", "./model"),
    ],
)
def test_what_is_longer_than_any_files_name(command: tuple[str, ...], tmp_path: Path) -> None:
    done = invoke(*(each.format("n" * 300) for each in command), home=tmp_path / "home", cwd=tmp_path)
    assert_clear(done, 2, "File name too long")
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_long_prompt_alone_is_no_swarm(tmp_path: Path) -> None:
    done = invoke("generate", "Tell me of the sea. " * 20, home=tmp_path / "home", cwd=tmp_path)
    assert_clear(done, 2, "which swarm?")


def test_a_model_that_cannot_be_used_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    done = invoke("create", str(tmp_path / "friends"), "--model", str(tmp_path / "nowhere"), "--private")
    assert_clear(done, 2, "no such")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    done = invoke("create", str(tmp_path / "none" / "friends"), "--model", "x")
    assert_clear(done, 2, "no such folder")


def test_next_steps_can_be_pasted(model: Path, tmp_path: Path) -> None:
    done = invoke("create", str(tmp_path / "my swarm"), "--model", str(model))
    assert done.returncode == 0, done.stderr
    assert f"swarmnode host --door-only '{tmp_path}/my swarm.swarm'" in done.stdout


def test_wildcards_become_addresses_that_can_be_dialled() -> None:
    interfaces = ("127.0.0.1", "192.168.1.5", "169.254.7.7", "::1", "fe80::1", "2001:db8::5")
    settled = Bootstraps(listen=("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")).settled(interfaces)
    assert settled.announce == ("/ip4/192.168.1.5/tcp/4001", "/ip6/2001:db8::5/tcp/4001")
    assert settled.listen == ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")
    alone = Bootstraps(listen=("/ip4/0.0.0.0/tcp/4001",)).settled(("127.0.0.1",))
    assert alone.announce == (PORT,)
    for open_port in ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"):
        assert port_of(Bootstraps(listen=(open_port,)).settled().announce[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "6"), ("--memory 6", "6GB")),
        (("--memory", "lots"), ("--memory lots", "not a size")),
        (("--memory", "0GB"), ("--memory 0GB", "nothing")),
        (("--memory", "nan"), ("--memory nan", "not a size")),
        (("--memory", "-6GB"), ("--memory -6GB", "not a size")),
        (("--memory", "9" * 400 + "GB"), ("no machine has that much",)),
        (("--disk", "1"), ("--disk 1", "1GB")),
        (("--disk", "999999999999TB"), ("no machine has that much",)),
        (("--weights", "/no/such/file"), ("--weights /no/such/file: No such file or directory",)),
        (("--weights", "/dev/null"), ("--weights /dev/null: neither a file nor a folder",)),
        (("--max-upload", "0.001bit"), ("from 9.6kbit",)),
        (("--max-download", "9" * 400 + "Mbit"), ("to 1000Tbit",)),
        (("--cpu-share", "0.001%"), ("less than 1%",)),
        (("--hours", "22:00-22:00"), ("begins and ends at the same time",)),
        (("--max-age", "nan"), ("not a duration",)),
        (("--name", "x\ny"), ("--name", "printable")),
        (("--name", "n" * 300), ("--name", "at most 32")),
        (("--metrics-port", "65536"), ("--metrics-port", "65535", "swarmnode run --help")),
        (("--metrics-port", "x"), ("--metrics-port",)),
        (("--serve", "-1"), ("--serve",)),
        (("--max-gpu-power", "inf"), ("--max-gpu-power",)),
        (("--nice", "99"), ("--nice",)),
        (("--no-such-option",), ("--no-such-option", "swarmnode run --help")),
        (("--max-download", "8"), ("--max-download 8", "8Mbit")),
        (("--cpu-share", "0.5"), ("--cpu-share 0.5", "25%")),
        (("--audit-share", "0.03"), ("--audit-share 0.03", "25%")),
        (("--audit-share", "101%"), ("--audit-share 101%", "25%")),
        (("--gpu-share", "0%"), ("0%", "not a share")),
        (("--hours", "night"), ("hours night", "22:00-07:00")),
        (("--max-upload", "8"), ("--max-upload 8", "8Mbit")),
        (("--max-upload", "8MB"), ("--max-upload 8MB", "not a rate")),
        (("--span", "3"), ("--span 3", "A:B")),
        (("--span", "3:3"), ("--span 3:3", "A < B")),
        (("--compress", "zip"), ("--compress zip", "int8")),
        (("--capture", "on"), ("--capture on", "auto, off")),
        (("--device", "gpu"), ("--device gpu", "cuda")),
        (("--device", "cuda:x"), ("--device cuda:x", "cuda:N")),
        (("--dtype", "float8"), ("--dtype float8", "bfloat16")),
        (("--quantize", "int2"), ("--quantize int2", "nf4")),
        (("--peer", PORT), ("--peer", "/p2p/")),
        (("--peer", f"/ip4/224.0.0.1/tcp/4001/p2p/{PEER}"), ("--peer", "peers cannot dial")),
        (("--host-maddr", "/ip4/224.0.0.1/tcp/4001"), ("--host-maddr", "peers cannot dial")),
        (("--announce-maddr", "/ip4/255.255.255.255/tcp/4001"), ("--announce-maddr", "peers cannot dial")),
        (("--host-maddr", "0.0.0.0:4001"), ("--host-maddr", "not a multiaddr")),
        (("--announce-maddr", "me"), ("--announce-maddr", "not a multiaddr")),
        (("--log-format", "xml"), ("--log-format xml",)),
    ],
)
def test_run_joins_nothing(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    done = invoke("run", "whatever", "--home", str(tmp_path / "home"), *arguments)
    assert_clear(done, 2, *words)
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cuda:99", "mps,mps", "cpu:999"])
def test_a_device_that_is_not_here_is_told_before_anything_is_written(model: Path, tmp_path: Path, device: str) -> None:
    done = invoke("host", str(model), "--name", "friends", "--device", device, home=tmp_path / "home", cwd=tmp_path)
    assert_clear(done, 2 if "," in device else 1, "device")
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ("host", "{model}", "--name", "friends", "--metrics-port", "{port}"),
        ("serve", "friends", "--port", "{port}"),
        ("host", "--door-only", "friends", "--metrics-port", "{port}"),
        ("generate", "friends", "text", "--metrics-port", "{port}"),
        ("run", "friends", "--serve", "{port}"),
        ("run", "friends", "--metrics-port", "0", "--metrics-host", "999.1.1.1"),
        ("run", "friends", "--metrics-port", "0", "--metrics-host", ""),
        ("serve", "friends", "--host", "not a host", "--port", "0", "--keys", "keys"),
    ],
    ids=" ".join,
)
def test_where_nothing_can_be_served(model: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = invoke(*(each.format(model=model, port=port) for each in command), home=tmp_path / "home", cwd=tmp_path)
    assert_clear(done, 2 if "keys" in command else 1)
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e400", "soon"])
def test_nobody_waits_for_ever(seconds: str, tmp_path: Path) -> None:
    for command in (
        ("generate", "x", "text"),
        ("serve", "x"),
        ("export", "x", "out"),
        ("chat", "x"),
        ("serve", "--mcp", "x"),
    ):
        done = invoke(*command, "--patience", seconds, home=tmp_path / "home", cwd=tmp_path)
        assert_clear(done, 2, "--patience", f"swarmnode {command[0]} --help")
        assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("6GB", 6e9), ("512MiB", 512 << 20), ("1.5 gb", 1.5e9), ("100B", 100), ("2T", 2e12)]
)
def test_sizes(text: str, size_bytes: float) -> None:
    assert parse_bytes(text, "--memory") == size_bytes


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [("8Mbit", 8e6), ("500kbit/s", 5e5), ("1Gbps", 1e9), ("2.5 Mbits", 2.5e6), ("9600bps", 9600), ("8M", 8e6)],
)
def test_rates(text: str, rate_bps: float) -> None:
    assert parse_rate(text, "--max-upload") == rate_bps


@pytest.mark.parametrize(
    "device", ["auto", "all", "cpu", "mps", "cuda", "cuda:0", "cuda:15", "cuda:1,cuda:0", "cpu:0,cpu:1,cpu:2"]
)
def test_every_device_that_there_may_be(device: str) -> None:
    assert StageConfig(device=device).check().device == device


@pytest.mark.parametrize(
    "device",
    ["CUDA", "cuda:0,", "cuda:0,1", "cuda:0, cuda:1", "cuda,cuda", "cuda:0,cpu:0", "cpu,cuda:0", "mps,mps", "all,cpu"],
)
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(UsageError, match=r"choose auto.* or several of one kind as in cuda:0,cuda:1$"):
        StageConfig(device=device).check()


@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cpu:1,cpu:01", "cuda:2,cuda:1,cuda:2"])
def test_no_device_twice(device: str) -> None:
    with pytest.raises(UsageError, match="twice"):
        StageConfig(device=device).check()
