"""Content of a checkpoint folder: the files that belong to it, and the hashes that verify each chunk alone.

A file is cut into chunks (1 MiB in format 1; the last may be shorter). Its `root` is the SHA-256 of the concatenated
SHA-256 hashes of its chunks. So the list of chunk hashes can be checked against the manifest, and each chunk against
the list, whichever peer sent them.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.errors import CheckpointError
from swarmnode.files import linked_file, parse_json, try_apart

CHUNK_BYTES = 1 << 20
PIECE_CHUNKS = 64  # chunks that one thread hashes in one call
HASH_BYTES = 32
MAX_NAME_CHARS = 128
MAX_FILE_BYTES = 1 << 44  # 16 TiB
MAX_SMALL_BYTES = 1 << 28  # of a file that every peer fetches whole; 256,000 tokens take some 30 MB
CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
GRAPH_NAME = "graph.json"
INDEX_NAME = "model.safetensors.index.json"
PACKED_NAME = "packed.json"
WEIGHTS_SUFFIX = ".safetensors"
GGUF_SUFFIX = ".gguf"
FORMATS = (
    r"(?:ud[-_])?(?:i?q\d(?:_\w+)?|tq\d(?:_\d)?|mxfp4(?:_\w+)?)|[bf]f?p?(?:16|32)|fp?8|nf4|w\d+a\d+|int[48]|[48]bit"
    r"|gguf|gptq|awq|bnb|imat(?:rix)?|i1|quantized"
)
"""Kinds of quantisation at the end of a file's or folder's name"""

VOCABULARY_NAMES = frozenset({"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"})
"""Files with a vocabulary: a checkpoint with one of these has a tokenizer."""

TOKENIZER_NAMES = VOCABULARY_NAMES | {
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
}
SMALL_NAMES = TOKENIZER_NAMES | {CONFIG_NAME, GRAPH_NAME, INDEX_NAME, GENERATION_NAME, PACKED_NAME}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Progress = Callable[[int, int], None]
"""Function of (bytes done, bytes in total) that reports progress."""


class FileContent(msgspec.Struct, frozen=True):
    """A file of a checkpoint: its plain name, its size in bytes and its 32-byte root."""

    name: str
    size: int
    root: bytes

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Return the number of chunks of the file; 0 if it is empty."""
        return -(-self.size // chunk_bytes)

    def chunk_size(self, number: int, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Return the bytes of chunk `number`: `chunk_bytes`, or less for the last one."""
        return min(chunk_bytes, self.size - number * chunk_bytes)


def last_part(model: str) -> str:
    """Return the last part of a model's path or hub id without `.gguf`, in characters that need no quotes; empty for none."""
    name = re.sub(r"(?i)\.gguf$", "", Path(model).expanduser().absolute().name)
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def title_of(model: str) -> str:
    """Return the model's own name, by its path or hub id: the last part without revision, number of the part and quantisation."""
    whole, revision = last_part(model), re.sub(r"[^\w.-]+", "-", "".join(model.partition("@")[1:]))
    name = re.sub(r"-\d{5}-of-\d{5}$", "", whole.removesuffix(revision) or whole)
    return re.sub(rf"(?i)(?:[-._]+(?:{FORMATS}))+$", "", name).strip("-.")


def is_weights(name: str) -> bool:
    """Return whether the file holds tensors, which a peer fetches in part; all other files are small and fetched whole."""
    return name.endswith((WEIGHTS_SUFFIX, GGUF_SUFFIX))


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether a checkpoint with these files has a tokenizer."""
    return not VOCABULARY_NAMES.isdisjoint(names)


def check_tokenizer(folder: Path) -> None:
    """Raise CheckpointError if the tokenizer in a folder is damaged, or takes too much time or memory to load or for short texts.

    A folder without tokenizer.json is checked by the sizes of its files alone. Raises Busy as `try_apart` does.
    """
    sizes = {name: (folder / name).stat().st_size for name in TOKENIZER_NAMES if (folder / name).is_file()}
    for name, size in sizes.items():
        if size > (MAX_VOCABULARY_BYTES if name in VOCABULARY_NAMES else MAX_TOKENIZER_BYTES):
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes, more than any tokenizer; use another checkpoint"
            )
    if "tokenizer.json" not in sizes:
        return
    names = [name for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json") if name in sizes]
    digest = hashlib.sha256(b"".join(hashlib.sha256((folder / name).read_bytes()).digest() for name in names)).digest()
    if digest not in _tried:
        told = try_apart(
            _TOKENIZER_TRIAL,
            [str(folder), MOST_TOKENS, MOST_ADDED, MOST_STEPS],
            cpu_s=TOKENIZER_S,
            memory_bytes=TOKENIZER_MEMORY_BYTES,
            patience_s=TOKENIZER_PATIENCE_S,
        )
        _tried[digest] = "it takes too much time or memory" if told is None else str(told)
    if told := _tried[digest]:
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be used: {told}; use another checkpoint")


_tried: dict[bytes, str] = {}  # what is wrong with a tokenizer, by the hash of its files
MAX_VOCABULARY_BYTES, MAX_TOKENIZER_BYTES = 128 << 20, 16 << 20  # 256,000 tokens take some 30 MB
MOST_TOKENS, MOST_ADDED, MOST_STEPS = 1 << 21, 1 << 14, 1024
TOKENIZER_S, TOKENIZER_MEMORY_BYTES, TOKENIZER_PATIENCE_S = 10, 3 << 30, 120.0
_TOKENIZER_TRIAL = """
folder, most_tokens, most_added, most_steps = given
def told(text):
    print(json.dumps(text))
    sys.stdout.flush()
    os._exit(0)
def read(name):
    path = os.path.join(folder, name)
    return json.load(open(path, "rb")) if os.path.isfile(path) else {}
def steps(value):
    if isinstance(value, dict):
        return 1 + sum(steps(inner) for key, inner in value.items() if key != "precompiled_charsmap")
    return sum(1 + steps(inner) for inner in value) if isinstance(value, list) else len(str(value)) // 1024
def growth(value):
    found = 1.0
    if isinstance(value, dict):
        if value.get("type") == "Replace":
            replaced = value["pattern"].get("String", "")
            found = max(found, len(value["content"]) / max(1, len(replaced)))
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        found *= growth(inner)
    return found
try:
    tokenizer, config, more = map(read, ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"))
    model = tokenizer.get("model") or {}
    for what, found in (("tokens", model.get("vocab")), ("merges", model.get("merges"))):
        if len(found or ()) > most_tokens:
            told(f"it has {len(found):,} {what}")
    added = [tokenizer.get("added_tokens"), config.get("added_tokens_decoder"), config.get("extra_special_tokens"), more]
    added.append(config.get("additional_special_tokens"))
    if (most := max(len(one or ()) for one in added)) > most_added:
        told(f"it has {most:,} added tokens")
    parts = [tokenizer.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    if (count := steps(parts)) > most_steps:
        told(f"its pipeline has {count:,} parts")
    if growth(parts) > 64:
        told("its replacements make texts much longer")
    if (model.get("max_input_chars_per_word") or 0) > 10_000:
        told("its words have no bound")
    del model, parts, added, tokenizer
except (ValueError, TypeError, AttributeError, RecursionError) as error:
    told(f"it is damaged: {str(error)[:200]}")
try:
    from tokenizers import Tokenizer
    own = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    own.no_padding()
    own.no_truncation()
    for sample in ("a", " ", "1", "\\n", ".", "ab", "a ", "A1 b.", "\u00e9", "\u4e2d", "\U0001f600", "aaaaaaaaaaaaaaaab"):
        text = sample * (4096 // len(sample))
        ids = own.encode(text).ids
        if len(ids) > 64 + 8 * len(text.encode()):
            told(f"a text of {len(text):,} characters becomes {len(ids):,} tokens")
        if len(own.decode(ids)) > 64 * (64 + len(text)):
            told("its decoder makes a text much longer")
except Exception as error:
    told(f"it is damaged: {str(error)[:200]}")
told("")
"""
"""Program that looks at a tokenizer: sizes first, and then texts that make bad patterns slow"""


def is_allowed_name(name: str) -> bool:
    """Return whether a file of this name may be part of a checkpoint: plain, bounded, and of a kind that cannot carry
    code."""
    if len(name) > MAX_NAME_CHARS or not _PLAIN_NAME.fullmatch(name):
        return False
    return name in SMALL_NAMES or is_weights(name)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint folder that matter, sorted by name. Raises CheckpointError if it is not a
    checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a checkpoint; check its name")
    if not (folder / CONFIG_NAME).is_file() and not (folder / GRAPH_NAME).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; a checkpoint folder of transformers has one")
    names = {name for name in SMALL_NAMES if (folder / name).is_file()}
    names |= _safetensors_names(folder) | packed_names(folder)
    for name in names:
        if not is_allowed_name(name):
            raise CheckpointError(f"the file name {name!r} in {folder} is not a plain name; rename the file")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}, which its {INDEX_NAME} names; fetch the checkpoint again")
    return [folder / name for name in sorted(names)]


def packed_names(folder: Path) -> set[str]:
    """Return the names of the files with packed tensors; none without a packed index. Raises CheckpointError if it is damaged."""
    index = folder / PACKED_NAME
    if not index.is_file():
        return set()
    return _names_in(index, "packed tensors", lambda found: {tensor["file"] for tensor in found["tensors"].values()})


def _names_in(index: Path, kind: str, names_of: Callable[[Any], set[str]]) -> set[str]:
    """Return the file names in an index. Raises CheckpointError if it is no index of this `kind` of tensors."""
    try:
        names = names_of(parse_json(index.read_bytes()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a file name is not text")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of {kind}: {error}; fetch it again") from None
    return names


def _safetensors_names(folder: Path) -> set[str]:
    """Return the names of the safetensors files in use: those of the index, else the single file.

    Raises CheckpointError if there is neither, or the index is damaged.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _names_in(index, "safetensors files", lambda found: set(found["weight_map"].values()))
    if (folder / f"model{WEIGHTS_SUFFIX}").is_file():
        return {f"model{WEIGHTS_SUFFIX}"}
    raise CheckpointError(
        f"{folder} has no model.safetensors and no {INDEX_NAME}; "
        "convert other formats with transformers' save_pretrained (pickles are never read)"
    )


def chunk_hashes(path: Path, chunk_bytes: int = CHUNK_BYTES, *, first: int = 0, count: int | None = None) -> bytes:
    """Return the concatenated SHA-256 hashes of a file's chunks, or of at most `count` chunks from number `first` on."""
    hashes = bytearray()
    buffer = memoryview(bytearray(chunk_bytes))
    with path.open("rb", buffering=0) as file:
        file.seek(first * chunk_bytes)
        while (count is None or len(hashes) < count * HASH_BYTES) and (size := _read_full(file.readinto, buffer)):
            hashes += hashlib.sha256(buffer[:size]).digest()
    return bytes(hashes)


def _read_full(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    """Fill the buffer as far as the file goes: an unbuffered read may return less at any time."""
    filled = 0
    while filled < len(buffer) and (size := readinto(buffer[filled:])):
        filled += size
    return filled


def describe_files(
    paths: Sequence[Path],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[FileContent, ...]:
    """Return name, size and root of each file, in the given order. Pieces are hashed in parallel, by one thread per
    core.

    hashlib and reading release the GIL. `progress` is called by several threads, one at a time.
    """
    sizes = [path.stat().st_size for path in paths]
    total, hashed, counting = sum(sizes), 0, threading.Lock()

    def hash_piece(path: Path, first: int) -> bytes:
        nonlocal hashed
        hashes = chunk_hashes(path, chunk_bytes, first=first, count=PIECE_CHUNKS)
        with counting:
            hashed += len(hashes) // HASH_BYTES * chunk_bytes
            if progress is not None:
                progress(min(hashed, total), total)
        return hashes

    with ThreadPoolExecutor(max_workers=threads or os.cpu_count(), thread_name_prefix="hash") as pool:
        pieces = [
            [pool.submit(hash_piece, path, first) for first in range(0, -(-size // chunk_bytes), PIECE_CHUNKS)]
            for path, size in zip(paths, sizes, strict=True)
        ]
        roots = [hashlib.sha256(b"".join(piece.result() for piece in of_file)).digest() for of_file in pieces]
    return tuple(FileContent(path.name, size, root) for path, size, root in zip(paths, sizes, roots, strict=True))


def verify_hashes(file: FileContent, hashes: bytes | bytearray | memoryview, chunk_bytes: int = CHUNK_BYTES) -> bool:
    """Return whether a list of chunk hashes is that of the file."""
    return len(hashes) == file.chunks(chunk_bytes) * HASH_BYTES and hashlib.sha256(hashes).digest() == file.root


def verify_chunk(hashes: bytes, number: int, data: bytes | bytearray | memoryview) -> bool:
    """Return whether `data` is chunk `number` of the file with this verified hash list."""
    expected = hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
    return len(expected) == HASH_BYTES and hashlib.sha256(data).digest() == expected


def verify_file(path: Path, file: FileContent, chunk_bytes: int = CHUNK_BYTES) -> bool:
    """Return whether a local file has exactly this content. Reads the whole file."""
    return matching_hashes(path, file, chunk_bytes) is not None


def fault_of_size(file: FileContent, folder: Path) -> str | None:
    """Return why `folder` does not hold the file, as far as its size tells; None if the size is right. A link is called by its
    target."""
    path = linked_file(folder / file.name)
    try:
        if path.stat().st_size != file.size:
            return f"{path} has another size than the file that the swarm was founded on"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def fault_of_content(file: FileContent, folder: Path, progress: Progress | None = None) -> str | None:
    """Return why `folder` does not hold the file; None if it does. Reads the whole file. Raises OSError."""
    [found] = describe_files([folder / file.name], progress=progress)
    if found == file:
        return None
    return f"{linked_file(folder / file.name)} differs from the file that the swarm was founded on"


def matching_hashes(path: Path, file: FileContent, chunk_bytes: int = CHUNK_BYTES) -> bytes | None:
    """Return the chunk hashes of a local file if it has exactly this content, else None. Reads the whole file."""
    if path.stat().st_size != file.size:
        return None
    hashes = chunk_hashes(path, chunk_bytes)
    return hashes if verify_hashes(file, hashes, chunk_bytes) else None
