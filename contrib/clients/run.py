"""Run popular API clients against a gateway on this machine, and list the calls of each.

    python contrib/clients/run.py [--python PYTHON] [--node-modules FOLDER]

Founds a swarm of one small random Llama on loopback, serves it, and runs the script of each client: Python's with PYTHON, whose
environment may be a separate one (`requirements.txt` beside this file), npm's in FOLDER, the parent of `node_modules`. The table
marks clients that are not installed. Prints a table in Markdown; exits with 1 if a client failed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.http_server import serving_http
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.gateway.speaking import save_speaking_llama

FOLDER = Path(__file__).parent
MODEL = "local"
TIMEOUT_S = 300.0


class Client(NamedTuple):
    """Client package and the script that uses it."""

    package: str
    script: str

    @property
    def is_npm(self) -> bool:
        """Whether Node.js runs the script."""
        return self.script.endswith(".mjs")

    def version_command(self, python: str) -> list[str]:
        """Return the command that prints the package's version, and fails if it is not installed."""
        if self.is_npm:
            file = f"./node_modules/{self.package}/package.json"  # read as a file: a package need not export it
            return ["node", "-p", f"require('{file}').version"]
        return [python, "-c", f"import importlib.metadata as m; print(m.version('{self.package}'))"]

    def command(self, python: str, url: str) -> list[str]:
        """Return the command that runs the script against the gateway at `url`."""
        return ["node" if self.is_npm else python, str(FOLDER.absolute() / self.script), url, MODEL]


CLIENTS = (
    Client("openai", "openai_package.py"),
    Client("anthropic", "anthropic_package.py"),
    Client("langchain-openai", "langchain_package.py"),
    Client("langchain-openai", "../../examples/langchain_chat.py"),
    Client("litellm", "litellm_package.py"),
    Client("openai", "openai_npm.mjs"),
)


class Recorder:
    """ASGI application that counts the HTTP requests to the application behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Recorder of {self.calls.total()} calls>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count an HTTP request and pass it on."""
        if scope["type"] == "http":
            path = re.sub("/resp_[^/]+", "/{id}", scope["path"])
            self.calls[f"{scope['method']} {path}"] += 1
        await self._app(scope, receive, send)


async def output_of(command: list[str], folder: Path) -> tuple[int, str]:
    """Run `command` in `folder` and return its exit code and output; (127, "") if the program is missing. It is killed after
    `TIMEOUT_S`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        return 127, ""
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except asyncio.TimeoutError:
        process.kill()
        return await process.wait(), "it took too long"
    return process.returncode or 0, printed.decode(errors="replace").strip()


async def ask_by_all(local: LocalSwarm, python: str, node_modules: Path) -> int:
    """Run all clients against a gateway of `local`, print the table, and return the number of failed clients."""
    failed = 0
    async with await SwarmClient.join(load_swarm(local.file), home=local.folder / "client") as client:
        recorder = Recorder(build_app(Gateway({MODEL: client}, home=local.folder / "gateway")))
        async with serving_http(recorder, "127.0.0.1", 0) as port:
            print("| client | version | calls | |\n|---|---|---|---|")
            for each in CLIENTS:
                folder = node_modules if each.is_npm else local.folder
                name = f"{each.package} ({'npm' if each.is_npm else 'PyPI'}), {Path(each.script).name}"
                code, version = await output_of(each.version_command(python), folder)
                if code:
                    print(f"| {name} | | | not installed |")
                    continue
                recorder.calls.clear()
                code, printed = await output_of(each.command(python, f"http://127.0.0.1:{port}/v1"), folder)
                calls = ", ".join(f"{count} × `{call}`" for call, count in sorted(recorder.calls.items()))
                print(f"| {name} | {version} | {calls} | {'failed' if code else 'all well'} |", flush=True)
                if code:
                    print(printed, file=sys.stderr)
                    failed += 1
    return failed


def main(options: argparse.Namespace) -> int:
    """Found a swarm, run all clients, and return the exit status: 1 if a client failed, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        save_speaking_llama(model)
        with LocalSwarm(Path(folder)) as local:
            local.create(model)
            local.bootstrap()
            local.node("a").wait_for("ready")
            return 1 if asyncio.run(ask_by_all(local, options.python, options.node_modules)) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="Python with the clients of PyPI")
    parser.add_argument(
        "--node-modules", type=Path, default=Path(), metavar="FOLDER", help="folder with the npm clients"
    )
    sys.exit(main(parser.parse_args()))
