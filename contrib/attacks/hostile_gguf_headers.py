"""The header of a GGUF file claims lengths, counts and sizes that hang its reader, fill its memory or end it with a traceback."""

from __future__ import annotations

import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from attack import Outcome, main

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.gguf.repack import GgufRepack
from swarmnode.compute.packing.recipes import recipe_of
from swarmnode.errors import SwarmnodeError
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.founding.test_damaged_gguf import mutated

VIRTUAL, FAST = True, True
MUTATIONS, MOST_S, MOST_BYTES = 25, 30.0, 200 << 20  # CPU seconds, and memory of one reading
TEXT, ARRAY = 8, 9
KEYS = ("attention.head_count", "attention.head_count_kv", "rope.dimension_count", "block_count", "embedding_length")


def header(kind: int, value: bytes, tensors: int = 0) -> bytes:
    """Return a file of one key with this type and value."""
    return struct.pack("<4sIQQQ1sI", b"GGUF", 3, tensors, 1, 1, b"k", kind) + value


def files(sound: bytes, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield the kind and the bytes of each hostile file; `size` is that of the sound file's header."""
    for length in ((1 << 64) - 1, 1 << 62, 1 << 40, 1 << 31):
        yield f"a text of {length}", header(TEXT, struct.pack("<Q", length))
        for kind in (0, 4, TEXT, ARRAY):
            yield f"{length} values of type {kind}", header(ARRAY, struct.pack("<IQ", kind, length))
        yield f"{length} tensors", header(4, bytes(4), length)
    yield "16 M single bytes", header(ARRAY, struct.pack("<IQ", 0, 16 << 20) + bytes(16 << 20))
    yield "2 M empty texts", header(ARRAY, struct.pack("<IQ", TEXT, 2 << 20) + bytes(16 << 20))
    yield "arrays within arrays", header(ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)
    for key in KEYS:
        place = sound.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
        for value in (0, 4096, (1 << 32) - 1):
            yield f"{key} {value}", sound[:place] + struct.pack("<I", value) + sound[place + 4 :]
    for number in range(MUTATIONS):
        yield f"mutation {number}", mutated(sound, size, number)


def fault(use: Callable[[], object]) -> str:
    """Return what is wrong with how a file is read; empty if it is read within bounds or refused in a sentence."""
    told, began_s = "", time.process_time()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        use()
    except SwarmnodeError:
        pass
    except Exception as error:
        told = f"{type(error).__name__}"
    took_s, peak = time.process_time() - began_s, tracemalloc.get_traced_memory()[1] - before
    return told or (f"{took_s:.0f} s" if took_s > MOST_S else f"{peak >> 20} MiB" if peak > MOST_BYTES else "")


async def attack() -> Outcome:
    found, count = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "model.gguf"
        save_llama_gguf(file, form="Q8_0")
        sound, size = file.read_bytes(), GgufCheckpoint(file).header_bytes
        tracemalloc.start(1)
        for count, (kind, data) in enumerate(files(sound, size), 1):
            file.write_bytes(data)
            out = folder / str(count)
            out.mkdir()
            uses = (lambda to=out: GgufCheckpoint(file).outline(to), lambda: GgufRepack(file, recipe_of("q4_0")))
            found += [f"{kind}: {told}" for use in uses if (told := fault(use))]
        tracemalloc.stop()
    what = f", as {'; '.join(found[:8])}" if found else ""
    return Outcome(not found, f"{len(found)} readings of {count} files broke a bound or ended in a traceback{what}")


main(__name__, attack, virtual=VIRTUAL)
