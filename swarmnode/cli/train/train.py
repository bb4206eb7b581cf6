"""`swarmnode train`: feed data to a swarm that trains, or train the same thing in this process."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.options.activations import COMPRESS, TOPK_FEEDBACK, TOPK_RATIO, parse_compression
from swarmnode.cli.options.asking import patience_option
from swarmnode.cli.options.averaging import (
    AVERAGE_ALTERNATING,
    AVERAGE_BY_LINE,
    AVERAGE_CODEC,
    AVERAGE_EVERY,
    AVERAGE_KEEP,
    AVERAGE_RANK,
    OUTER_LR,
    OUTER_MOMENTUM,
    fine_settings,
    parse_averaging,
)
from swarmnode.cli.options.metrics import METRICS_HOST, SERVICE_METRICS_PORT, Watch
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.console import (
    HOME,
    LOG_FORMAT,
    VERBOSE,
    default_home,
    fail,
    reports_errors,
    run_async,
    say,
    set_up_logging,
)
from swarmnode.counting import counted

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import Run


AS_THEY_ARE = (
    "steps",
    "batch",
    "microbatch",
    "sequence",
    "optimizer",
    "schedule",
    "weight_decay",
    "momentum",
    "clip",
    "seed",
    "checkpoint_steps",
    "autocast",
)


@reports_errors
def train(
    context: typer.Context,
    swarm: str = SWARM,
    data: Path = typer.Option(
        ...,
        "--data",
        metavar="PATH",
        help="Text: a file, a folder or .jsonl; for a module: an .npz file of its inputs.",
    ),
    steps: int = typer.Option(..., "--steps", help="Updates of the whole run."),
    batch: int = typer.Option(32, "--batch", help="Samples of a step."),
    microbatch: int = typer.Option(
        0, "--microbatch", help="Samples that travel together; default: 4.", show_default=False
    ),
    sequence: int = typer.Option(0, "--sequence", help="Tokens of a sample; default: 128.", show_default=False),
    optimizer: str = typer.Option(
        "adamw",
        "--optimizer",
        metavar="adamw|adamw8bit|sgd",
        help="adamw8bit takes a quarter of AdamW's memory for the same steps, nearly.",
    ),
    lr: float = typer.Option(3e-4, "--lr", help="Learning rate, at its highest."),
    schedule: str = typer.Option("cosine", "--schedule", metavar="constant|linear|cosine", help="After the warm-up."),
    warmup: int = typer.Option(0, "--warmup", help="Steps in which the learning rate rises."),
    clip: float = typer.Option(1.0, "--clip", help="Largest norm of the gradient of all units; 0 is off."),
    weight_decay: float = typer.Option(0.1, "--weight-decay"),
    momentum: float = typer.Option(0.0, "--momentum", help="Of sgd."),
    seed: int = typer.Option(0, "--seed", help="Of the order of samples, and of dropout."),
    autocast: bool = typer.Option(
        True,
        "--autocast/--no-autocast",
        help="Multiply in 16 bits on GPUs that are fast at it: bfloat16 and TF32 since Ampere, float16 on Volta and Turing.",
    ),
    checkpoint_steps: int = typer.Option(50, "--checkpoint-steps", help="Nodes keep their state every so many steps."),
    average_every: int = AVERAGE_EVERY,
    average_codec: str = AVERAGE_CODEC,
    average_keep: float = AVERAGE_KEEP,
    average_rank: int = AVERAGE_RANK,
    average_alternating: bool = AVERAGE_ALTERNATING,
    average_by_line: bool = AVERAGE_BY_LINE,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    compress: str = COMPRESS,
    topk_ratio: float = TOPK_RATIO,
    topk_feedback: bool = TOPK_FEEDBACK,
    robust: bool = typer.Option(
        False,
        "--robust",
        help="Among strangers: no replica of three or more can drag the average away; liars are left out.",
    ),
    log: Path = typer.Option(
        None, "--log", metavar="FILE", help="Write a JSON line for each step.", show_default=False
    ),
    local: bool = typer.Option(False, "--local", help="Train in this process instead, for comparison."),
    out: Path = typer.Option(
        None, "--out", metavar="DIR", help="With --local: write the trained model there.", show_default=False
    ),
    device: str = typer.Option("auto", "--device", help="With --local: auto, cpu, cuda, cuda:1, mps."),
    threads: int = typer.Option(0, "--threads", help="With --local: CPU threads; default: all.", show_default=False),
    force: bool = typer.Option(False, "--force", help="Replace a checkpoint in --out."),
    patience: float = patience_option(60.0, "How long to wait for the swarm to answer."),
    home: Path = HOME,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON line for each step."),
    metrics_port: int = SERVICE_METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    log_format: str = LOG_FORMAT,
    verbose: bool = VERBOSE,
) -> None:
    """Train a swarm's model on your data. Any number of trainers may share the work, with the same data and settings.

    Ctrl-C stops feeding; the same command goes on from there.

    Example: swarmnode train school.swarm --data ./texts --steps 1000 --batch 32 --sequence 256 --lr 6e-4 --warmup 50
    """
    set_up_logging(verbose, log_format)
    if not local and (out is not None or force or device != "auto" or threads):
        fail(
            "--out, --force, --device and --threads go with --local; a swarm's model is written by `swarmnode export`",
            2,
        )
    from swarmnode.training.preparation import check_early, check_trains

    settings = _settings(context.params)
    check_early(data, settings)
    known, target = open_swarm(swarm, default_home(home)), out.absolute() if out is not None else None
    if known.manifest is not None:
        check_trains(known.manifest)
    from swarmnode.cli.terminal.training_view import training_view
    from swarmnode.training.client import TrainingClient
    from swarmnode.training.local import LocalDevice, OutputFolder, train_here
    from swarmnode.training.meter import TrainerMeter

    watch = Watch(metrics_host, metrics_port, default_home(home), as_json)

    async def train_with_others(meter: TrainerMeter, stop: asyncio.Event) -> int:
        client = await TrainingClient.join(known, watch.home, patience_s=patience)
        try:
            async with watch.over(known.name, lambda: [*meter.readings(), *client.readings()]):
                return await client.train(data, settings, meter, stop)
        finally:
            await client.close()

    async def train_alone(meter: TrainerMeter, stop: asyncio.Event) -> int:
        place, output = LocalDevice(device, threads or None), None if target is None else OutputFolder(target, force)
        what = (known, watch.home, data, settings, meter, stop)
        async with watch.over(known.name, meter.readings):
            return await train_here(*what, place=place, output=output, patience_s=patience)

    work = train_alone if local else train_with_others
    with training_view(as_json=as_json, log=log) as view:

        def feed(stop: asyncio.Event) -> Coroutine[Any, Any, int]:
            view.on_failure = stop.set  # what cannot be told is not gone on with
            return work(TrainerMeter(view), stop)

        done = run_async(feed)
    _say_where_it_stands(done, settings, out if local else None, swarm, local=local, as_json=as_json)


def _settings(options: Mapping[str, Any]) -> Run:
    """The run that is meant; its data are filled in when they are read. Raises UsageError."""
    from swarmnode.swarm.records.run import Run
    from swarmnode.training.preparation import NO_DATA

    every, codec, rank, keep = (options[f"average_{name}"] for name in ("every", "codec", "rank", "keep"))
    outer = {name: options[name] for name in ("outer_lr", "outer_momentum")}
    fine = fine_settings(every, codec, keep=keep, **outer)
    return Run(
        data=NO_DATA,
        learning_rate=options["lr"],
        warmup_steps=options["warmup"],
        averaging=parse_averaging(
            every,
            codec,
            rank,
            by_line=options["average_by_line"],
            robust=options["robust"],
            alternating=options["average_alternating"],
            **fine,
        ),
        compression=parse_compression(options["compress"], options["topk_ratio"], feedback=options["topk_feedback"]),
        **{name: options[name] for name in AS_THEY_ARE},
    )


def _say_where_it_stands(done: int, settings: Run, out: Path | None, swarm: str, *, local: bool, as_json: bool) -> None:
    """The last line, on standard error where standard output is for scripts."""
    saved = f"; the model is in {out}" if out is not None else ""
    if done < settings.steps:
        goes_on = "" if local else "; the swarm keeps them, and the same command goes on"
        fail(f"stopped after {done} of {counted(settings.steps, 'step')}{goes_on}{saved}")
    next_step = "" if local else f". Next: swarmnode export {shlex.quote(swarm)} OUT"
    say(f"Done: {counted(done, 'step')}{saved}{next_step}", err=as_json)
