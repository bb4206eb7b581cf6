"""Requests that schemathesis makes of the gateway's own schema, right ones and wrong ones, against a trained model.

    python contrib/clients/generated_requests.py --model MODEL --schemathesis ST [--requests 1000] [--only ^/v1/]

Founds a swarm on the checkpoint (a folder, or a GGUF file) on one node of this machine, and serves it with the page. The
program ST calls the schema's operations. Texts end after a few tokens. Prints JSON: answers and reasons by path and status,
and the faults, each with its request and answer. Faults are server errors (status 500 and above), errors in a stream of events,
and refusals without a reason. Exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.text_stream import TextStream
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway, GatewayConfig
from swarmnode.gateway.http.http_server import serving_http
from swarmnode.gateway.page.page import HEADER, Page
from swarmnode.localswarm import LocalSwarm
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.swarm.storage.swarmfile import load_swarm

MODEL = "local"
NEW_TOKENS = 4
TOLD_BYTES = 2000
MIN_REASON = 8  # characters


class Judge:
    """ASGI application that judges the answers of another one to `limit` requests, and refuses all later requests."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._left = limit
        self.answers: Counter[str] = Counter()
        self.reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by path and status
        self.faults: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<Judge of {self.answers.total()} answers, {len(self.faults)} faults>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and judge its answer; answer 503 after the limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._left -= 1
        if self._left < 0:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"enough"})
            return
        asked, told, status = b"", b"", 0

        async def received() -> Message:
            nonlocal asked
            message = await receive()
            asked += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            nonlocal told, status
            status = message.get("status", status)
            told += message.get("body", b"") if len(told) < TOLD_BYTES else b""
            await send(message)

        try:
            await self._app(scope, received, sent)
        except Exception as error:
            status, told = 599, repr(error).encode()
            raise
        finally:
            self._note(scope, asked, status, told)

    def _note(self, scope: Scope, asked: bytes, status: int, told: bytes) -> None:
        name = f"{scope['method']} {getattr(scope.get('route'), 'path', 'elsewhere')} {status}"
        self.answers[name] += 1
        reason = reason_of(told) if status >= 400 else ""
        if status >= 400:
            self.reasons[name][reason] += 1
        if status >= 500 or b"event: error" in told or (status >= 400 and len(reason) < MIN_REASON):
            fault = {
                "request": name,
                "path": scope["path"],
                "query": scope["query_string"].decode(),
                "headers": str(scope["headers"])[:300],
            }
            fault |= {"body": asked[:TOLD_BYTES].decode(errors="replace"), "answer": told.decode(errors="replace")}
            self.faults.append(fault)


def reason_of(told: bytes) -> str:
    """Return the message of an error answer; empty if it has none."""
    try:
        message = json.loads(told)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message if isinstance(message, str) else ""


KNOWN = {"model": ["", MODEL], "role": ["system", "user", "assistant"]}


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the gateway's schema with model names and roles limited to the `KNOWN` ones; changes `schema` itself.

    Otherwise most requests would be refused for an unknown model or role alone.
    """
    for component in schema["components"]["schemas"].values():
        for name in KNOWN.keys() & component.get("properties", {}).keys():
            component["properties"][name] = {"enum": KNOWN[name], "type": "string"}
    return schema


def end_soon(client: SwarmClient) -> None:
    """Let texts end after `NEW_TOKENS` tokens, after the check that the requested number of tokens fits."""
    ordinary = client.stream

    async def stream(prompt: list[int], options: GenerateOptions, **others: Any) -> TextStream:
        (await client.limits()).check_generation(len(prompt), options.max_new_tokens)
        return await ordinary(
            prompt, replace(options, max_new_tokens=min(options.max_new_tokens, NEW_TOKENS)), **others
        )

    client.stream = stream  # type: ignore[method-assign]


async def ask(local: LocalSwarm, options: argparse.Namespace) -> Judge:
    """Serve the swarm and let schemathesis send requests."""
    async with await SwarmClient.join(load_swarm(local.file), home=local.folder / "client") as client:
        end_soon(client)
        gateway = Gateway({MODEL: client}, config=GatewayConfig(default_new_tokens=NEW_TOKENS))
        page = Page(gateway, local.folder / "page")
        app = build_app(gateway, page)
        schema = local.folder / "openapi.json"
        schema.write_text(json.dumps(narrowed(app.openapi())))
        judge = Judge(app, options.requests)
        async with gateway.loading(), serving_http(judge, "127.0.0.1", 0) as port:
            command = [options.schemathesis, "run", str(schema), "--url", f"http://127.0.0.1:{port}"]
            command += ["--max-examples", str(options.each), "--workers", "4"]
            command += ["--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink", "--phases", "fuzzing"]
            command += [
                "--generation-database",
                "none",
                "--seed",
                str(options.seed),
                "--header",
                f"{HEADER}: {page.owner.token}",
            ]
            command += ["--include-path-regex", options.only, "--mode", options.mode]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=local.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            printed, _ = await process.communicate()
            print(printed.decode(errors="replace")[-2000:], file=sys.stderr)
    return judge


def main(options: argparse.Namespace) -> int:
    """Found the swarm, send the requests, print the results; return 1 if there are faults, otherwise 0."""
    with tempfile.TemporaryDirectory() as folder, LocalSwarm(Path(folder)) as local:
        local.create(options.model)
        local.bootstrap()
        local.node("a", "--dtype", "float32").wait_for("ready")
        judge = asyncio.run(ask(local, options))
    told = {"answers": dict(sorted(judge.answers.items())), "reasons": judge.reasons, "faults": judge.faults}
    print(json.dumps(told, indent=1, ensure_ascii=False))
    return 1 if judge.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemathesis", required=True, metavar="ST", help="path of the program st of schemathesis")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--each", type=int, default=120, help="examples for each operation")
    parser.add_argument("--only", default=".", help="paths that this regular expression finds")
    parser.add_argument("--mode", default="all", help="all, positive or negative, as of schemathesis")
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(main(parser.parse_args()))
