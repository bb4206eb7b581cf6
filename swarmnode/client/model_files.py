"""The model's small files in a client: the tokenizer and the config. They are fetched and read once.

Values of a checkpoint's small files for its use: how long texts may be, and how tokens are sampled.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer, read_config, stop_ids, vocabulary_size
from swarmnode.codec.sampling import USUAL
from swarmnode.data.conversation import ChatEnding, CheckText, Mappings, chosen_template, render_chat
from swarmnode.errors import LocalError, NoRoute, UsageError
from swarmnode.peer.host import Host
from swarmnode.serving.client.generation import GenerateOptions
from swarmnode.serving.client.limits import ModelLimits
from swarmnode.swarm.records.manifest import TRAIN, Manifest
from swarmnode.swarm.storage.content import has_tokenizer
from swarmnode.swarm.storage.small_files import read_stored, write_stored

if TYPE_CHECKING:
    from swarmnode.weights.weights import Weights


log = logging.getLogger(__name__)

# Names of one config field in different model families: Llama, GPT-2, MPT, older ones.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length")
STRETCHED = ("linear", "dynamic", "ntk")  # scalings of rotary embeddings whose config has the positions before scaling
CHOOSING = ("temperature", "top_p", "top_k", "min_p")  # what decides between likely and unlikely tokens
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def context_limit(folder: Path) -> int | None:
    """Return the number of positions that a text may have, by the config in `folder`; None if the config does not say."""
    config = read_config(folder / "config.json")
    text = config.get("text_config")
    return positions_of(text if isinstance(text, Mapping) else config)


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions of a model, including the scaling of its rotary embeddings; None if the config does not
    say."""
    sizes = [size for name in POSITIONS if isinstance(size := config.get(name), int) and size > 0]
    if not sizes:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return sizes[0]
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if not isinstance(factor, int | float) or factor <= 1:
        return sizes[0]
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn":
        return max(sizes[0], int((original if isinstance(original, int) else sizes[0]) * factor))
    return int(sizes[0] * factor) if kind in STRETCHED else sizes[0]


def generation_defaults(folder: Path) -> dict[str, float | int]:
    """Return the checkpoint's defaults for sampling, as fields of GenerateOptions. Missing values and values that GenerateOptions
    refuses are left out. A checkpoint without a temperature, top-p, top-k and min-p gets those of `USUAL`."""
    told = read_config(folder / "generation_config.json")
    usable = {name: told[name] for name in DRAWING if _can_be_drawn_by(name, told.get(name))}
    return usable if usable.keys() & set(CHOOSING) else {**USUAL, **usable}


def _can_be_drawn_by(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        GenerateOptions(**{name: value})  # type: ignore[arg-type]  # each field is a number
    except UsageError as error:
        log.warning("generation_config.json: %s", error)
        return False
    return True


FOLDER = "tokenizers"
MAX_BYTES = 1 << 28  # 256,000 tokens take some 30 MB
MOST_KEPT = 8  # swarms
# Methods of transformers' class that call its pipeline.
ENTRANCES = ("__call__", "_encode_plus", "decode", "_decode", "convert_tokens_to_ids")

# Older versions always clean up.
BPE_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
OWN_WAYS = ("apply_chat_template", "get_chat_template", "special_tokens_map")  # a model family may override these
TRIAL = "{{ messages | tojson }} {{ tools }} {{ add_generation_prompt }} {{ bos_token }} {{ eos_token }}"


def is_ordinary(messages: Mappings) -> bool:
    """Return whether every version of transformers passes these messages to the template unchanged: newer versions drop values of
    None and refuse an empty list."""
    return bool(messages) and all(type(message) is dict and None not in message.values() for message in messages)


def renders_as_transformers(tokenizer: Any) -> bool:
    """Return whether `render_chat` renders conversations as this tokenizer of transformers does. It checks that the tokenizer
    overrides no method and renders a trial template alike; the trial does not use the checkpoint's template, which may be
    anything."""
    from transformers import PreTrainedTokenizerBase

    kind = type(tokenizer)
    if any(getattr(kind, way) is not getattr(PreTrainedTokenizerBase, way) for way in OWN_WAYS):
        return False
    trial: Any = [{"role": "user", "content": "hello"}]
    theirs = tokenizer.apply_chat_template(trial, chat_template=TRIAL, tokenize=False, add_generation_prompt=True)
    try:
        return bool(
            render_chat(TRIAL, trial, (), {**tokenizer.special_tokens_map, **ChatEnding.ANSWER.value}) == theirs
        )
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


class CachedPipeline(msgspec.Struct, frozen=True):
    """Kept copy of a tokenizer: its pipeline, and the facts that a client needs from it."""

    versions: str  # of transformers and tokenizers
    pipeline: str  # JSON of `tokenizers`
    separator: int | None
    ends: tuple[int, ...]
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]  # by their names in templates
    template_settings: frozenset[str]
    renders_chats: bool  # whether `render_chat` renders as transformers does
    has_response_template: bool
    splits_special_tokens: bool


class CachedTokenizer(Tokenizer):
    """Tokenizer of a checkpoint that encodes and decodes by a kept pipeline. For anything else it loads transformers' tokenizer
    from the folder, once."""

    def __init__(self, folder: Path, cached: CachedPipeline) -> None:
        from tokenizers import Tokenizer as Pipeline

        self._folder = folder
        self._cached = cached
        self._pipeline = Pipeline.from_str(cached.pipeline)
        self._pipeline.encode_special_tokens = cached.splits_special_tokens
        self.chat_template, self.template_settings = cached.chat_template, cached.template_settings
        self.special_tokens = cached.special_tokens
        self.separator, self.has_response_template = cached.separator, cached.has_response_template
        self.ends = cached.ends

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self._pipeline.decode(list(ids), skip_special_tokens=not special_tokens)

    def _chat_ids(
        self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any], check_text: CheckText | None
    ) -> list[int]:
        template = chosen_template(self._cached.chat_template, with_tools=bool(tools))
        if template is None or not self._cached.renders_chats or not is_ordinary(messages):
            return super()._chat_ids(messages, tools, variables, check_text)
        text = render_chat(template, messages, tools, {**self.special_tokens, **variables})
        if check_text is not None:
            check_text(len(text))
        return self._ids(text, special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._pipeline.token_to_id(token)

    def _piece(self, token: int) -> str:
        return self._pipeline.id_to_token(token) or ""

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        # `encode` would hold the GIL.
        (encoding,) = self._pipeline.encode_batch([text], add_special_tokens=special_tokens)
        return encoding.ids


class TokenizerCache:
    """Cache of tokenizers in one home folder. A missing or damaged entry, or one of other library versions, is made again."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def tokenizer(self, swarm: bytes, folder: Path) -> Tokenizer:
        """Return the tokenizer of the swarm with the id `swarm`, whose files are in `folder`. Raises CheckpointError if the folder
        has no usable tokenizer."""
        path = self._folder / f"{swarm.hex()}.json"
        kept = read_stored(path, CachedPipeline, max_bytes=MAX_BYTES)
        if kept is not None and kept.versions == _versions():
            return CachedTokenizer(folder, kept)
        made = Tokenizer(folder)
        if is_plain(made):
            self._store(path, pipeline_copy(made))
        return made

    def _store(self, path: Path, cached: CachedPipeline) -> None:
        try:
            write_stored(path, cached)
            for old in sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-MOST_KEPT]:
                old.unlink()
        except (OSError, LocalError) as error:
            log.info("cannot keep the tokenizer; it is built again next time: %s", error)


def is_plain(tokenizer: Tokenizer) -> bool:
    """Return whether transformers' tokenizer does nothing besides its pipeline: it is a fast one, overrides no method of encoding
    or decoding, has no mode for another language, and removes no spaces afterwards."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    own = tokenizer.own
    kind = type(own)
    if not isinstance(own, TokenizersBackend) or hasattr(own, "_switch_to_input_mode"):
        return False
    if any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ENTRANCES):
        return False
    is_bpe = type(own.backend_tokenizer.model).__name__ == "BPE"
    return not own.clean_up_tokenization_spaces or (is_bpe and not getattr(own, BPE_CLEAN_UP, True))


def pipeline_copy(tokenizer: Tokenizer) -> CachedPipeline:
    """Return the copy to keep of a plain tokenizer (see `is_plain`)."""
    from tokenizers import Tokenizer as Pipeline

    whole = Pipeline.from_str(tokenizer.own.backend_tokenizer.to_str())
    whole.no_truncation()  # transformers does neither unless asked
    whole.no_padding()
    return CachedPipeline(
        versions=_versions(),
        pipeline=whole.to_str(),
        separator=tokenizer.separator,
        ends=tokenizer.ends,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        template_settings=tokenizer.template_settings,
        renders_chats=renders_as_transformers(tokenizer.own),
        has_response_template=tokenizer.has_response_template,
        splits_special_tokens=bool(tokenizer.own.split_special_tokens),
    )


@functools.cache
def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers"))


async def loaded(module: str) -> None:
    """Import `module` in a thread, so that the loop goes on: a module that needs torch takes seconds."""
    await asyncio.to_thread(importlib.import_module, module)


class ModelFiles:
    """Small files of the swarm that `host` has joined and whose manifest it has. `patience_s` returns how long to wait for peers to
    provide them. `most_positions` replaces the config's number of positions; the model's own table of positions still bounds it."""

    def __init__(self, host: Host, patience_s: Callable[[], float], *, most_positions: int | None = None) -> None:
        self._host = host
        self.patience_s = patience_s
        self._weights: Weights | None = None
        self._folder: Path | None = None
        self._tokenizer: Tokenizer | ByteTokenizer | None = None
        self._limits: ModelLimits | None = None
        self._stop_ids: tuple[int, ...] | None = None
        self._most_positions = most_positions
        self.cached_defaults: dict[str, float | int] | None = None  # for sampling; None: not read yet

    async def close(self) -> None:
        """Close the access to the weights, if it is open."""
        if self._weights is not None:
            await self._weights.close()

    async def weights(self) -> Weights:
        """Return access to the checkpoint, which stays open until `close`."""
        await loaded("swarmnode.weights.weights")
        from swarmnode.weights.weights import Weights

        if self._weights is None:
            self._weights = Weights(self._host)
        return self._weights

    async def tokenizer(self) -> Tokenizer | ByteTokenizer | None:
        """Return the checkpoint's tokenizer; for a swarm that trains without one, a ByteTokenizer; else None. Raises NoRoute if no
        peer provides the files, CheckpointError if the tokenizer cannot be used."""
        if self._tokenizer is None and has_tokenizer(file.name for file in self._manifest.files):
            folder, cache = await self.folder(), TokenizerCache(self._host.config.home)
            self._tokenizer = await asyncio.to_thread(cache.tokenizer, self._host.swarm.id, folder)
        elif self._tokenizer is None and self._manifest.mode == TRAIN:
            self._tokenizer = ByteTokenizer()
        return self._tokenizer

    async def limits(self) -> ModelLimits:
        """Return the bounds on requests to the model. Raises NoRoute if no peer provides the config."""
        if self._limits is None:
            manifest, folder = self._manifest, await self.folder()
            trained = self._most_positions or context_limit(folder)
            positions = min((size for size in (manifest.model.positions, trained) if size), default=None)
            self._limits = ModelLimits(vocabulary_size(folder), positions, manifest.session_codecs)
        return self._limits

    @property
    def cached_positions(self) -> int | None:
        """Number of positions that a text may have, as known without asking a peer; None if there is no limit or it is not known
        yet."""
        return self._manifest.model.positions or None if self._limits is None else self._limits.positions

    async def generation_defaults(self) -> dict[str, float | int]:
        """Return the defaults for sampling of the function `generation_defaults`. Raises NoRoute if no peer provides the config."""
        if self.cached_defaults is None:
            self.cached_defaults = generation_defaults(await self.folder())
        return self.cached_defaults

    async def stop_ids(self, tokenizer: Tokenizer | ByteTokenizer | None = None) -> tuple[int, ...]:
        """Return the ids of the tokens that end a text by `tokenizer`, which may be an adapter's; None is the model's own. Empty if
        none are known. Raises NoRoute if no peer provides the files."""
        own = await self.tokenizer()
        if tokenizer is not None and tokenizer is not own:
            return await asyncio.to_thread(stop_ids, await self.folder(), tokenizer)
        if self._stop_ids is None:
            self._stop_ids = await asyncio.to_thread(stop_ids, await self.folder(), own)
        return self._stop_ids

    @property
    def _manifest(self) -> Manifest:
        assert self._host.swarm.manifest is not None
        return self._host.swarm.manifest

    async def folder(self) -> Path:
        """Return the folder with the config and the tokenizer. Raises NoRoute if no peer provides them in time."""
        if self._folder is None:
            weights, patience_s = await self.weights(), self.patience_s()
            try:
                self._folder = await asyncio.wait_for(weights.small_files(), patience_s)
            except asyncio.TimeoutError:
                raise NoRoute(
                    f"no machine sent the model's config and tokenizer within {patience_s:.0f} s: try again when one is online"
                ) from None
        return self._folder
