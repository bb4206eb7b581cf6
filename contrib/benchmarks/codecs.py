"""Speed, ratio and error of every codec, beside memcpy and bitsandbytes block-wise 8-bit in the same run. Prints JSON.

    OMP_NUM_THREADS=1 python contrib/benchmarks/codecs.py [--elements 4194304] [--row 512] [--runs 9] [--device cpu]

`encode_gb_per_s` and `decode_gb_per_s` count the float32 bytes that went in or came out; medians over the runs, which
take turns, so that a busy moment of the machine does not fall on one codec alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the line above: it reads OMP_NUM_THREADS when it is imported
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode

TOPK_FRACTION = 0.05
SMALL_CALLS = 500


@dataclass(frozen=True)
class Subject:
    """Codec under measurement: `encode` a tensor, `decode` the encoded form to a tensor, `size` of the encoded form in
    bytes."""

    encode: Callable[[Tensor], object]
    decode: Callable[[object], Tensor]
    size: Callable[[object], int]


def our_codec(codec: Codec, device: torch.device) -> Subject:
    def keep(tensor: Tensor) -> int:
        return int(tensor.numel() * TOPK_FRACTION) if codec == Codec.TOPK else 0

    return Subject(
        encode=lambda tensor: encode(tensor, codec, param=keep(tensor)),
        decode=lambda encoded: decode(*encoded, device=device),  # type: ignore[misc]
        size=lambda encoded: memoryview(encoded[1]).nbytes,  # type: ignore[index]
    )


def memcpy() -> Subject:
    return Subject(Tensor.clone, Tensor.clone, lambda encoded: encoded.nbytes)  # type: ignore[arg-type,attr-defined]


def bitsandbytes_blockwise() -> Subject | None:
    """Return bitsandbytes' dynamic 8-bit format in blocks of 256; None if bitsandbytes is not installed."""
    try:
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
    except ImportError:
        return None
    return Subject(
        encode=lambda tensor: quantize_blockwise(tensor, blocksize=256),
        decode=lambda encoded: dequantize_blockwise(*encoded),  # type: ignore[misc]
        size=lambda encoded: encoded[0].nbytes + encoded[1].absmax.nbytes,  # type: ignore[index]
    )


def seconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) / calls


def measure(subjects: dict[str, Subject], tensor: Tensor, runs: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of one encode and one decode of `tensor`, by subject."""
    encoded = {name: subject.encode(tensor) for name, subject in subjects.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"encode": [], "decode": []} for name in subjects}
    for _ in range(runs + 1):  # the first round warms up
        for name, subject in subjects.items():
            times[name]["encode"].append(seconds(lambda s=subject: s.encode(tensor), tensor.device, calls))
            times[name]["decode"].append(
                seconds(lambda s=subject, e=encoded[name]: s.decode(e), tensor.device, calls)  # type: ignore[misc]
            )
    return {name: {way: statistics.median(t[1:]) for way, t in ways.items()} for name, ways in times.items()}


def report(
    subjects: dict[str, Subject], elements: int, row: int, runs: int, device: torch.device
) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(elements, generator=generator).to(device)
    small = torch.randn((1, 1, row), generator=generator).to(device)
    large_s, small_s = measure(subjects, large, runs, 1), measure(subjects, small, runs, SMALL_CALLS)
    rows = {}
    for name, subject in subjects.items():
        encoded = subject.encode(large)
        error = (subject.decode(encoded) - large).norm() / large.norm()
        rows[name] = {
            "encode_gb_per_s": round(large.nbytes / large_s[name]["encode"] / 1e9, 2),
            "decode_gb_per_s": round(large.nbytes / large_s[name]["decode"] / 1e9, 2),
            "ratio": round(large.nbytes / subject.size(encoded), 2),
            "relative_error": round(float(error), 5),
            "small_encode_us": round(small_s[name]["encode"] * 1e6, 1),
            "small_decode_us": round(small_s[name]["decode"] * 1e6, 1),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 22, help="elements of the large float32 tensor")
    parser.add_argument("--row", type=int, default=512, help="elements of the hidden state of one decode step")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    subjects = {"memcpy": memcpy(), **{codec.name.lower(): our_codec(codec, options.device) for codec in Codec}}
    blockwise = bitsandbytes_blockwise()
    if blockwise is not None:
        subjects["bitsandbytes_8bit"] = blockwise
    result = {
        "machine": platform.processor() or platform.machine(),
        "device": str(options.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "elements": options.elements,
        "row": options.row,
        "topk_fraction": TOPK_FRACTION,
        "codecs": report(subjects, options.elements, options.row, options.runs, options.device),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
