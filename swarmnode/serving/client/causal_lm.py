"""A swarm as a transformers model: `generate` with all its features runs here, the layers run in the swarm.

The client drives every step, so any logits processor, stopping criterion, streamer or beam search works. If the client
holds embedding and head itself, token ids do not leave it either.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from swarmnode.codec.body import MAX_WANTED_POSITIONS
from swarmnode.codec.messages import Input, Mode, Want
from swarmnode.codec.tensors import AUTO, codec_named
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.traced_model import CACHE_ARGUMENT
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import UsageError
from swarmnode.links.hop import Entry
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.limits import ModelLimits
from swarmnode.serving.client.session_spec import MAX_WIDTH, Received, SessionSpec, ids_entry

OpenSession = Callable[[SessionSpec], ClientSession]
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Ends:
    """Embedding and head on the client, each a span of one layer. They keep no cache, only positions."""

    def __init__(self, embedding: StageRunner, head: StageRunner) -> None:
        self._embedding = embedding
        self._head = head
        self.hidden_size = embedding.span.hidden_size  # of the states between embedding and head

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Ends:
        """Load layer 0 and the last layer. Raises CheckpointError if the checkpoint cannot be read."""
        units = checkpoint.units
        nothing = RunnerConfig(cache_bytes=0)
        head = load_span(checkpoint, units - 1, units)
        head.packings.at_once.run()
        return cls(StageRunner(load_span(checkpoint, 0, 1), nothing), StageRunner(head, nothing))

    def open(self, session: Hashable, rows: int, max_length: int, padding: Sequence[int]) -> None:
        """Begin a session of `rows` rows with at most `max_length` positions; `padding` is the left padding of each
        row."""
        for runner in (self._embedding, self._head):
            runner.open(session, rows=rows, max_length=max_length, padding=padding)

    def close(self, session: Hashable) -> None:
        """End a session and forget its positions."""
        for runner in (self._embedding, self._head):
            runner.close(session)

    def truncate(self, session: Hashable, length: int) -> None:
        """Forget the positions of a session from `length` on."""
        for runner in (self._embedding, self._head):
            runner.truncate(session, length)

    def embed(self, session: Hashable, ids_BT: Tensor, reorder: tuple[int, ...]) -> Tensor:
        """Return the embeddings hidden_BTH of a session's next token ids."""
        return self._embedding.run([StepInput(session, ids_BT, want=WANT_NOTHING, reorder=reorder)])[0].output

    def logits(self, session: Hashable, hidden_BTH: Tensor) -> Tensor:
        """Return logits_BTV (float32) of the hidden states that the last layer returned."""
        work = StepInput(session, hidden_BTH.to(self._head.span.dtype), want=WANT_ALL)
        return self._head.run([work])[0].output.to(torch.float32)


class RemoteCache(Cache):
    """Stand-in for the cache that the hops hold: it knows its length and the reordering that the next input carries."""

    def __init__(self, owner: RemoteCausalLM, session: ClientSession) -> None:
        super().__init__(layers=[])
        self._owner = owner
        self.session = session
        self.reorder: tuple[int, ...] = ()
        self._cropped: int | None = None  # where the next input begins, if before the end of the last one

    def __repr__(self) -> str:
        return f"<RemoteCache {self.session!r}>"

    @property
    def length(self) -> int:
        """Number of positions before the next input."""
        return self.session.length if self._cropped is None else self._cropped

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def crop(self, max_length: int) -> None:
        """Forget the positions from `max_length` on; if it is not positive, the last `-max_length` positions (rejected
        drafts)."""
        kept = max_length if max_length > 0 else self.length + max_length
        if kept < self.length:
            self._cropped = max(0, kept)

    def begin(self) -> int:
        """Return the position at which an input that is sent now begins, and clear a pending crop."""
        length, self._cropped = self.length, None
        return length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.session.spec.max_length

    @property
    def is_compileable(self) -> bool:
        return False

    def check(self, rows: int, count: int) -> None:
        """Raise UsageError if the input's `rows` differ from the session's, or `count` more positions do not fit."""
        spec, length = self.session.spec, self.length
        if rows != spec.rows:
            raise UsageError(f"the cache was made for {spec.rows} sequences, the input has {rows}; make a new cache")
        if length + count > spec.max_length:
            raise UsageError(
                f"the cache has room for {spec.max_length} positions: {length} "
                f"are taken, {count} more do not fit; make a larger cache"
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Permute the rows before the next input (beam search). Raises UsageError if `beam_idx` does not name one row
        for each row."""
        order, rows = beam_idx.tolist(), self.session.spec.rows
        if len(order) != rows or not all(0 <= row < rows for row in order):
            raise UsageError(f"a reordering must list {rows} row numbers below {rows}, not {order}")
        self.reorder = tuple(self.reorder[row] for row in order) if self.reorder else tuple(order)

    def close(self) -> None:
        """Free the caches in the swarm."""
        self._owner.free(self.session)


class RemoteCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A causal LM whose layers run in a swarm. Use it as any transformers model: `model.generate(ids, num_beams=4)`.

    It cannot be trained: outputs carry no graph.

    Args:
        config: The model's transformers configuration.
        open_session: Makes a session of the client from its specification, without starting it.
        run: Executes a coroutine on the client's loop from the calling thread and returns its result.
        folder: Folder of the checkpoint's configurations; weights are not needed. Without it, generation defaults come
            from `config`.
        ends: Embedding and head, if they run on this client.
        prompt_chunk_tokens: Positions in one message of a prompt.
        limits: Token ids, positions, codecs and adapters that the model has.
        compress: Codec of the states between machines; "auto" leaves the choice to the hops.
        adapter: Name of the swarm's adapter; "" is the model alone.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"
    _supports_attention_backend = True

    def __init__(
        self,
        config: PretrainedConfig,
        open_session: OpenSession,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        *,
        folder: Path | None = None,
        ends: Ends | None = None,
        prompt_chunk_tokens: int = 128,
        limits: ModelLimits = ModelLimits(),
        compress: str = "none",
        adapter: str = "",
    ) -> None:
        config._attn_implementation = "eager"  # no attention runs here
        super().__init__(config)
        self._open_session = open_session
        self.run = run
        self._ends = ends
        self._prompt_chunk_tokens = prompt_chunk_tokens
        self._compress = compress
        self._adapter = adapter
        self._limits = limits
        self.generation_config = _generation_config(folder) or GenerationConfig.from_model_config(config)
        self.register_buffer("_where", torch.empty(0), persistent=False)  # gives the model a device and a dtype

    def __repr__(self) -> str:
        ends = "the ends here, " if self._ends else ""
        return f"<RemoteCausalLM {self.config.model_type}, {ends}layers in the swarm>"

    @property
    def device(self) -> torch.device:
        """Device of ids and outputs: always the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the outputs: always float32."""
        return torch.float32

    # -- transformers' side

    def _prepare_cache_for_generation(  # type: ignore[override]  # declared bool there, returns nothing there too
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if model_kwargs.get(CACHE_ARGUMENT) is not None:
            return
        rows = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1) * batch_size
        padding = self._padding(model_kwargs.get("attention_mask"), rows)
        model_kwargs[CACHE_ARGUMENT] = self.new_cache(rows, self._limits.room(max_cache_length), padding)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does. The session in the swarm is freed at the end, unless you passed the cache
        yourself.

        Raises UsageError if the input ids are not ids of this model, or if transformers shall guess by the model's prediction
        layer, whose weights are at the nodes.
        """
        config = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("use_mtp", getattr(config, "use_mtp", False)):
            raise UsageError(
                "use_mtp: the prediction layer is at the nodes, and guesses for `generate` and `stream` of the client alone: "
                "leave it out"
            )
        given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(given, torch.Tensor):
            self._check_ids(given)  # before a session is opened
        kept = kwargs.get("cache", kwargs.get("past_key_values"))
        self._opened: list[RemoteCache] = []
        try:
            generation = cast(Any, super())  # some releases declare a protocol there that asks for more than it uses
            return generation.generate(*args, **kwargs)
        finally:
            for cache in self._opened:
                if cache is not kept:
                    cache.close()
            self._opened = []

    @staticmethod
    def _padding(attention_mask_BT: torch.Tensor | None, rows: int) -> tuple[int, ...]:
        """Return the left padding of each row, or () if no position is masked.

        Raises UsageError if the mask has holes, right padding, a row without a token, or does not fit `rows`.
        """
        if attention_mask_BT is None or bool(attention_mask_BT.all()):
            return ()
        if attention_mask_BT.dim() != 2 or rows % len(attention_mask_BT):
            raise UsageError(f"the attention mask must be (rows, T), with as many rows as there are sequences: {rows}")
        padding_B = (attention_mask_BT == 0).sum(dim=1)
        if int(padding_B.max()) == attention_mask_BT.shape[1]:
            raise UsageError("the attention mask leaves a sequence without any token; leave that sequence out")
        columns_T = torch.arange(attention_mask_BT.shape[1])
        if not torch.equal(attention_mask_BT != 0, columns_T[None, :] >= padding_B[:, None]):
            raise UsageError("the attention mask must be left padding: zeros first, then ones (padding_side='left')")
        return tuple(padding_B.repeat_interleave(rows // len(padding_B)).tolist())

    def new_cache(self, rows: int, max_length: int, padding: tuple[int, ...] = ()) -> RemoteCache:
        """Open a session in the swarm for `rows` sequences of at most `max_length` positions; `padding` is the left
        padding of each row.

        Raises UsageError if the model does not allow `rows` or `max_length`, and the error of `ClientSession.start` if
        it does not open.
        """
        self._limits.check_session(rows, max_length)
        width = (self._ends.hidden_size if self._ends else self._limits.vocabulary) or MAX_WIDTH
        spec = SessionSpec(
            Mode.DRIVEN,
            max_length=max_length,
            rows=rows,
            padding=padding,
            codec=codec_named(self._compress),
            adapts=self._compress == AUTO,
            allowed=frozenset(self._limits.codecs),
            width=width,
            adapter=self._adapter,
        )
        session = self._open_session(spec)
        if self._ends is not None:
            self._ends.open(session.id, rows, max_length, padding)
        self.run(session.start())
        cache = RemoteCache(self, session)
        if hasattr(self, "_opened"):
            self._opened.append(cache)
        return cache

    def free(self, session: ClientSession) -> None:
        """End a session of this model and free its caches."""
        if self._ends is not None:
            self._ends.close(session.id)
        self.run(session.close())

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Cache | None = None,  # the cache's name in transformers before 5.24
        **_unused: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits_BTV of `input_ids` (BT), only of the last position if `logits_to_keep` is 1.

        Without a cache a session is opened for this call, and kept only if `use_cache`. Raises UsageError if the ids,
        the mask or the cache do not fit the model.
        """
        if input_ids is None:
            raise UsageError("a model in a swarm takes input_ids, not inputs_embeds")
        self._check_ids(input_ids)
        cache = cache if cache is not None else past_key_values
        keep = use_cache or cache is not None
        if cache is None:
            padding = self._padding(attention_mask, input_ids.shape[0])
            cache = self.new_cache(input_ids.shape[0], self._limits.room(input_ids.shape[1]), padding)
        if not isinstance(cache, RemoteCache):
            raise UsageError(f"the cache must come from this model's new_cache, not {type(cache).__name__}")
        cache.check(*input_ids.shape)
        logits_BTV = self._step(cache, input_ids, Want.LAST if logits_to_keep == 1 else Want.ALL)
        output: dict[str, Any] = {"logits": logits_BTV}
        if keep:
            output[CACHE_ARGUMENT] = cache
        else:
            cache.close()
        return CausalLMOutputWithPast(**output)

    def _check_ids(self, ids_BT: torch.Tensor) -> None:
        if ids_BT.dim() != 2 or not ids_BT.numel() or ids_BT.dtype not in ID_DTYPES:
            shape = "x".join(map(str, ids_BT.shape))
            raise UsageError(f"input_ids must be whole numbers of shape (rows, T), not {ids_BT.dtype} of shape {shape}")
        self._limits.check_ids(int(ids_BT.min()), int(ids_BT.max()))

    # -- the swarm's side

    def _step(self, cache: RemoteCache, ids_BT: torch.Tensor, want: Want) -> torch.Tensor:
        outputs = self.run(self._exchange(cache, ids_BT, want))
        y_BTX = torch.cat([self._decode(received) for received in outputs], dim=1)
        return self._ends.logits(cache.session.id, y_BTX) if self._ends else y_BTX.float()

    async def _exchange(self, cache: RemoteCache, ids_BT: torch.Tensor, want: Want) -> list[Received]:
        """Send the input in chunks and gather the wanted outputs. If all are wanted, each chunk waits for the output of
        the one before."""
        session, size = cache.session, min(self._prompt_chunk_tokens, MAX_WANTED_POSITIONS)
        reorder, cache.reorder = cache.reorder, ()
        begin = cache.begin()
        if self._ends is not None and begin < session.length:
            self._ends.truncate(session.id, begin)
        end = begin + ids_BT.shape[1]
        outputs = []
        for start in range(begin, end, size):
            chunk_BT = ids_BT[:, start - begin : start - begin + size]
            last = start + chunk_BT.shape[1] == end
            wanted = want if want == Want.ALL or last else Want.NOTHING
            entry = self._entry(session.id, start, chunk_BT, wanted, reorder)
            session.send(entry, expect=None if wanted == Want.NOTHING else entry.end)
            reorder = ()
            if wanted != Want.NOTHING:
                outputs.append(await session.receive())
        return outputs

    def _entry(self, session: bytes, start: int, ids_BT: torch.Tensor, want: Want, reorder: tuple[int, ...]) -> Entry:
        if self._ends is None:
            return ids_entry(start, ids_BT.tolist(), want, reorder)
        info, payload = encode(self._ends.embed(session, ids_BT, reorder), codec_named(self._compress))
        return Entry(start, ids_BT.shape[1], Input(info, want=want, reorder=reorder), (payload,))

    @staticmethod
    def _decode(received: Received) -> torch.Tensor:
        assert received.output.tensor is not None
        return decode(received.output.tensor, received.payload)


def _generation_config(folder: Path | None) -> GenerationConfig | None:
    """Read a checkpoint's generation configuration; None if it has none or `folder` is None."""
    try:
        return None if folder is None else GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return None
