"""Model that a swarm is founded on: a checkpoint, the fresh weights of a config, or a module that was exported as a graph.

generation_config.json: the sampling defaults of a checkpoint's makers, and the settings in it that a swarm does not
support.

A key is either read, or refused when the swarm is founded because it asks for an unsupported setting, or without effect on
the text (docs/models.md lists them).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from swarmnode.codec.body import MAX_STOP_IDS, MAX_TEMPERATURE, MAX_TOKEN_ID
from swarmnode.codec.sampling import MAX_REPETITION_PENALTY
from swarmnode.compute.model.checkpoint import Checkpoint, load_config
from swarmnode.compute.model.hub import HubCheckpoint, open_checkpoint
from swarmnode.compute.model.stack import (
    ANCHOR,
    ANCHOR_MAP,
    CONFIG_KEY,
    STAGES,
    THIN_IN,
    THIN_OUT,
    Bottleneck,
    boundaries,
    digit_count,
    expected_states,
    principal_directions,
)
from swarmnode.compute.packing.tensor_entry import read_json
from swarmnode.counting import format_bytes
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.swarm.records.manifest import CAUSAL_LM, GENERATE, GRAPH, INFER, MAX_NAME_CHARS, MAX_UNITS, ModelInfo
from swarmnode.swarm.storage.content import (
    CONFIG_NAME,
    GENERATION_NAME,
    INDEX_NAME,
    SMALL_NAMES,
    TOKENIZER_NAMES,
    Progress,
    checkpoint_files,
    has_tokenizer,
    title_of,
)
from swarmnode.swarm.storage.small_files import check_free, check_space, new_folder

if TYPE_CHECKING:
    from swarmnode.compute.gguf.gguf import GgufCheckpoint
    from swarmnode.compute.graph.graph import Graph
    from swarmnode.compute.model.hub import HubGguf


READS_TEXT = "each stage sees all text, for its anchors; with --anchor 0 only the first and the last stage do"
WINDOW, WINDOWS = 128, 128  # tokens of a forward pass that chooses a bottleneck's first projections and anchors
_LAYER = re.compile(r"((?:.*\.)?)\d+\.")

BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (math.ulp(0.0), 1),
    "top_k": (0, MAX_TOKEN_ID),
    "min_p": (0, 1),
    "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
NOT_DONE: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "top_h", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("guidance_scale", "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), None),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "constraints", "stop_strings"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "token_healing", "dola_layers"), None),
}
"""Settings that change texts and are unsupported, with the value that turns each off; null, false, 0 and empty lists do so too."""


def check_generation_config(folder: Path) -> None:
    """Check a folder's generation_config.json, if it has one.

    Raises CheckpointError if it asks for an unsupported setting, or if a number or token id is out of bounds.
    """
    file = folder / GENERATION_NAME
    if not file.is_file():
        return
    values = read_json(file)
    for name, off in NOT_DONE.items():
        value = values.get(name)
        if value and value != off:
            raise CheckpointError(
                f"{file}: {name} is {str(value)[:40]}, which swarmnode does not support: remove it from the file"
            )
    for name, (least, most) in BOUNDS.items():
        value = values.get(name)
        if value is not None and not (type(value) in (int, float) and least <= value <= most):
            raise CheckpointError(f"{file}: {name} is {str(value)[:40]}, not a number from {least:g} to {most:g}")
    ends = values.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if len(listed) > MAX_STOP_IDS or not all(type(end) is int and 0 <= end <= MAX_TOKEN_ID for end in listed):
        raise CheckpointError(
            f"{file}: eos_token_id is neither a token id nor a list of up to {MAX_STOP_IDS} token ids"
        )


BYTES = 256
# of a GGUF file on the hub, tried in turn: its vocabulary takes most of them
HEADER_BYTES = (8 << 20, 32 << 20, 128 << 20)


def open_model(
    model: str, out: Path, *, packs: bool = False, force: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Open a checkpoint from a local folder, a GGUF file or a hub id, which for a GGUF file is organisation/model:QUANT.

    Quantised weights are dequantised into the folder `out` (all files of a quantised hub model are downloaded), and the
    checkpoint there is returned. With `packs`, those of a GGUF file stay where they are, and `out` gets an index of them; a
    quantised checkpoint that generates text is returned as it is, and `out` is not made.

    Raises UsageError if `model` is neither a folder, a GGUF file nor a hub id, or if `out` is not free; CheckpointError if
    it is damaged or its quantisation is not supported; LocalError if the disk is too small.
    """
    from swarmnode.compute.gguf.gguf import SUFFIX, GgufCheckpoint
    from swarmnode.compute.model.checkpoint_writer import QuantisedCheckpoint
    from swarmnode.compute.model.family import settings_of

    path = Path(model).expanduser()
    gguf = local_gguf(model)
    source: GgufCheckpoint | QuantisedCheckpoint
    if gguf is not None:
        source = GgufCheckpoint(gguf)
    else:
        repository = model.partition("@")[0]
        if not path.is_dir() and (
            repository.count("/") != 1 or model.startswith(("/", ".", "~")) or model.endswith(SUFFIX)
        ):
            raise UsageError(
                f"{model}: no such folder or GGUF file (and a hub id has the form organisation/model, "
                "or organisation/model@revision)"
            )
        checkpoint = open_checkpoint(model)
        settings = settings_of(checkpoint.config)
        if checkpoint.packed_file is not None and not packs:
            raise UsageError(f"{model}: its weights are packed, and stay so: give the model that it was made of")
        if settings is None:
            return checkpoint
        source = QuantisedCheckpoint(checkpoint, settings)
        tensors = checkpoint.open_slices(checkpoint.tensor_names)  # of the hub: every shard, with a progress bar
        if packs and checkpoint.quantised is not None and _task_of(checkpoint) == GENERATE:
            checkpoint.quantised.check(tensors, progress)
            return checkpoint
    if path.exists() and out.exists() and path.samefile(out):
        raise UsageError(f"{model} is the folder for its plain weights: choose another name for the swarm")
    check_free(out, force=force)
    write = source.write
    if packs and isinstance(source, GgufCheckpoint):
        write = source.pack
    else:
        check_space(out, source.plain_bytes)
    with new_folder(out, force=force) as partial:
        write(partial, progress)
    return Checkpoint(out)


def local_gguf(model: str) -> Path | None:
    """Return the GGUF file that `model` names, a file or a folder here, or a model on the hub, which is fetched; None if it names
    none. Raises UsageError, CheckpointError."""
    from swarmnode.compute.gguf.gguf import find_gguf
    from swarmnode.compute.model.hub import find_on_hub

    path = Path(model).expanduser()
    if path.exists():
        return find_gguf(path)
    named = find_on_hub(model)
    return None if named is None else named.fetch()


@dataclass(frozen=True)
class ModelSource:
    """A model to found a swarm on: the folder with the weights, the files of it that count, and the model's description.

    `vocabulary` is the size of a language model's vocabulary, None if unknown. `remarks` are for the founder. `original` is
    the path or hub id of the checkpoint that the folder was made from, quantised or an encoder's; else empty. `quantised`: the
    folder is a quantised checkpoint, whose weights stay packed. `bottleneck`: the numbers of a position between units; 0: the
    hidden size.
    """

    folder: Path
    files: tuple[Path, ...]
    kind: str
    model: ModelInfo
    vocabulary: int | None = None
    remarks: tuple[str, ...] = ()
    original: str = ""
    quantised: bool = False
    bottleneck: int = 0
    anchor: int = 0

    @classmethod
    def of_graph(
        cls,
        folder: Path,
        model: ModelInfo,
        *,
        vocabulary: int | None = None,
        remarks: tuple[str, ...] = (),
        original: str = "",
    ) -> ModelSource:
        """Describe a graph that was written into `folder`; the checkpoint files beside it are shared by the swarm, too."""
        return cls(folder, tuple(checkpoint_files(folder)), GRAPH, model, vocabulary, remarks, original)


def from_model(
    model: str,
    out: Path,
    *,
    task: str | None = None,
    packs: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ModelSource:
    """Open the model for a `task`; None takes the task from its config. A model that generates text is used as by
    `from_checkpoint`; any other is exported as a graph into the folder `out`.

    Raises CheckpointError or UsageError if it is damaged, unknown or cannot be exported, LocalError if the disk is too
    small.
    """
    packs = packs and task in (None, GENERATE)
    checkpoint = open_model(model, out, packs=packs, force=force, progress=progress)
    task = task or _task_of(checkpoint)
    if task != GENERATE:
        from swarmnode.founding.graph_source import write_encoder

        encoder = write_encoder(checkpoint, task, out, force=force)
        encoder = msgspec.structs.replace(encoder, title=title_of(model)[:MAX_NAME_CHARS] or UNSET)
        vocabulary = getattr(checkpoint.config, "vocab_size", None)
        return ModelSource.of_graph(out, encoder, vocabulary=vocabulary, original=_place_of(model))
    return _of_language_model(checkpoint, model, out)


def outline(model: str, folder: Path) -> tuple[Checkpoint | Graph, str]:
    """Return the model that a swarm would be founded on, also of a config alone, without writing its weights, and its task.

    The model is a graph that is cut into units, or, if it generates text, its checkpoint with config and headers. The config of a
    GGUF file is written into the empty `folder`. Raises CheckpointError or UsageError if the model is unknown or cannot be split or
    exported.
    """
    from swarmnode.compute.gguf.gguf import SUFFIX, GgufCheckpoint, find_gguf
    from swarmnode.compute.graph.exporting.module_export import PROGRAM_SUFFIX, export_source
    from swarmnode.compute.graph.partition import UNITS, partition
    from swarmnode.compute.model.fresh import FreshCheckpoint, config_alone
    from swarmnode.compute.model.hub import find_on_hub
    from swarmnode.founding import graph_source

    path = Path(model).expanduser()
    if (gguf := find_gguf(path)) is not None:
        return GgufCheckpoint(gguf).outline(folder), GENERATE
    if not path.exists() and (named := find_on_hub(model)) is not None:
        return _gguf_of_hub(named, folder).outline(folder), GENERATE
    if model.endswith(SUFFIX):
        raise UsageError(
            f"{model}: no such GGUF file (on the hub: organisation/model:QUANT or organisation/model/FILE.gguf)"
        )
    if (":" in model or model.endswith(PROGRAM_SUFFIX)) and not Path(model).is_dir():
        return partition(export_source(model, trains=False).graph, UNITS).graph, INFER
    if (alone := config_alone(path)) is not None:
        return FreshCheckpoint(alone), GENERATE
    checkpoint = open_checkpoint(model)
    task = _task_of(checkpoint)
    if task != GENERATE:
        return graph_source.outline(checkpoint, task), task
    checkpoint.family  # noqa: B018  # raises if it cannot be split
    return checkpoint, task


def _gguf_of_hub(named: HubGguf, folder: Path) -> GgufCheckpoint:
    """Return a GGUF model of the hub after fetching the headers of its files into `folder`. Raises CheckpointError."""
    from swarmnode.compute.gguf.gguf import GgufCheckpoint

    for size in HEADER_BYTES:
        copy = named.fetch_beginnings(size, folder)
        try:
            read = GgufCheckpoint(copy)
        except CheckpointError:
            if size == HEADER_BYTES[-1] or copy.stat().st_size <= size:
                raise
            continue
        if read.header_bytes <= size:
            return read
    raise CheckpointError(
        f"{named.files[0]}: its header is over the limit of {HEADER_BYTES[-1] >> 20} MiB; download the file and give its path"
    )


def from_checkpoint(
    model: str,
    out: Path,
    *,
    byte_level: bool = False,
    packs: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ModelSource:
    """Open a checkpoint that generates text from a local folder, a GGUF file, or a hub id, which is downloaded.

    Quantised weights are written dequantised into the folder `out`; with `packs` they are used as they are.
    `byte_level` leaves out the tokenizer.

    Raises CheckpointError if the checkpoint is damaged or its family cannot be split, UsageError if there is none,
    LocalError if the disk is too small.
    """
    checkpoint = open_model(model, out, packs=packs, force=force, progress=progress)
    return _of_language_model(checkpoint, model, out, byte_level=byte_level)


def _of_language_model(
    checkpoint: Checkpoint, model: str, out: Path, *, byte_level: bool = False, was_plain: bool = False
) -> ModelSource:
    """Describe the plain checkpoint that was asked for as `model`. It lies in the folder `out` if it was created there, or
    dequantised unless it `was_plain`.

    Raises CheckpointError if its tensors do not match its config, its family cannot be split, its tokenizer needs code of
    its own, or its generation_config.json asks for an unsupported setting.
    """
    from swarmnode.compute.model.assemble import check_tensors
    from swarmnode.compute.model.fresh import position_limit
    from swarmnode.compute.serving.loading import check_family

    check_generation_config(checkpoint.path)
    _check_tokenizer(checkpoint.path)
    check_tensors(checkpoint)
    check_family(checkpoint.family)
    positions = position_limit(checkpoint.family)
    if isinstance(checkpoint, HubCheckpoint):
        checkpoint.open_slices(checkpoint.tensor_names)  # fetches every shard, with a progress bar
    folder, named = Path(checkpoint.path), Path(model).expanduser()
    made = folder == out != named
    files = checkpoint_files(folder)
    return ModelSource(
        folder=folder,
        files=tuple(file for file in files if not (byte_level and file.name in TOKENIZER_NAMES)),
        kind=CAUSAL_LM,
        model=ModelInfo(
            family=checkpoint.config.model_type,
            units=checkpoint.units,
            hidden=checkpoint.config.hidden_size,
            hub_id=checkpoint.repository if isinstance(checkpoint, HubCheckpoint) else None,
            revision=getattr(checkpoint, "revision", None),
            positions=positions or 0,
            title=title_of(model)[:MAX_NAME_CHARS] or UNSET if named != out else UNSET,
        ),
        bottleneck=0 if checkpoint.family.bottleneck is None else checkpoint.family.bottleneck.rank,
        anchor=0 if checkpoint.family.bottleneck is None else checkpoint.family.bottleneck.anchor,
        vocabulary=getattr(checkpoint.config, "vocab_size", None),
        quantised=checkpoint.quantised is not None,
        original=_place_of(model) if made else "",
        remarks=(
            *(_remarks(checkpoint, model, out) if made and not was_plain else []),
            *(_stray_tokens(folder / CONFIG_NAME) if made or folder != out else []),
            *([READS_TEXT] if digit_count(checkpoint.config) else []),
        ),
    )


def _stray_tokens(config: Path) -> Iterator[str]:
    """Yield a remark if a config names special tokens beyond its vocabulary, which the model cannot write."""
    values = read_json(config)
    vocabulary = values.get("vocab_size")
    names = ("bos_token_id", "eos_token_id")
    found = [
        name for name in names if isinstance(token := values.get(name), int) and token >= (vocabulary or token + 1)
    ]
    if found:
        yield f"{config} names {' and '.join(found)} beyond the vocabulary of {vocabulary} tokens: texts do not end there"


def _place_of(model: str) -> str:
    """Return the absolute path of the user's model, or its hub id."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _remarks(checkpoint: Checkpoint, model: str, out: Path) -> tuple[str, ...]:
    """Return what the founder should know of the quantised weights of `model`."""
    if not checkpoint.packed_file:
        return (f"the weights of {model} are quantised: {out.name} has the dequantised ones",)
    kept = f"{model} is served from where it is: do not move or change it while the swarm lives"
    if not Path(model).expanduser().exists():
        kept = f"{model} is served from the cache of huggingface_hub: do not clear that while the swarm lives"
    plain = sum(entry.nbytes for entry in checkpoint.entries.values() if not entry.is_packed)
    if 10 * plain < sum(entry.nbytes for entry in checkpoint.entries.values()):
        return (kept,)
    return kept, f"{format_bytes(plain)} of its weights are in formats that are dequantised, into {out.name}"


def _check_tokenizer(folder: Path) -> None:
    """Raise CheckpointError if the tokenizer in a folder needs code of its own."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and not (folder / "tokenizer.json").is_file():
        named = read_json(config).get("auto_map")
        if isinstance(named, list) or (isinstance(named, dict) and named.get("AutoTokenizer")):
            raise CheckpointError(
                f"{config}: the tokenizer needs code of its own (auto_map), which swarmnode never runs"
            )


def from_config(
    config: Path,
    out: Path,
    *,
    seed: int = 0,
    byte_level: bool = False,
    bottleneck: int | None = None,
    stage_layers: int | None = None,
    anchor: int | None = None,
    force: bool = False,
) -> ModelSource:
    """Write fresh weights for a transformers config (a folder, or its config.json) and its tokenizer into the folder `out`. With
    a `bottleneck` only so many numbers cross between stages of `stage_layers` layers, beside the token's id if
    `anchor` is not 0, the size of the vector of a token (None: the usual one).

    A model that cannot be split at its layers, such as a recurrent one, is written as a graph: it can be trained, but not
    served. Raises UsageError if there is no config, CheckpointError if its family cannot be split, LocalError if the disk
    fails.
    """
    from swarmnode.compute.model.family import check_trains_at_layers, family_of, trains_whole
    from swarmnode.compute.model.fresh import write_fresh_model
    from swarmnode.compute.serving.loading import check_family
    from swarmnode.founding.graph_source import write_language_graph

    folder = config.parent if config.name == CONFIG_NAME else config
    if not (folder / CONFIG_NAME).is_file():
        raise UsageError(f"{folder} has no {CONFIG_NAME}; give a folder with the config of a transformers model")
    tokenizer = [name for name in TOKENIZER_NAMES if (folder / name).is_file() and not byte_level]
    described = load_config(folder / CONFIG_NAME)
    check_vocabulary(getattr(described, "vocab_size", None), tokenizer)
    whole = trains_whole(described)
    if whole and bottleneck is not None:
        raise UsageError("--bottleneck: this model is trained as a graph, not in layers; leave the option out")
    if bottleneck is None and getattr(described, CONFIG_KEY, None) is not None:
        raise UsageError(
            f"{folder / CONFIG_NAME} is of a model with a bottleneck: take {CONFIG_KEY} out of it, and give --bottleneck R"
        )
    narrow = None if bottleneck is None else _bottleneck(described, bottleneck, stage_layers, anchor)
    if not whole:
        check_trains_at_layers(family := family_of(described))
        check_family(family)
    with new_folder(out, force=force) as partial:
        made = write_language_graph(described, partial, seed) if whole else None
        if made is None:
            write_fresh_model(folder, partial, seed, narrow)
        for name in (*tokenizer, *([CONFIG_NAME] if whole else [])):
            shutil.copyfile(folder / name, partial / name)
    if made is None:
        return _of_language_model(Checkpoint(out), str(out), out)
    model = ModelInfo(family=described.model_type, units=made.graph.units, hidden=0)  # is trained as a graph
    return ModelSource.of_graph(out, model, vocabulary=getattr(described, "vocab_size", None), remarks=made.remarks)


def _bottleneck(config: Any, rank: int, stage_layers: int | None, anchor: int | None) -> Bottleneck:
    """Return the bottleneck of a model of this config. Raises UsageError if it cannot have that, or has one already."""
    if getattr(config, CONFIG_KEY, None) is not None:
        raise UsageError("--bottleneck: the model has one already; give the model without it")
    layers = -(-config.num_hidden_layers // STAGES) if stage_layers is None else stage_layers
    bottleneck = Bottleneck(rank, layers, int(config.hidden_size) if anchor is None and rank > 0 else anchor or 0)
    if fault := bottleneck.fault(config):
        option = {"stages": "stage-layers", "anchors": "anchor"}.get(fault.split()[0], "bottleneck")
        raise UsageError(f"--{option}: {fault}")
    return bottleneck


def with_bottleneck(
    model: str,
    out: Path,
    rank: int,
    read: Callable[[Path], Sequence[int]],
    *,
    stage_layers: int | None = None,
    anchor: int | None = None,
    byte_level: bool = False,
    force: bool = False,
) -> ModelSource:
    """Write a checkpoint that generates text with a bottleneck into the folder `out`, to be trained on.

    Only `rank` numbers cross between stages of `stage_layers` layers (None: a fifth of all). `read` returns the tokens of a sample
    for the model's folder; the whole model's hidden states on the first of them decide with which values training begins.
    Tokens' vectors of `anchor` numbers (None: the usual size) begin as what the token alone lets one expect of its state, by a
    linear regression, and projections as the principal directions of the rest. Raises as `from_checkpoint`.
    """
    import torch

    from swarmnode.compute.model.checkpoint_writer import ShardWriter
    from swarmnode.compute.model.family import check_trains_at_layers
    from swarmnode.compute.model.fresh import position_limit
    from swarmnode.compute.model.span import ModelSpan, load_model

    plain = out.with_name(f".{out.name}.plain")  # of a quantised model, until the projections are beside its weights
    checkpoint = open_model(model, plain, force=True)
    bottleneck, family = _bottleneck(checkpoint.config, rank, stage_layers, anchor), checkpoint.family
    check_trains_at_layers(family)
    ids, length = read(Path(checkpoint.path)), min(WINDOW, position_limit(family) or WINDOW)
    rows = min(WINDOWS, len(ids) // length)
    if not rows:
        raise UsageError(f"--sample: a text of {len(ids)} tokens is too short; give at least {length}")
    span = ModelSpan(family, load_model(checkpoint, 0, checkpoint.units, dtype=torch.float32), 0, checkpoint.units)
    layer_name = next(found for name in checkpoint.entries if (found := _LAYER.match(name)))
    projections = dict[str, torch.Tensor]()
    ids_BT, anchor = torch.tensor(ids[: rows * length]).view(rows, length), bottleneck.anchor
    states, done = ids_BT, 0
    with torch.inference_mode():
        embedding_VE = span.model.get_input_embeddings().weight
        for before in boundaries(bottleneck, family.layer_count):
            states = span.forward(states, cache=None, start=done, end=before + 2)
            behind, hidden, done = f"{layer_name[1]}{before + 1}", states.shape[-1], before + 2
            rest = states
            if anchor:
                expected_VH = expected_states(states, ids_BT, embedding_VE)
                rest = states - expected_VH[ids_BT]
            rows_RH = principal_directions(rest, rank)
            projections[f"{layer_name[1]}{before}.{THIN_OUT}.weight"] = rows_RH
            projections[f"{behind}.{THIN_IN}.weight"] = rows_RH.T.contiguous()
            states = states @ rows_RH.T @ rows_RH
            if anchor:
                anchors_VH = expected_VH - expected_VH @ rows_RH.T @ rows_RH  # the code tells the rest
                if anchor < hidden:
                    rows_AH = principal_directions(anchors_VH[ids_BT], anchor)
                    projections[f"{behind}.{ANCHOR_MAP}.weight"] = rows_AH.T.contiguous()
                    anchors_VA = anchors_VH @ rows_AH.T
                    anchors_VH = anchors_VA @ rows_AH
                projections[f"{behind}.{ANCHOR}.weight"] = anchors_VA if anchor < hidden else anchors_VH
                states = states + anchors_VH[ids_BT]
    values = read_json(checkpoint.path / CONFIG_NAME)
    with new_folder(out, force=force) as partial:
        for file in checkpoint_files(Path(checkpoint.path)):
            if file.name in SMALL_NAMES - {INDEX_NAME, CONFIG_NAME}:
                shutil.copyfile(file, partial / file.name)
        (partial / CONFIG_NAME).write_text(json.dumps({**values, CONFIG_KEY: bottleneck.described()}, indent=2))
        writer = ShardWriter(partial)
        for name, piece in checkpoint.open_slices(checkpoint.tensor_names).items():
            writer.add(name, piece[...])
        for name, tensor in projections.items():
            writer.add(name, tensor)
        writer.close()
    shutil.rmtree(plain, ignore_errors=True)
    was_plain = Path(checkpoint.path) != plain
    return _of_language_model(Checkpoint(out), model, out, byte_level=byte_level, was_plain=was_plain)


def from_module(
    spec: str, out: Path, *, units: int | None = None, trains: bool = True, force: bool = False
) -> ModelSource:
    """Export a factory "package.module:function", or take an exported program "file.pt2", and write it as a graph into the
    folder `out`.

    With `trains` the graph leads from inputs to the loss, else from inputs to outputs. `units` is the approximate number of
    units; None takes the default. Raises UsageError if `units` is out of range, or, with operator and line, if the module
    cannot be exported.
    """
    from swarmnode.compute.graph.boundary import Layout, check_travel
    from swarmnode.compute.graph.exporting.module_export import export_source, module_name
    from swarmnode.compute.graph.exporting.reader import Exported
    from swarmnode.compute.graph.partition import UNITS, partition
    from swarmnode.compute.graph.serialise import write_graph

    if units is not None and not 1 <= units <= MAX_UNITS:
        raise UsageError(f"--units {units}: a model can be cut into 1 to {MAX_UNITS} layers")
    exported = export_source(spec, trains=trains, check=trains)
    cut = partition(exported.graph, units or UNITS)
    if not trains:
        check_travel(Layout(cut.graph))
    with new_folder(out, force=force) as partial:
        write_graph(Exported(cut.graph, exported.weights), partial)
    family = "".join(filter(str.isprintable, module_name(spec)))[:MAX_NAME_CHARS] or "graph"
    model = ModelInfo(family=family, units=cut.graph.units, hidden=0)
    return ModelSource.of_graph(out, model, remarks=(*exported.remarks, *cut.remarks))


def check_vocabulary(vocabulary: int | None, files: Iterable[str]) -> None:
    """Raise UsageError if the model needs byte tokens because `files` contains no tokenizer, but its vocabulary is smaller
    than BYTES."""
    if vocabulary is not None and vocabulary < BYTES and not has_tokenizer(files):
        raise UsageError(
            f"without a tokenizer each byte of the text is a token, so the model needs a vocabulary of at least {BYTES}; "
            f"this one has {vocabulary}: raise vocab_size, or put a tokenizer into the folder"
        )


def _task_of(checkpoint: Checkpoint) -> str:
    """Return the checkpoint's task, from its config and the files beside it."""
    from swarmnode.compute.model.encoder import MODULES_FILE, task_of

    return task_of(checkpoint.config, pools=checkpoint.small_file(MODULES_FILE) is not None)
