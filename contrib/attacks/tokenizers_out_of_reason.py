"""A founder's tokenizer takes minutes or gigabytes to load or for a short text, or ends those who load it with a traceback."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attack import Outcome, main

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.errors import SwarmnodeError

VIRTUAL, FAST = True, True
MOST_S, MOST_MIB = 5.0, 600  # CPU seconds and memory of one tokenizer, beside transformers' own
CHARS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MODEL = {"type": "BPE", "vocab": {char: number for number, char in enumerate(CHARS)}, "merges": []}
BASE = {"version": "1.0", "added_tokens": [], "pre_tokenizer": LEVEL, "decoder": LEVEL, "model": MODEL}


def replacing(pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": "aa"}


def tokenizers() -> Iterator[tuple[str, Any]]:
    """Yield the kind of each hostile tokenizer and its JSON, and last a sound one."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    yield "added tokens", {**BASE, "added_tokens": [{"id": n, "content": f"<{n}>", **flags} for n in range(60_000)]}
    yield "replacements", {**BASE, "normalizer": {"type": "Sequence", "normalizers": [replacing("a")] * 26}}
    yield "replacements in the decoder", {**BASE, "decoder": {"type": "Sequence", "decoders": [replacing("a")] * 26}}
    yield "a long beginning", {**BASE, "normalizer": {"type": "Prepend", "prepend": "x" * (5 << 20)}}
    nested: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(60):
        nested = {"type": "Sequence", "normalizers": [nested]}
    yield "sequences within sequences", {**BASE, "normalizer": nested}
    regex = {
        "type": "Split",
        "pattern": {"Regex": "(" * 9000 + "a" + ")" * 9000},
        "behavior": "Isolated",
        "invert": False,
    }
    yield "a pattern within patterns", {**BASE, "pre_tokenizer": regex}
    one = {"SpecialToken": {"id": "x", "type_id": 0}}
    single = [one] * 30_000 + [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {"x": {"id": "x", "ids": [0] * 100, "tokens": ["!"] * 100}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    yield "a template of tokens", {**BASE, "post_processor": template}
    yield "an unknown part", {**BASE, "normalizer": {"type": "Nothing"}}
    yield "no vocabulary", {**BASE, "model": {**MODEL, "vocab": None}}
    yield "merges of nothing", {**BASE, "model": {**MODEL, "merges": ["q! !q"]}}
    yield "sound", BASE


def fault(folder: Path) -> str:
    """Return what is wrong with how a tokenizer is loaded and used; empty if nothing is. Raises SwarmnodeError if it is refused."""
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        own = Tokenizer(folder)
        own.decode(own.encode("a" * 500))
    except SwarmnodeError:
        raise
    except Exception as error:
        return type(error).__name__
    finally:
        took_s = time.process_time() - began_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return f"{took_s:.0f} s" if took_s > MOST_S else f"{grown} MiB" if grown > MOST_MIB else ""


async def attack() -> Outcome:
    found, refused, last = [], 0, ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        for count, (kind, values) in enumerate([("sound", BASE), *tokenizers()]):  # the first one imports transformers
            (folder / "tokenizer.json").write_text(json.dumps(values))
            try:
                last = "computed"
                if (told := fault(folder)) and count:
                    found.append(f"{kind}: {told}")
            except SwarmnodeError:
                last, refused = "refused", refused + 1
    what = f": {', '.join(found)}" if found else ""
    return Outcome(
        not found and last == "computed", f"{len(found)} of {count} broke a bound, {refused} were refused{what}"
    )


main(__name__, attack, virtual=VIRTUAL)
