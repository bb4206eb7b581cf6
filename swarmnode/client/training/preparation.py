"""Preparation of a training: from the user's data and settings, and the swarm's small files, to a run and its batches."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.client.tokenizer import Tokenizer, stop_ids
from swarmnode.compute.graph.boundary import array_batches, token_length, token_windows
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import causal_class
from swarmnode.compute.training.datasets.batches import (
    ArrayBatches,
    Batches,
    SampleBatches,
    WithHeldOut,
    passed_over,
    token_batches,
)
from swarmnode.compute.training.lm import can_pack
from swarmnode.compute.training.losses import check_routers
from swarmnode.compute.training.segment import check_objective
from swarmnode.data.formats import PAIR, TEXT
from swarmnode.data.rows import make_rows, read_arrays
from swarmnode.data.samples import (
    ARRAYS,
    DataNotes,
    DataRules,
    LearntTokens,
    TokenSample,
    read_samples,
    sample_kind,
    shown,
    steps_of,
    with_ends,
)
from swarmnode.errors import UsageError
from swarmnode.plan.compression import is_allowed
from swarmnode.swarm.records.manifest import CAUSAL_LM, TRAIN, Manifest
from swarmnode.swarm.records.run import MAX_MICROBATCHES, RECIPE, SCHEDULES, Recipe, Run, check_run
from swarmnode.swarm.storage.content import has_tokenizer

NO_DATA = bytes(32)
SEQUENCE = 128  # tokens of a sample, by default
MICROBATCH = 4  # samples
MOST_NAMED = 12  # of what is passed over

Prepared = tuple[Run, Batches]


def prepare(
    manifest: Manifest, folder: Path, data: Path, settings: Run, rules: DataRules = DataRules(), *, begins: bool = True
) -> Prepared:
    """Read the data for the model whose config and tokenizer, or graph, are in `folder`, and complete the settings.

    A `sequence` or `microbatch` of 0 is replaced by a default, and the steps by those of `rules.epochs`. Without `begins`, texts
    do not begin with the model's BOS, as in runs of older versions. Raises UsageError if model, data and settings do not fit.
    """
    check_trains(manifest)
    check_compression(manifest, settings.compression.rule)
    if manifest.kind == CAUSAL_LM:
        run, batches = _for_text(manifest, folder, data, settings, rules, begins=begins)
    else:
        run, batches = _for_graph(folder, data, settings, rules)
    run = _completed(run, batches, rules)
    if not run.weight_decay:
        run = _without_recipe(run) or run  # so that machines of earlier versions can take part
        check_run(run)
    return run, batches


def prepare_text(manifest: Manifest, folder: Path, data: Path, settings: Run, rules: DataRules) -> Prepared:
    """Read the data for an adapter of the language model whose config and tokenizer are in `folder`, and complete the settings.

    Raises UsageError if model, data and settings do not fit.
    """
    run, batches = _for_text(manifest, folder, data, settings, rules, begins=True)
    return _completed(run, batches, rules), batches


def _completed(run: Run, batches: Batches, rules: DataRules) -> Run:
    """Return a run with the fingerprint of its data, and the steps of its epochs. Raises UsageError if it is not valid."""
    samples = batches.samples(run)  # raises if there is not one sample
    steps = steps_of(rules.epochs, samples, run.batch) if rules.epochs else run.steps
    run = msgspec.structs.replace(run, data=batches.fingerprint, steps=steps)
    check_run(run)
    return run


def _without_recipe(run: Run) -> Run | None:
    """Return a run of the same schedule without a recipe, as in earlier versions; None if the recipe has more in it."""
    schedule = run.known_recipe.schedule
    if not run.has_recipe or run.recipe != Recipe(schedule) or schedule not in SCHEDULES:
        return None
    return msgspec.structs.replace(run, schedule=schedule, recipe=msgspec.UNSET)


def as_older_versions(manifest: Manifest, folder: Path, data: Path, settings: Run, rules: DataRules) -> list[Prepared]:
    """Return what earlier versions made of the same data and settings, so that a run that one of them began can go on.

    They balanced the experts of all layers together. Older ones had no recipe and counted all microbatches the same, and no text
    began with BOS. Empty if the settings are beyond them.
    """
    found = []
    for begins in (True, False):
        run, batches = prepare(manifest, folder, data, settings, rules, begins=begins)
        if run.has_recipe:
            if run.known_recipe.balance_by_layer:  # earlier versions balanced all layers together
                recipe = msgspec.structs.replace(run.known_recipe, balance_by_layer=msgspec.UNSET)
                found.append((msgspec.structs.replace(run, recipe=recipe), batches))
            earlier = _without_recipe(run)
            if earlier is None:
                continue
            run = earlier
        found += [(run, batches), (msgspec.structs.replace(run, label_weights=msgspec.UNSET), batches)]
    return found


def check_early(data: Path, settings: Run, log: Path | None = None) -> None:
    """Run the checks that need no swarm. Raises UsageError if the data cannot be read, the settings are not valid, or the `log` of
    steps would overwrite the data."""
    is_folder = data.is_dir()
    if not is_folder and not data.is_file():
        raise UsageError(f"{data}: no such file or folder; check its name")
    if not os.access(data, os.R_OK):
        raise UsageError(f"{data} cannot be read: Permission denied; change its permissions")
    if not (any(data.iterdir()) if is_folder else data.stat().st_size):
        raise UsageError(f"{data} is empty: there is nothing to train on; give data with samples")
    if log is not None and log.exists() and log.samefile(data):
        raise UsageError(f"--log {log}: these are the data of the training; choose another file")
    check_run(_with(settings, settings.sequence, settings.microbatch or 1))


def check_trains(manifest: Manifest) -> None:
    """Raise UsageError if the swarm only serves its model and does not train it."""
    if manifest.mode != TRAIN:
        raise UsageError(
            f"the swarm {manifest.name} serves its model; to train, create a swarm with `create --mode train`"
        )


def check_exports(manifest: Manifest) -> None:
    """Raise UsageError if the swarm's model has a bottleneck, for which transformers has no class."""
    if manifest.bottleneck:
        raise UsageError(
            f"the model of {manifest.name} has a bottleneck (`create --bottleneck`), which no class of transformers computes, "
            "so it cannot be written as a checkpoint; it stays in the swarm, where it can be trained, evaluated and served"
        )


def check_compression(manifest: Manifest, rule: str) -> None:
    """Raise UsageError if the swarm does not allow the compression `rule` between its stages."""
    if not is_allowed(rule, manifest.codecs):
        raise UsageError(f"--compress {rule}: the swarm {manifest.name} does not allow it; choose auto")


def _for_text(
    manifest: Manifest, folder: Path, data: Path, settings: Run, rules: DataRules, *, begins: bool
) -> Prepared:
    config = load_config(folder / CONFIG_FILE)
    # Models without a table of positions take more.
    usual = getattr(config, "max_position_embeddings", None) or SEQUENCE
    sequence = settings.sequence or min(SEQUENCE, usual)
    positions = manifest.model.positions
    if positions and sequence > positions:
        raise UsageError(f"--sequence {sequence} is more than the model's {positions} positions: lower it")
    if settings.known_recipe.watches_routers:
        check_routers(causal_class(config))
    run = _with(settings, sequence, settings.microbatch or min(MICROBATCH, settings.batch))
    check_run(run)  # before reading the data, which may take long
    tokenizer = Tokenizer(folder) if has_tokenizer(file.name for file in manifest.files) else None
    read = functools.partial(_read_language, tokenizer, folder, config, sequence, rules, begins=begins)
    batches = read(data)
    if isinstance(batches, SampleBatches):
        run = msgspec.structs.replace(run, label_weights=True)
    return _evaluated(run, batches, rules, read) if rules.evaluate_every else (run, batches)


def _read_language(
    own: Tokenizer | None, folder: Path, config: Any, sequence: int, rules: DataRules, data: Path, *, begins: bool
) -> Batches:
    """Read text or samples for a language model. `begins`: each document of a text begins with the tokenizer's first token, if it
    has one. Raises UsageError if they do not fit the model, or if samples of text are given to a model without a tokenizer."""
    kind, pack = sample_kind(data), rules.packs and can_pack(config, sequence)
    if kind == ARRAYS:  # of token ids
        return SampleBatches(make_rows(read_arrays(data, sequence), sequence, pack=pack), config.vocab_size)
    if own is None:
        if kind != TEXT:
            raise UsageError(
                f"{data} holds samples, which need a tokenizer, and this model has bytes as tokens: give text"
            )
        return token_batches(data, config.vocab_size)
    decode = functools.partial(own.decode, special_tokens=True)
    if kind == TEXT:
        begin = own.begin if begins else None
        text = token_batches(data, config.vocab_size, own.encode_document, own.separator, begin)
        text.notes = _passed_over_note(passed_over(data))
        return text
    notes, first = DataNotes(), list[str]()
    samples = read_samples(data, own, rules.loss, notes)
    stops = stop_ids(folder, own)
    answers = kind not in (PAIR, TEXT) and rules.loss is LearntTokens.ANSWERS
    if answers:
        end = (own.separator if own.separator in stops else next(iter(stops), None)) if rules.ends_answers else None
        samples = with_ends(samples, stops, end, notes)

    def showing() -> Iterator[TokenSample]:  # the first samples are also written down, as the model sees them
        for number, sample in enumerate(samples, 1):
            if number <= rules.shown:
                first.append(f"Sample {number}, learnt in ⟦ ⟧: {shown(sample, decode)}")
            yield sample

    batches = SampleBatches(make_rows(showing(), sequence, pack=pack), config.vocab_size)
    batches.notes = (*first, *_passed_over_note(notes.passed_over))
    if answers and not notes.teaches_end:
        named = ", ".join(repr(own.decode_token(stop)) for stop in stops[:3])
        puts = f"--end-answers (in Python end_answers=True) puts its stop token ({named}) behind the last answer"
        fix = puts if stops else "the model has no stop token"
        batches.notes += (f"No label teaches the model to stop: its chat template ends answers otherwise; {fix}.",)
    return batches


def _passed_over_note(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note on fields and files that are passed over; empty if there are none."""
    listed = sorted(names)
    rest = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return (f"Passed over: {', '.join(listed[:MOST_NAMED])}{rest}.",) if listed else ()


def _evaluated(run: Run, batches: Batches, rules: DataRules, read: Callable[[Path], Batches]) -> Prepared:
    """Return a run that evaluates on held-out data, and its batches. Raises UsageError if these are too few, or of another kind."""
    if rules.held_out is None:
        trained, held_out = batches.split(rules.held_out_share, run)
        trained.notes = batches.notes
    else:
        trained, held_out = batches, read(rules.held_out)
    if type(trained) is not type(held_out):
        raise UsageError("--eval-data is of another kind than --data: give both as text, or both as samples")
    rows = held_out.samples(run)
    count = min(rows // run.microbatch, MAX_MICROBATCHES - run.microbatches)
    if not count:
        raise UsageError(
            f"the held-out data fill {rows} rows, fewer than a microbatch of {run.microbatch} or more than fit into a step; "
            "give more of them, or another --microbatch"
        )
    recipe = msgspec.structs.replace(run.known_recipe, evaluate_every=rules.evaluate_every, evaluation=count)
    run = msgspec.structs.replace(run, schedule=RECIPE, recipe=recipe)
    return run, WithHeldOut(trained, held_out)


def _for_graph(folder: Path, data: Path, settings: Run, rules: DataRules) -> Prepared:
    graph = read_graph(folder)
    if rules.evaluate_every:
        raise UsageError("held-out data are for language models that are split at their layers: leave out --eval-every")
    check_objective(settings.known_recipe)
    kind = sample_kind(data)
    if kind not in (ARRAYS, TEXT):
        raise UsageError(
            f"{data} holds samples, which are for language models that are split at their layers: give a module text, or an "
            ".npz file of arrays"
        )
    length = token_length(graph) if kind == TEXT else 0
    if settings.sequence and settings.sequence != length:
        raise UsageError("--sequence is for language models, and this model's samples are rows of arrays: leave it out")
    microbatch = settings.microbatch or (min(MICROBATCH, settings.batch) if graph.any_batch else graph.batch)
    if not graph.any_batch and microbatch != graph.batch:
        raise UsageError(f"this model was exported for batches of {graph.batch} only: give --microbatch {graph.batch}")
    run = _with(settings, 0, microbatch)
    check_run(run)
    batches = _token_windows(folder, data, graph) if length else array_batches(data, graph)
    if batches.weighs_labels:
        run = msgspec.structs.replace(run, label_weights=True)
    return run, batches


def _token_windows(folder: Path, data: Path, graph: Graph) -> ArrayBatches:
    """Read the text for a language model that is trained as a graph, in rows of as many tokens as the graph takes."""
    vocabulary = load_config(folder / CONFIG_FILE).vocab_size
    if not has_tokenizer(file.name for file in folder.iterdir()):
        return token_windows(data, graph, vocabulary)
    tokenizer = Tokenizer(folder)
    return token_windows(data, graph, vocabulary, tokenizer.encode_document, tokenizer.separator)


def _with(settings: Run, sequence: int, microbatch: int) -> Run:
    return msgspec.structs.replace(settings, sequence=sequence, microbatch=microbatch)
