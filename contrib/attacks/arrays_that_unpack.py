"""A data file of some kilobytes takes hundreds of megabytes when it is read, has rows without end, or ends its reader."""

from __future__ import annotations

import io
import itertools
import struct
import tempfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from attack import Outcome, main
from numpy.lib import format as npy

from swarmnode.compute.graph.archive import load_program
from swarmnode.compute.graph.boundary import read_arrays as arrays_of_a_module
from swarmnode.data.rows import read_arrays as samples_of
from swarmnode.errors import UsageError

VIRTUAL, FAST = True, True
UNPACKED, MOST_BYTES, MOST_ROWS = 80 << 20, 72 << 20, 10_000
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def header(shape: tuple[int, ...], descr: str = "<i8") -> bytes:
    """Return the header of an array, whatever its numbers are."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def raw_header(text: str) -> bytes:
    """Return a header with any text."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def packed(method: int = DEFLATED, **contents: bytes) -> bytes:
    """Return an archive of these arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(f"{name}.npy", content, compresslevel=6)
    return file.getvalue()


def overlapping(archive: bytes, entries: int) -> bytes:
    """Return an archive with many entries of the same bytes."""
    begin = archive.index(b"PK\x01\x02")
    entry = archive[begin : archive.index(b"PK\x05\x06")]
    name = entry.index(b"input_ids")
    many = b"".join(entry[:name] + b"%09d" % number + entry[name + 9 :] for number in range(entries))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries, entries, len(many), begin, 0)
    return archive[:begin] + many + end


def files() -> Iterator[tuple[str, bytes]]:
    """Yield the kind of each hostile .npz file and its bytes."""
    zeros = header((UNPACKED // 8 // 64, 64)) + bytes(UNPACKED)
    small = header((2, 4)) + bytes(64)
    for method in (DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield f"zeros, method {method}", packed(method, input_ids=zeros)
    yield "labels", packed(input_ids=small, labels=zeros)
    yield "another array", packed(input_ids=small, other=zeros)
    few = header((1 << 17, 8)) + bytes(1 << 23)
    yield "the same bytes 20 times", overlapping(packed(input_ids=few), 20)
    yield "single bytes", packed(STORED, input_ids=header((1 << 17, 1 << 7), "|i1") + bytes(1 << 24))
    for shape in ((1 << 40, 64), (1 << 70, 1), (1 << 28,), (-1, 4), (1 << 20, 1 << 20, 1 << 30)):
        yield f"states {shape}", packed(STORED, input_ids=header(shape) + bytes(64))
    yield "rows of nothing", packed(STORED, input_ids=header((1 << 40, 0)))
    yield "rows of no bytes", packed(STORED, input_ids=header((1 << 40, 4), "|V0"))
    for number, text in enumerate(
        ("(" * 9000, "-" * 9000 + "1", "{" * 190 + "}" * 190, "[" * 90 + "]" * 90, "\0", "1" * 5000)
    ):
        yield f"header {number}", packed(STORED, input_ids=raw_header(text) + bytes(64))
    yield "ids beyond 32 bits", packed(input_ids=header((1, 2)) + struct.pack("<2q", 1 << 40, 1))
    sound = packed(input_ids=small)
    begin, directory = sound.index(b"PK\x03\x04"), sound.index(b"PK\x01\x02")
    for place in range(begin, begin + 30, 3):  # each field of both headers
        yield f"byte {place}", sound[:place] + bytes([sound[place] ^ 0x41]) + sound[place + 1 :]
    for place in range(directory + 4, directory + 46, 3):
        yield f"byte {place}", sound[:place] + bytes([sound[place] ^ 0x41]) + sound[place + 1 :]
    data = sound.index(b"input_ids.npy") + 13
    yield "damaged bytes", sound[:data] + b"\xff" * 20 + sound[data + 20 :]
    yield "encrypted", sound[: begin + 6] + b"\1" + sound[begin + 7 : directory + 8] + b"\1" + sound[directory + 9 :]


def programs(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield exported programs whose example batch is much larger than the file."""
    path = folder / "sound.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.zeros(2, 4),)), path)
    for kind, example in (("zeros", torch.zeros(UNPACKED // 4)), ("expanded", torch.zeros(1).expand(1 << 50))):
        saved = io.BytesIO()
        torch.save(((example,), {}), saved)
        with zipfile.ZipFile(saved) as source:
            inner = io.BytesIO()
            with zipfile.ZipFile(inner, "w", DEFLATED) as target:
                for info in source.infolist():
                    target.writestr(info.filename, source.read(info))
        file = io.BytesIO()
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(file, "w") as target:
            for info in source.infolist():
                is_example = info.filename.endswith("sample_inputs/model.pt")
                content = (saved if kind == "expanded" else inner).getvalue() if is_example else source.read(info)
                target.writestr(info.filename, content)
        yield f"example batch, {kind}", file.getvalue()


def fault(reads: object, path: Path) -> str:
    """Return what is wrong with how a reader takes a file; empty if it reads it within bounds or refuses it in a sentence."""
    tracemalloc.start()
    try:
        rows = sum(1 for _ in itertools.islice(reads(path), MOST_ROWS + 1))  # type: ignore[operator]
        told = "more rows than bytes" if rows > max(MOST_ROWS, path.stat().st_size) else ""
    except UsageError:
        told = ""
    except Exception as error:
        told = f"{type(error).__name__}"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return told or (f"{peak >> 20} MiB" if peak > MOST_BYTES else "")


def program_of(path: Path) -> Iterator[object]:
    """Yield the tensors of a program's example batch. Raises ValueError if they are much larger than the file."""
    for value in load_program(path)[1]:
        if value.nbytes > MOST_BYTES:
            raise ValueError("the example batch is far larger than its file")
        yield value


async def attack() -> Outcome:
    found, count = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tries = [
            (read, ".npz", kind, data)
            for kind, data in files()
            for read in (lambda at: samples_of(at, 64), arrays_of_a_module)
        ]
        tries += [(program_of, ".pt2", kind, data) for kind, data in programs(folder)]
        for read, suffix, kind, data in tries:
            path = folder / f"try{suffix}"
            path.write_bytes(data)
            if told := fault(read, path):
                found.append(f"{kind}: {told}")
            count += 1
    what = f": {', '.join(sorted(set(found)))}" if found else ""
    return Outcome(not found, f"{len(found)} of {count} files broke a bound or ended their reader{what}")


main(__name__, attack, virtual=VIRTUAL)
