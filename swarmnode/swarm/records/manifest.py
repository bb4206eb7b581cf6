"""Manifest: the model and rules of a swarm. Its SHA-256 is the swarm's id (`protocol/records.md`).

The id is over the exact bytes that the founder wrote. A reader keeps these bytes and passes them on. It never encodes a
manifest again, because a newer one may have fields that this version does not know and would lose.

Least kind of products of packed weights that a swarm's manifest asks of its nodes, and the number formats that nodes announce.

What a node announces is its own word: audits compare what it computes with nodes of the same number format.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
from msgspec import UNSET, UnsetType

from swarmnode.codec.body import DECODE_ERRORS, MAX_ADAPTER_CHARS, first_broken
from swarmnode.codec.tensors import PLAIN_CODECS, Codec
from swarmnode.config import EQUAL, EXACT, FAST
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.storage.content import (
    CHUNK_BYTES,
    HASH_BYTES,
    MAX_FILE_BYTES,
    MAX_SMALL_BYTES,
    PACKED_NAME,
    FileContent,
    is_allowed_name,
    is_weights,
)

LEAST = (EXACT, FAST)
FLOAT32 = "float32"  # number format of exact products, and of weights that were dequantised to it
ROUNDED = "-"  # before the second rounding of a number format, as in bfloat16-nf4
MEANINGS = {
    EQUAL: "equal bits (--equal-bits)",
    EXACT: "exact products (float32)",
    FAST: "weights that are not rounded again",
}


def check_products(least: str, number_format: str, bits: bytes = b"") -> None:
    """Raise ProtocolError if a node that announces `number_format` and the class `bits` has not the products that `least` asks for:
    EXACT, FAST or EQUAL; any other text asks for nothing.

    EQUAL asks for a class of equal bits, EXACT for float32 throughout, FAST for packed weights or dequantised ones of any dtype.
    """
    enough = {
        EQUAL: bits != b"",
        EXACT: number_format == FLOAT32,
        FAST: number_format != "" and ROUNDED not in number_format,
    }
    if not enough.get(least, True):
        raise ProtocolError(
            f"it computes in {number_format or 'an unknown format'}, and this swarm asks for {MEANINGS[least]}"
        )


FORMAT = 1
ADAPTERS_FORMAT = 3  # of a manifest with adapters: readers without adapters must refuse it; 2 was never used
PACKED_FORMAT = 4  # of a manifest with packed weights, and perhaps adapters: older readers must refuse it
QUANTISED_FORMAT = 5  # as 4, but the packed weights are those of a quantised checkpoint of safetensors
EQUAL_FORMAT = 7  # of a manifest that asks for equal bits: older nodes could not have them, and must refuse it
BOTTLENECK_FORMAT = 6  # of a manifest with a bottleneck: older readers would compute another model, and must refuse it
ANCHOR_FORMAT = 8  # as 6, but boundaries have anchors
NARROW = (BOTTLENECK_FORMAT, ANCHOR_FORMAT)
ANY_PACKED = (PACKED_FORMAT, QUANTISED_FORMAT)
LATER_FORMATS = (ADAPTERS_FORMAT, *ANY_PACKED, *NARROW, EQUAL_FORMAT)
MAX_MANIFEST_BYTES = 1 << 20
MAX_FILES = 4096
MAX_NAME_CHARS = 64
MAX_UNITS = 4096
MAX_HIDDEN = 1 << 20
MAX_POSITIONS = 1 << 31
MAX_HUB_CHARS = 128  # of a hub id, and of its revision; the hub itself allows 96
_HUB_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.+/-]*", re.ASCII)
CAUSAL_LM = "causal_lm"
GRAPH = "graph"
GENERATE = "generate"
EMBED = "embed"
CLASSIFY = "classify"
INFER = "infer"
SERVE = "serve"
TRAIN = "train"
DEFAULT_CODECS = (Codec.NONE, Codec.BF16, Codec.FP16, Codec.INT8)  # of a manifest without codecs
SERVING_CODECS = (*DEFAULT_CODECS, Codec.INT4)
TRAINING_CODECS = (*SERVING_CODECS, Codec.TOPK)
OPEN = "open"
PRIVATE = "private"
OWNER_BYTES = 32
CREDIT = "credit"
PURPOSES = {
    GENERATE: "generates text",
    EMBED: "embeds texts",
    CLASSIFY: "classifies texts",
    INFER: "runs a module",
    TRAIN: "trains a module",
}
MAX_ADAPTERS = 256
MAX_CONFIG_BYTES = 64 << 10
MAX_CHAT_BYTES = 64 << 10  # the longest templates of known models have some 20 kB
MAX_WEIGHTS_BYTES = 1 << 36  # 64 GiB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name, and peft's `adapter_config.json` and `adapter_model.safetensors`, under names of their
    own in the swarm; and the template of its chats if that differs from the model's."""

    name: str
    config: FileContent
    weights: FileContent
    chat: FileContent | UnsetType = UNSET  # UNSET: not in the bytes, as before templates of adapters

    @property
    def files(self) -> tuple[FileContent, ...]:
        """The adapter's files: its config, its weights, and the template of its chats if it has one of its own."""
        return (self.config, self.weights, *(() if self.chat is UNSET else (self.chat,)))


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter may have this name, which becomes part of file names and of a model name in the API."""
    return len(name) <= MAX_ADAPTER_CHARS and _NAME.fullmatch(name) is not None


def file_names(name: str) -> tuple[str, str, str]:
    """Return the file names of an adapter's config, its weights and its chat template."""
    return f"adapter-{name}.json", f"adapter-{name}.safetensors", f"adapter-{name}.chat"


def is_valid(adapter: AdapterInfo) -> bool:
    """Return whether the adapter's name, file names and sizes are within their bounds."""
    bounds = (MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES, MAX_CHAT_BYTES)
    return is_adapter_name(adapter.name) and all(
        file.name == name and 0 < file.size <= bound and len(file.root) == HASH_BYTES
        for file, name, bound in zip(adapter.files, file_names(adapter.name), bounds, strict=False)
    )


class ModelInfo(msgspec.Struct, frozen=True):
    """The numbers of a model that peers need before they have its config.

    In a language model, `units` counts the embedding, every block and the head, and `hidden` is the width of the states
    between them. In a graph, `units` counts the graph's own layers and `hidden` is 0. `hub_id` names the checkpoint on
    the Hugging Face hub, at commit `revision`, if it is there. `positions` bounds a sequence if the model has a table
    of positions; 0 is no bound. `title` is the model's name without quantisation, as its founder's file or folder has it, for
    display; UNSET: unknown, not in the bytes.
    """

    family: str  # transformers' model_type; for a graph the founder's name for it
    units: int
    hidden: int
    hub_id: str | None = None
    revision: str | None = None
    positions: int = 0
    task: str | UnsetType = UNSET  # of a graph that turns a row of token ids into one vector: EMBED or CLASSIFY
    title: str | UnsetType = UNSET

    @property
    def label(self) -> str:
        """Name for people: the hub id, else the title, else the family."""
        return self.hub_id or self.title or self.family


class Manifest(msgspec.Struct, frozen=True):
    """All that the peers of a swarm agree on. Unknown fields are ignored, missing fields have their defaults."""

    name: str
    model: ModelInfo
    files: tuple[FileContent, ...]
    created: int  # unix time, seconds
    format: int = FORMAT
    kind: str = CAUSAL_LM
    mode: str = SERVE
    chunk_bytes: int = CHUNK_BYTES
    codecs: tuple[int, ...] = DEFAULT_CODECS  # that links may use
    membership: str = OPEN
    owner: bytes = b""  # public key of the founder; in a private swarm it signs members in
    priority: str | UnsetType = UNSET  # CREDIT: peers with credit go first; UNSET: not in the bytes
    adapters: tuple[AdapterInfo, ...] | UnsetType = UNSET  # for sessions; UNSET: not in the bytes, as before adapters
    products: str | UnsetType = (
        UNSET  # EXACT or FAST of packed weights at least, or EQUAL; UNSET: any, not in the bytes
    )
    bottleneck: int | UnsetType = (
        UNSET  # numbers of a position between two stages; UNSET: the hidden size, not in the bytes
    )
    anchor: int | UnsetType = UNSET  # numbers of a token's anchor at each boundary; UNSET: none, not in the bytes

    @property
    def width(self) -> int:
        """Numbers of a position that cross between two stages of a language model; 0 of a graph."""
        return self.bottleneck or self.model.hidden

    @property
    def session_codecs(self) -> tuple[int, ...]:
        """Codecs that links may use for the values of sessions: with anchors those that leave a token's digits as they are."""
        return tuple(codec for codec in self.codecs if codec in PLAIN_CODECS) if self.anchor else self.codecs

    def file(self, name: str) -> FileContent | None:
        """Return the file of that name; None if there is none."""
        return next((file for file in self.files if file.name == name), None)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that sessions may ask for."""
        return tuple(adapter.name for adapter in self.adapters or ())

    def adapter(self, name: str) -> AdapterInfo | None:
        """Return the adapter of that name; None if there is none."""
        return next((adapter for adapter in self.adapters or () if adapter.name == name), None)

    @property
    def task(self) -> str:
        """Purpose of the swarm: GENERATE for a language model; for a graph TRAIN if it is trained, else EMBED, CLASSIFY
        or INFER."""
        if self.kind != GRAPH:
            return GENERATE
        return TRAIN if self.mode == TRAIN else self.model.task or INFER

    @property
    def purpose(self) -> str:
        """The task as part of a sentence, as in "embeds texts"."""
        return PURPOSES[self.task]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return sum(file.size for file in self.files)


class _Format(msgspec.Struct):
    format: int = FORMAT


_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(Manifest)
_format_decoder = msgspec.msgpack.Decoder(_Format)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a new manifest canonically: a msgpack map with sorted keys. Raises ProtocolError if it is not valid."""
    _check(manifest)
    raw = _encoder.encode(manifest)
    _check_size(raw)
    return raw


def decode_manifest(raw: bytes | bytearray | memoryview) -> Manifest:
    """Decode a manifest. Raises ProtocolError if the bytes are not a valid manifest; with code VERSION if its format is
    newer."""
    _check_size(raw)
    try:
        newest = _format_decoder.decode(raw).format
        if newest > FORMAT and newest not in LATER_FORMATS:
            known = ", ".join(map(str, (FORMAT, *LATER_FORMATS)))
            raise ProtocolError(
                f"the manifest has format {newest}, this swarmnode knows {known}: upgrade swarmnode",
                code=ErrorCode.VERSION,
            )
        manifest = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the manifest is damaged: {error}") from None
    _check(manifest)
    return manifest


def swarm_id(raw: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte id of the swarm whose manifest has these bytes."""
    return hashlib.sha256(raw).digest()


def _check_size(raw: bytes | bytearray | memoryview) -> None:
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ProtocolError(
            f"a manifest of {len(raw)} bytes is over the bound of {MAX_MANIFEST_BYTES}", code=ErrorCode.TOO_LARGE
        )


def is_hub_name(hub_id: str, revision: str | None = None) -> bool:
    """Return whether the texts can name a model on the hub: organisation/model, or an old model without an organisation, and a
    branch, tag or commit. No path of this machine passes: neither `..`, nor a first `/`, `.` or `~`."""
    texts = (hub_id,) if revision is None else (hub_id, revision)
    if any(len(text) > MAX_HUB_CHARS or ".." in text for text in texts) or not _HUB_ID.fullmatch(hub_id):
        return False
    return revision is None or _REVISION.fullmatch(revision) is not None


def _check(manifest: Manifest) -> None:
    """Check all values that a reader will allocate by, open or print. Raises ProtocolError if one is out of bounds."""
    model = manifest.model
    names = [file.name for file in manifest.files]
    is_graph = manifest.kind == GRAPH
    adapters = manifest.adapters or ()
    adapter_files = {file.name for adapter in adapters for file in adapter.files}
    rules = {
        "a name": 0 < len(manifest.name) <= MAX_NAME_CHARS and manifest.name.isprintable(),
        "a kind that this version knows (causal_lm, graph)": manifest.kind in (CAUSAL_LM, GRAPH),
        "a mode that this version knows (serve, train)": manifest.mode in (SERVE, TRAIN),
        "a task that this version knows (embed, classify), of a graph": manifest.model.task is UNSET
        or (is_graph and manifest.model.task in (EMBED, CLASSIFY)),
        "a model family": 0 < len(model.family) <= MAX_NAME_CHARS and model.family.isprintable(),
        f"a title of at most {MAX_NAME_CHARS} printable characters, or none": model.title is UNSET
        or (0 < len(model.title) <= MAX_NAME_CHARS and model.title.isprintable()),
        "a sane number of units": (1 if is_graph else 2 if manifest.bottleneck else 3) <= model.units <= MAX_UNITS,
        "a sane width": (0 if is_graph else 1) <= model.hidden <= MAX_HIDDEN,
        "a sane number of positions": 0 <= model.positions <= MAX_POSITIONS,
        "chunks of 1 MiB": manifest.chunk_bytes == CHUNK_BYTES,
        "a bounded list of files": 0 < len(names) <= MAX_FILES,
        "each file once": len(set(names)) == len(names),
        "plain file names": all(map(is_allowed_name, names)),
        "sane file sizes": all(
            0 <= file.size <= (MAX_FILE_BYTES if is_weights(file.name) else MAX_SMALL_BYTES) for file in manifest.files
        ),
        f"a hub id (organisation/model) and a revision of at most {MAX_HUB_CHARS} characters": is_hub_name(
            "o/m" if model.hub_id is None else model.hub_id, model.revision
        ),
        "roots of 32 bytes": all(len(file.root) == HASH_BYTES for file in manifest.files),
        "codecs": 0 < len(manifest.codecs) <= 32,
        "a membership that this version knows (open, private)": manifest.membership in (OPEN, PRIVATE),
        "an owner's key of 32 bytes, or none": len(manifest.owner) in (0, OWNER_BYTES),
        "a priority that this version knows (credit)": manifest.priority in (UNSET, CREDIT),
        "a least kind of products that this version knows (exact, fast), of packed weights": manifest.products is UNSET
        or (manifest.products in LEAST and manifest.format in ANY_PACKED)
        or manifest.products == EQUAL,
        "equal products of a language model that is served, in format 7 and no other": (manifest.products == EQUAL)
        == (manifest.format == EQUAL_FORMAT)
        and (manifest.products != EQUAL or (not is_graph and manifest.mode == SERVE)),
        "packed weights of a language model that is served, their index in format 4 and no other": (
            PACKED_NAME in names
        )
        == (manifest.format == PACKED_FORMAT)
        and (manifest.format not in ANY_PACKED or (not is_graph and manifest.mode == SERVE)),
        "adapters of a language model that is served, in format 3, 4 or 5": (
            manifest.format in ANY_PACKED or (manifest.adapters is not UNSET) == (manifest.format == ADAPTERS_FORMAT)
        )
        and (not adapters or (not is_graph and manifest.mode == SERVE)),
        "a bottleneck of 1 to the hidden size, of a language model that is trained, in format 6 or 8 and no other": (
            (manifest.bottleneck is not UNSET) == (manifest.format in NARROW)
        )
        and (
            manifest.bottleneck is UNSET
            or (0 < manifest.bottleneck <= model.hidden and not is_graph and manifest.mode == TRAIN)
        ),
        "anchors of 1 to the hidden size, in format 8 and no other": (manifest.anchor is not UNSET)
        == (manifest.format == ANCHOR_FORMAT)
        and (manifest.anchor is UNSET or 0 < manifest.anchor <= model.hidden),
        "a bounded list of adapters": len(adapters) <= MAX_ADAPTERS,
        "each adapter once": len({adapter.name.casefold() for adapter in adapters}) == len(adapters),
        "adapters with plain names and files of their own": all(map(is_valid, adapters))
        and adapter_files.isdisjoint(names),
        "an owner where it is private": bool(manifest.owner) or manifest.membership == OPEN,
    }
    if (broken := first_broken(rules)) is not None:
        raise ProtocolError(f"the manifest is not valid: it needs {broken}")
