"""Commands `swarmnode generate` and `infer`: generate text with a swarm, or pass arrays through a module that it serves."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.file_options import check_output
from swarmnode.cli.options.metrics import PassingMetricsOptions
from swarmnode.cli.options.sampling_options import SamplingOptions
from swarmnode.cli.options.swarm import PATIENCE, SWARM, TRUST, asking
from swarmnode.counting import ranges
from swarmnode.files import may_write, write_private
from swarmnode.terminal.console import (
    HOME,
    JSON,
    STANDARD_INPUT,
    LogOptions,
    command,
    fail,
    is_piped,
    print_json,
    read_line,
    read_text,
    run_async,
    say,
    unless_stopped,
)
from swarmnode.terminal.option import argument, option, path_option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    import numpy as np

    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.records.announcement import Trust

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 1 << 24


@command
def generate(
    *,
    swarm: str = SWARM,
    prompt: str = argument(
        "", "Text to continue; - or nothing reads it from a pipe: echo Once | swarmnode generate.", metavar="PROMPT"
    ),
    ids: str = option("", "Token ids to continue instead, for models without a tokenizer.", metavar="1,2,3"),
    receipt: Path | None = path_option(
        "Write a receipt of the text into this file: who computed it, with digests that `swarmnode verify` has others check."
    ),
    sampling: SamplingOptions,
    trust: Trust = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    as_json: bool = JSON,
    metrics: PassingMetricsOptions,
    logs: LogOptions,
) -> None:
    """Let a swarm's model continue a text.

    Example: swarmnode generate friends.swarm "Once upon a time" --max-new-tokens 100 --temperature 0.8
    """
    logs.begin()
    swarm, prompt = _what_is_meant(swarm, prompt, ids, home)
    if bool(prompt) == bool(ids):
        fail("give either a PROMPT or --ids", 2)
    options, tokens = sampling.options(), parse_ids(ids) if ids else None
    watch = metrics.watch(home)
    if receipt is not None and (receipt.is_dir() or not may_write(receipt.parent)):
        fail(f"cannot write the receipt {receipt}: give a file in a folder that you may write to", 2)
    no_receipt: list[str] = []  # why there is none

    async def produce(stop: asyncio.Event) -> dict[str, Any] | None:
        started_s = time.monotonic()
        async with asking(
            swarm,
            watch.home,
            stop,
            patience_s=patience,
            trust=trust,
            needs_torch=sampling.needs_torch or receipt is not None,
        ) as client:
            left_s = max(1.0, patience - (time.monotonic() - started_s))
            client.config = dataclasses.replace(client.config, patience_s=left_s)
            if receipt is not None:
                client.auditor.on_receipt = lambda raw, why: _keep(receipt, raw) if raw else no_receipt.append(why)
            async with watch.over(client.manifest.name, client.readings):
                result = await unless_stopped(_produce(client, tokens or prompt, options, stream=not as_json), stop)
            if receipt is not None:
                await unless_stopped(client.auditor.idle(), stop)
                if stop.is_set():
                    no_receipt.append("no receipt of this text: interrupted")
            return result

    result = run_async(produce)
    if result is None:
        fail("interrupted")
    if as_json:
        print_json(result)
    if no_receipt:
        fail(no_receipt[0])


def _keep(path: Path, raw: bytes) -> None:
    """Write a receipt to `path`. Raises LocalError if it cannot be written."""
    write_private(path, raw)
    say(f"Receipt: {path}; check it with: swarmnode verify {path}", err=True)


def _what_is_meant(swarm: str, prompt: str, ids: str, home: Path) -> tuple[str, str]:
    """Return the swarm and the prompt that the arguments mean.

    A single argument that names no swarm is the prompt for the swarm used last; the beginning of a name counts as one only if a
    prompt is piped. A prompt of -, or none (nor `ids`) if the input is piped, is read from standard input, after the swarm if that
    comes from there too. Fails if nothing comes.
    """
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, find_name, names_a_swarm

    alone = swarm and not prompt and not ids
    begun = find_name(swarm, JoinedSwarms(home).all_names()) if alone and is_piped() else None
    if alone and (swarm == STANDARD_INPUT or not (begun or names_a_swarm(swarm, home))):
        swarm, prompt = "", swarm
    if swarm == STANDARD_INPUT:
        swarm = read_line()
    if prompt == STANDARD_INPUT or (not prompt and not ids and is_piped()):
        prompt = read_text(MAX_PROMPT_BYTES) or fail("give a PROMPT or --ids; standard input was empty", 2)
    return swarm, prompt


async def _produce(client: SwarmClient, prompt: str | list[int], options: Any, *, stream: bool) -> dict[str, Any]:
    if stream:
        tell_missing(client)
    stream_of_text = await client.stream(prompt, options)
    result, smooth = stream_of_text.result, False
    try:
        with spinner("Waiting for the first word", quiet=not stream):
            async for piece in stream_of_text:
                if stream:
                    say(piece.text if piece.text is not None else f"{piece.id} ", nl=False)
        smooth = not result.reroutes
    finally:
        level = logging.INFO if smooth or not result.route else logging.WARNING
        log.log(level, "the trace id of this session: %s", result.trace, extra={"trace": result.trace})
    if stream:
        say()
    return generation_json(result)


def tell_missing(client: SwarmClient) -> None:
    """Print on standard error which layers no machine holds, and how long the client waits for them; nothing if all are held."""
    if missing := client.status()["missing"]:
        units, wait_s = ", ".join(ranges(missing)), client.config.patience_s
        say(f"No machine holds layers {units} yet; waiting for up to {wait_s:.0f} s", err=True)


def generation_json(result: Any) -> dict[str, Any]:
    """Return a generation as a JSON object for scripts."""
    from swarmnode.measuring.meters import by_proposer

    return {
        "ids": result.ids,
        "text": result.text,
        "cached_tokens": result.cached_tokens,
        "first_token_s": round(result.first_token_s, 4),
        "seconds": round(result.seconds, 4),
        "tokens_per_s": round(result.tokens_per_s, 3),
        "route": [{"peer": hop.peer, "span": [hop.start, hop.end]} for hop in result.route],
        "reroutes": result.reroutes,
        "trace": result.trace,
        "longest_stall_s": round(result.longest_stall_s, 4),
        "tokens_per_turn": round(result.tokens_per_turn, 3),
        "drafts": {
            "accepted": result.accepted_drafts,
            "wasted": result.wasted_drafts,
            "by_proposer": by_proposer(result.drafts),
        },
        "logprobs": [[one._asdict() for one in token] for token in result.logprobs] or None,
    }


def parse_ids(text: str) -> list[int]:
    """Return token ids that are separated by commas or spaces. Ends the command if `text` has none, or anything else."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        fail(f"--ids takes numbers with commas between them, not {text!r}", 2)
    if not ids or min(ids) < 0:
        fail("--ids needs at least one token id, and no negative one", 2)
    return ids


@command
def infer(
    *,
    swarm: str = SWARM,
    inputs: Path = option(
        ..., "File with the module's inputs, arrays by name (numpy.savez).", "--input", typed=Path, metavar="FILE.npz"
    ),
    output: Path = path_option("Write the outputs to this file; default: print them.", metavar="FILE.npz"),
    force: bool = option(False, "Overwrite an existing --output."),
    trust: Trust = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: LogOptions,
) -> None:
    """Compute the outputs of a module that a swarm serves.

    Such a swarm was created with `create --module`.

    Example: swarmnode infer eyes.swarm --input images.npz --output scores.npz
    """
    logs.begin()
    if output is not None:
        if output.suffix != ".npz":
            fail(f"--output {output}: give the name of an .npz file", 2)
        check_output("--output", output, force=force)
    from swarmnode.compute.graph.boundary import read_arrays

    arrays = read_arrays(inputs)

    async def produce(stop: asyncio.Event) -> tuple[Mapping[str, np.ndarray], float] | None:
        async with asking(swarm, home, stop, patience_s=patience, trust=trust) as client:
            began_s = time.monotonic()
            outputs = await unless_stopped(client.infer(arrays), stop)
            return None if outputs is None else (outputs, time.monotonic() - began_s)

    result = run_async(produce)
    if result is None:
        fail("interrupted")
    outputs, took_s = result
    if output is not None:
        _write_arrays(output, outputs)
    if as_json:
        shapes = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in outputs.items()}
        print_json({"took_s": round(took_s, 3), "output": output and str(output), "outputs": shapes})
        return
    for name, array in outputs.items():
        say(f"{name}: {array.dtype} {array.shape}" + ("" if output is not None else f"\n{array}"))
    if output is not None:
        say(f"Wrote {output}, computed in {took_s:.2f} s.", err=True)


def _write_arrays(output: Path, outputs: Mapping[str, np.ndarray]) -> None:
    from numpy.lib.format import write_array

    try:
        # not numpy.savez: an output may have the name of one of its arguments
        with zipfile.ZipFile(output, "w") as archive:
            for name, array in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    write_array(file, array, allow_pickle=False)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror or error}")
