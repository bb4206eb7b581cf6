"""Try the Dockerfile without a Docker engine: carry out its steps in a clean Debian root, then run containers in it.

    sudo python3 contrib/docker/try_in_root.py --work /var/tmp/swarmnode-image

Needs Linux, root, debootstrap (apt install debootstrap), a network to Debian and PyPI, 4 GB of disk and ten minutes. pip's
configuration on this machine (an index, wheels on disk) also applies in the root. The built root is kept; --keep tries it again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from builder import Builder, bind
from container import Container
from dockerfile import read
from root import Root

CONTEXT = Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
BASE = re.compile(r"debian:(\w+)-slim")
OWN_MOUNTS = "SWARMNODE_TRIED_IN_OWN_MOUNTS"
HOST = "/host"  # folder of the root for paths of this machine that pip reads
# As in the official image: apt keeps nothing that it can fetch again.
SLIM = 'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0

# A model of a few thousand weights: the roles are tried here, not the arithmetic.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def main() -> None:
    """Build the image, then run all trials; the first failure ends the program with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the roots")
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a build argument, like --build-arg of docker build",
    )
    parser.add_argument("--keep", action="store_true", help="use the files that an earlier call has built")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: this needs root, for chroot and mount")
    if OWN_MOUNTS not in os.environ:  # the mounts end with this process in any case
        environment = {**os.environ, OWN_MOUNTS: "1"}
        sys.exit(subprocess.run(["unshare", "--mount", sys.executable, *sys.argv], env=environment).returncode)
    image = build(arguments.work, dict(each.split("=", 1) for each in arguments.build_arg), keep=arguments.keep)
    print(f"The image's files: {size_mb(image.folder)} MB, of which Debian {size_mb(arguments.work / 'base')} MB")
    for trial in (version_and_rights, demo, swarm):
        began_s = time.monotonic()
        trial(image)
        print(f"ok: {trial.__name__} ({time.monotonic() - began_s:.0f} s)", flush=True)


def build(work: Path, arguments: dict[str, str], *, keep: bool) -> Root:
    """Build all stages in the folder `work` and return the last; with `keep` use the files of an earlier build."""
    work.mkdir(parents=True, exist_ok=True)
    built: dict[str, Root] = {}
    all_stages = read(CONTEXT / "Dockerfile")
    for number, stage in enumerate(all_stages):
        root = Root(work / f"stage{number}")
        if not keep:
            shutil.rmtree(root.folder, ignore_errors=True)
            subprocess.run(["cp", "--archive", debian(stage.base, work), root.folder], check=True)
        host = pip_configuration(root.folder) if number < len(all_stages) - 1 else {}
        built[stage.name or str(number)] = root
        Builder(root, CONTEXT, built, arguments, host).build(stage, files=not keep)
    return root


def debian(base: str, work: Path) -> Path:
    """Return a folder with Debian's minimal system, nearly the image `base`; made by debootstrap if it is missing. Exits if
    `base` is not debian:NAME-slim."""
    named = BASE.fullmatch(base)
    if named is None:
        sys.exit(f"error: FROM {base}: only debian:NAME-slim can be made here")
    folder = work / "base"
    if not (folder / "etc" / "debian_version").exists():
        subprocess.run(["debootstrap", "--variant=minbase", named[1], folder, MIRROR], check=True)
        (folder / "etc" / "apt" / "apt.conf.d" / "slim").write_text(SLIM)
        shutil.rmtree(folder / "var" / "cache" / "apt")
    return folder


def pip_configuration(folder: Path) -> dict[str, str]:
    """Return variables that give pip in the root this machine's configuration; mount the files and folders that it names."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = dict(re.findall(r"^[^.]+\.([^=]+)='(.*)'$", listed.stdout, re.MULTILINE))
    paths = {path for path in re.findall(r"/[^\s']+", listed.stdout.replace("file://", "")) if Path(path).exists()}
    for path in paths:
        shown = Path(path).parent if path.endswith("/simple") else Path(path)  # an index points to files beside it
        bind(shown, folder / f".{HOST}{shown}")
    for name, value in options.items():
        for path in paths:
            value = re.sub(rf"(?<!\S)(file://)?{path}(?!\S)", rf"\1{HOST}{path}", value)
        options[name] = value
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in options.items()}


def size_mb(folder: Path) -> int:
    """Return the size of `folder` on disk in MB."""
    return int(
        subprocess.run(["du", "-sm", "-x", folder], capture_output=True, text=True, check=True).stdout.split()[0]
    )


def version_and_rights(image: Root) -> None:
    """Check that the entry point answers, and that the user is not root and cannot change the programs."""
    said = finish(image, ["--version"])
    stated = re.search(r'__version__ = "(.+)"', (CONTEXT / "swarmnode" / "__init__.py").read_text())
    assert stated is not None and said == f"swarmnode {stated[1]}\n", said
    shell = Root(image.folder, image.environment, image.user, image.workdir)
    assert finish(shell, ["id", "--user"]) != "0\n"
    assert finish(shell, ["find", "/opt", "/usr", "/etc", "-xdev", "-not", "-type", "l", "-writable"]) == ""
    finish(shell, ["touch", "is-writable"])


def demo(image: Root) -> None:
    """Check that a demo swarm runs in one container as the unprivileged user."""
    report = json.loads(finish(image, ["demo", "--json", "--steps", "20"]))
    assert report["identical"] and report["left_running"] == 0, report


def swarm(image: Root) -> None:
    """Check a bootstrap peer and two nodes in separate containers: generation, health check and signals."""
    model = image.inside("tiny")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    finish(image, ["create", "tried", "--mode", "train", "--config", "tiny", "--byte-level", "--force", "--quiet"])
    with (
        Container(image, ["host", "--door-only", "tried.swarm"]) as door,
        Container(image, ["run", "tried.swarm", "--span", "0:2"], beside=door, environment=port(9465)) as first,
        Container(image, ["run", "tried.swarm", "--span", "2:4"], beside=door, environment=port(9466)) as second,
    ):
        for container in (door, first, second):
            wait_until(container.healthy, f"{container!r} is healthy")
        wait_until(lambda: covered(first), "all units are held")
        text = first.execute(["swarmnode", "generate", "tried.swarm", "def", "--max-new-tokens", "8", "--json"])
        assert text.returncode == 0 and json.loads(text.stdout), text.stderr
        frozen_is_unhealthy(first)
        for container in (second, first, door):
            ends_in_order(container)


def covered(container: Container) -> bool:
    """Return whether every unit has a holder and all peers are ready, by `status` inside a container."""
    status = json.loads(container.execute(["swarmnode", "status", "tried.swarm", "--json"]).stdout)
    return not status["missing"] and all(peer["state"] == "ready" for peer in status["peers"])


def frozen_is_unhealthy(container: Container) -> None:
    """Check that the health check fails while the node's process is stopped."""
    [node] = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    os.kill(int(node), signal.SIGSTOP)
    assert not container.healthy()
    os.kill(int(node), signal.SIGCONT)
    wait_until(container.healthy, "healthy again")


def ends_in_order(container: Container) -> None:
    """Check that the signal of `docker stop` ends the node with code 0."""
    container.signal(signal.SIGTERM)
    assert container.process.wait(STOP_TIMEOUT_S) == 0, container


def port(number: int) -> dict[str, str]:
    """Return the environment that sets the metrics port, for containers that share a network."""
    return {"SWARMNODE_METRICS_PORT": str(number)}


def finish(image: Root, words: list[str]) -> str:
    """Run `words` in a container to the end and return its output. Raises AssertionError if the exit code is not 0."""
    with Container(image, words, output=subprocess.PIPE) as container:
        said, _ = container.process.communicate(timeout=600)
    assert container.process.returncode == 0, f"{words} ended with code {container.process.returncode}: {said}"
    return said


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds` returns True. Raises AssertionError, naming `what`, after `START_TIMEOUT_S`."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {START_TIMEOUT_S:.0f} s: {what}"
        time.sleep(1.0)


if __name__ == "__main__":
    main()
