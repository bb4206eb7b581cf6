"""Tokenizers as transformers has made them of checkpoints, kept for this machine's next clients, which need no transformers then.

HOME/tokenizers/<swarm id>.json   a swarm's id is the hash of its manifest, and so of the files that the tokenizer was made of

How a tokenizer follows from a folder's files is different from family to family, and from one version of transformers to the next,
which alone knows it. What it makes is a pipeline of the library `tokenizers`, which does all the work, and imports in a
fortieth of the time. So that pipeline is kept as it was made, where nothing else has a part in what comes out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.client.chat_template import chosen_template, is_ordinary, render_chat, renders_as_transformers
from swarmnode.client.tokenizer import Tokenizer
from swarmnode.errors import LocalError
from swarmnode.swarm.storage.kept_file import read_kept, write_kept

log = logging.getLogger(__name__)

FOLDER = "tokenizers"
MAX_BYTES = 1 << 28  # 256,000 tokens take some 30 MB
MOST_KEPT = 8  # swarms
# Of transformers' class, to its pipeline.
ENTRANCES = ("__call__", "_encode_plus", "decode", "_decode", "convert_tokens_to_ids")

BPE_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # older versions always do


class KeptPipeline(msgspec.Struct, frozen=True):
    """What text becomes ids by, and what a client asks of the tokenizer otherwise."""

    versions: str  # of the libraries that made it
    pipeline: str  # as `tokenizers` writes it
    separator: int | None
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]  # by the names that templates know them by
    template_settings: frozenset[str]
    renders_chats: bool  # as transformers does
    has_response_template: bool
    splits_special_tokens: bool


class KeptTokenizer(Tokenizer):
    """A checkpoint's tokenizer that reads texts by a kept pipeline. What only transformers' own can do, that one does, which is
    then made of the folder, once."""

    def __init__(self, folder: Path, kept: KeptPipeline) -> None:
        from tokenizers import Tokenizer as Pipeline

        self._folder = folder
        self._kept = kept
        self._pipeline = Pipeline.from_str(kept.pipeline)
        self._pipeline.encode_special_tokens = kept.splits_special_tokens
        self.chat_template, self.template_settings = kept.chat_template, kept.template_settings
        self.separator, self.has_response_template = kept.separator, kept.has_response_template

    def __repr__(self) -> str:
        return f"<KeptTokenizer of {self._pipeline.get_vocab_size()} tokens>"

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self._pipeline.decode(list(ids), skip_special_tokens=not special_tokens)

    def _chat_ids(self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any]) -> list[int]:
        template = chosen_template(self._kept.chat_template, with_tools=bool(tools))
        if template is None or not self._kept.renders_chats or not is_ordinary(messages):
            return super()._chat_ids(messages, tools, variables)
        text = render_chat(template, messages, tools, {**self._kept.special_tokens, **variables})
        return self._ids(text, special_tokens=False)

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=special_tokens).ids


class TokenizerCache:
    """Those under one home folder. It is only a help: one that is missing, damaged, or of other versions is made again."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def __repr__(self) -> str:
        return f"<TokenizerCache {self._folder}>"

    def tokenizer(self, swarm: bytes, folder: Path) -> Tokenizer:
        """That of the swarm with this id, whose files are in `folder`. Raises CheckpointError where there is none in them."""
        path = self._folder / f"{swarm.hex()}.json"
        kept = read_kept(path, KeptPipeline, max_bytes=MAX_BYTES)
        if kept is not None and kept.versions == _versions():
            return KeptTokenizer(folder, kept)
        made = Tokenizer(folder)
        if is_plain(made):
            self._keep(path, kept_pipeline(made))
        return made

    def _keep(self, path: Path, kept: KeptPipeline) -> None:
        try:
            write_kept(path, kept)
            for old in sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-MOST_KEPT]:
                old.unlink()
        except (OSError, LocalError) as error:
            log.info("the tokenizer is made again next time: %s", error)


def is_plain(tokenizer: Tokenizer) -> bool:
    """Whether transformers' tokenizer does nothing beside its pipeline: no slow one, no family's own way in or out, no mode for
    another language, and no spaces taken away afterwards."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    own = tokenizer.own
    kind = type(own)
    if not isinstance(own, TokenizersBackend) or hasattr(own, "_switch_to_input_mode"):
        return False
    if any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ENTRANCES):
        return False
    is_bpe = type(own.backend_tokenizer.model).__name__ == "BPE"
    return not own.clean_up_tokenization_spaces or (is_bpe and not getattr(own, BPE_CLEAN_UP, True))


def kept_pipeline(tokenizer: Tokenizer) -> KeptPipeline:
    """What is to be kept of a plain one."""
    from tokenizers import Tokenizer as Pipeline

    whole = Pipeline.from_str(tokenizer.own.backend_tokenizer.to_str())
    whole.no_truncation()  # as transformers, which does neither where it is not asked to
    whole.no_padding()
    return KeptPipeline(
        versions=_versions(),
        pipeline=whole.to_str(),
        separator=tokenizer.separator,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.own.special_tokens_map,
        template_settings=tokenizer.template_settings,
        renders_chats=renders_as_transformers(tokenizer.own),
        has_response_template=tokenizer.has_response_template,
        splits_special_tokens=bool(tokenizer.own.split_special_tokens),
    )


@functools.cache
def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers"))
