"""A multiple-choice task through lm-evaluation-harness's API model against a swarm, beside transformers.

    python contrib/clients/evaluation.py --model MODEL [--python PYTHON] [--bodies FILE]

Founds a swarm on the checkpoint (a folder, or a GGUF file) in float32, on two nodes of this machine, and serves it. lm_eval, in
the environment of PYTHON, scores the answers of `evaluation_task/` as `local-completions`: one request each, four together, and
with prompts as texts. Prints JSON for each of these: accuracies, the largest relative difference of a log-likelihood to that of
transformers (some 1e-6: matrix products go the way that is fastest here), and whether both find the same endings most likely.
FILE receives the bodies of the requests, a line each. Nothing is taken from the network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.http_server import serving_http
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm

TASK = "farm"
FOLDER = Path(__file__).parent / "evaluation_task"
MODEL = "local"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
WAYS = {
    "one each": [],
    "four together": ["--batch_size", "4"],
    "texts": ["--model_args", "tokenized_requests=False"],
}


class Score(NamedTuple):
    """Log-likelihood of an ending after its context, and whether greedy decoding gives the ending."""

    logprob: float
    is_greedy: bool


class BodyRecorder:
    """ASGI application that passes requests on to another one and records their paths and bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.bodies: list[tuple[str, bytes]] = []

    def __repr__(self) -> str:
        return f"<BodyRecorder of {len(self.bodies)} bodies>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and record its body unless it is empty."""
        body = b""

        async def kept() -> Message:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body", False) and body:
                    self.bodies.append((scope["path"], body))
            return message

        await self._app(scope, kept if scope["type"] == "http" else receive, send)


def write_float32(model: Path, folder: Path) -> None:
    """Write the checkpoint and its tokenizer with float32 weights."""
    if model.is_file():
        plain = folder.with_name("plain")
        plain.mkdir()
        GgufCheckpoint(model).write(plain)
        model = plain
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


async def evaluate(python: str, url: str, model: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    """Run lm_eval and return the samples that it logs. Raises RuntimeError with its output if it fails."""
    arguments = (
        f"model={MODEL},tokenizer={model},tokenizer_backend=huggingface,base_url={url}/completions,max_retries=1"
    )
    command = [
        python,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        TASK,
    ]
    command += ["--include_path", str(FOLDER), "--output_path", str(out), "--log_samples", *more]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=FOLDER,
        env={**os.environ, **OFFLINE, "HF_HOME": str(out / "cache")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(printed.decode(errors="replace"))
    return await asyncio.to_thread(samples_in, out)


def samples_in(out: Path) -> list[dict[str, Any]]:
    """Return the samples that lm_eval has logged under `out`. Raises ValueError unless there is exactly one log."""
    (samples,) = out.rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


class Reference:
    """Scores by transformers, with endings cut as lm_eval cuts them: the tokens of the whole text behind those of the context."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def __repr__(self) -> str:
        return f"<Reference {type(self._model).__name__}>"

    def score(self, context: str, ending: str) -> Score:
        """Return the score of an ending after its context."""
        begins = len(self._tokenizer(context, add_special_tokens=False).input_ids)
        ids = self._tokenizer(context + ending, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            logprobs_TV = self._model(ids).logits[0, begins - 1 : -1].log_softmax(-1)
        ending_T = ids[0, begins:]
        logprob = float(logprobs_TV.gather(1, ending_T[:, None]).double().sum())
        return Score(logprob, bool((logprobs_TV.argmax(-1) == ending_T).all()))


def pairs(samples: list[dict[str, Any]], reference: Reference) -> Iterator[tuple[Score, Score]]:
    """Yield the scores of each ending: by the swarm, by transformers."""
    for sample in samples:
        asked = sample["arguments"].values() if isinstance(sample["arguments"], dict) else sample["arguments"]
        for one, told in zip(asked, sample["resps"], strict=True):
            context, ending = one.values() if isinstance(one, dict) else one
            logprob, is_greedy = told[0]
            yield Score(float(logprob), str(is_greedy) == "True"), reference.score(context, ending)


def compared(samples: list[dict[str, Any]], reference: Reference) -> dict[str, Any]:
    """Return the results to print for the samples of one way to ask."""
    both = list(pairs(samples, reference))
    return {
        "endings": len(both),
        "acc": sum(sample["acc"] for sample in samples) / len(samples),
        "acc_norm": sum(sample["acc_norm"] for sample in samples) / len(samples),
        "largest_relative_difference": max(abs(ours.logprob / theirs.logprob - 1) for ours, theirs in both),
        "same_greedy": all(ours.is_greedy == theirs.is_greedy for ours, theirs in both),
    }


async def ask(local: LocalSwarm, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the swarm, evaluate it in each of the `WAYS` and return the results by way."""
    reference = Reference(model)
    told: dict[str, Any] = {}
    async with await SwarmClient.join(load_swarm(local.file), home=local.folder / "client") as client:
        gateway = Gateway({MODEL: client})
        recorder = BodyRecorder(build_app(gateway))
        async with gateway.loading(), serving_http(recorder, "127.0.0.1", 0) as port:
            for name, more in WAYS.items():
                out = local.folder / name.replace(" ", "-")
                samples = await evaluate(options.python, f"http://127.0.0.1:{port}/v1", model, out, *more)
                told[name] = compared(samples, reference)
    if options.bodies:
        options.bodies.write_bytes(b"".join(body + b"\n" for _, body in recorder.bodies))
    return told


def main(options: argparse.Namespace) -> None:
    """Found the swarm, evaluate it, print the results and end it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_float32(options.model, model)
        with LocalSwarm(Path(folder)) as local:
            local.create(model)
            local.bootstrap()
            units = AutoConfig.from_pretrained(model).num_hidden_layers + 2  # with both ends
            halves = (f"0:{units // 2}", f"{units // 2}:{units}")
            for node in [local.node(name, "--span", half) for name, half in zip("ab", halves, strict=True)]:
                node.wait_for("ready")
            print(json.dumps(asyncio.run(ask(local, model, options)), indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="Python that has lm_eval with its extra `api`")
    parser.add_argument("--bodies", type=Path, metavar="FILE", help="file to write the bodies of the requests to")
    main(parser.parse_args())
