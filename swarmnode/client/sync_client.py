"""Client of a swarm for code without asyncio: a SwarmClient on an event loop in a thread of its own.

with swarmnode.connect("friends.swarm") as swarm:
    print(swarm.generate("Once upon a time", max_new_tokens=50).text)
    model = swarm.causal_lm()                      # transformers' generate, beam search and all
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from swarmnode.client.swarm_client import SizeKeywords, SwarmClient, aconnect
from swarmnode.client.text_stream import GeneratedText, TextStream
from swarmnode.client.tokenizer import ChatMessage
from swarmnode.config import ClientConfig
from swarmnode.errors import UsageError
from swarmnode.net.tasks import cancel_the_rest
from swarmnode.serving.client.generation import GenerateKeywords, GenerateOptions, Generation

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from swarmnode.client.tuning.tuned_lm import TunedCausalLM
    from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
    from swarmnode.serving.client.causal_lm import RemoteCausalLM
    from swarmnode.swarm.storage.swarmfile import Swarm

T = TypeVar("T")


class PeftConfig(Protocol):
    """Settings of an adapter as peft has them, such as its LoraConfig."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""


class SyncStream:
    """Stream of generated text for threads: `for piece in stream`. At the end, `result` holds the whole generation."""

    def __init__(self, owner: SyncSwarm, stream: TextStream) -> None:
        self._owner = owner
        self._stream = stream

    def __repr__(self) -> str:
        return f"<SyncStream {self._stream!r}>"

    @property
    def result(self) -> Generation:
        """Text generated up to now, with its route and speed."""
        return self._stream.result

    def __iter__(self) -> Iterator[GeneratedText]:
        pieces = self._stream.__aiter__()
        try:
            while True:
                try:
                    yield self._owner.run(anext(pieces))  # type: ignore[arg-type]  # an async generator's step is a coroutine
                except StopAsyncIteration:
                    return
        finally:
            self._owner.run(pieces.aclose())


class SyncSwarm:
    """Client of a swarm for code without asyncio; its thread ends with `close`. Create it with `connect`."""

    def __init__(self, joining: Coroutine[Any, Any, SwarmClient]) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarmnode-client", daemon=True)
        self._thread.start()
        try:
            self._client = self.run(joining)
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        return f"<SyncSwarm {self._client!r}>"

    def __enter__(self) -> SyncSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs on the client's loop. Raises its error."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def status(self) -> dict[str, Any]:
        """Return the swarm's name, model and peers, and `max_model_len`: the positions of a text, None without a limit
        and before the first request has read it."""
        return self._client.status()

    def generate(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None, **keywords: Unpack[GenerateKeywords]
    ) -> Generation:
        """Generate a complete continuation of `prompt`. Calls from several threads share passes in the swarm.

        Args:
            prompt: Text or token ids.
            options: Sampling parameters; keywords replace single fields.
            **keywords: `max_tokens`, `stop` and the fields of GenerateOptions.

        Returns:
            The text, its token ids, its route and its speed.

        Raises:
            UsageError: If the swarm has no language model, or the prompt or an option is impossible for it.
            NoRoute, Busy, PeerError: If the swarm cannot compute the text within `patience_s`.
        """
        return self.run(self._client.generate(prompt, options, **keywords))

    def stream(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None, **keywords: Unpack[GenerateKeywords]
    ) -> SyncStream:
        """Generate a continuation piece by piece: `for piece in stream`; arguments and errors are those of `generate`."""
        return SyncStream(self, self.run(self._client.stream(prompt, options, **keywords)))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Generation:
        """Generate the complete answer to a conversation by the model's chat template.

        Args:
            messages: Dicts such as {"role": "user", "content": "Hello"}; roles are system, user and assistant.
            options: Sampling parameters; keywords replace single fields.
            **keywords: `max_tokens`, `stop` and the fields of GenerateOptions.

        Returns:
            The answer, as of `generate`.

        Raises:
            UsageError: If a message has another shape, or the swarm has no tokenizer.
            CheckpointError: If the chat template fails.
        """
        return self.run(self._client.chat(messages, options, **keywords))

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> SyncStream:
        """Generate the answer to a conversation piece by piece; arguments and errors are those of `chat`."""
        return SyncStream(self, self.run(self._client.stream_chat(messages, options, **keywords)))

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the outputs of the swarm's module for `inputs`, both arrays by name with samples along the first dimension.

        Raises UsageError if the swarm serves no module or the inputs do not fit, and NoRoute or Busy if it cannot compute them.
        """
        return self.run(self._client.infer(inputs))

    def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: bool = True) -> list[np.ndarray]:
        """Return a vector for each text (or row of token ids). Texts that are longer than the model takes are cut, or refused with
        ContextTooLong if not `truncate`. Raises UsageError if the swarm serves no embedding model."""
        return self.run(self._client.embed(texts, truncate=truncate))

    def classify(self, texts: Sequence[str | Sequence[int]]) -> list[dict[str, float]]:
        """Return the probability of each class for each text. Raises UsageError if the swarm serves no classifier."""
        return self.run(self._client.classify(texts))

    @overload
    def causal_lm(self, *, hold_ends: bool = False, compress: str = "none", adapter: str = "") -> RemoteCausalLM: ...

    @overload
    def causal_lm(
        self,
        *,
        adapter: Mapping[str, Any] | AdapterRecipe | PeftConfig,
        hold_ends: bool = True,
        compress: str = "none",
        is_trainable: bool = True,
        **sizes: Unpack[SizeKeywords],
    ) -> TunedCausalLM: ...

    @overload
    def causal_lm(
        self,
        *,
        is_trainable: Literal[True],
        hold_ends: bool = True,
        compress: str = "none",
        adapter: str | Path | None = None,
        **sizes: Unpack[SizeKeywords],
    ) -> TunedCausalLM: ...

    def causal_lm(
        self,
        *,
        hold_ends: bool | None = None,
        compress: str = "none",
        adapter: Any = "",
        is_trainable: bool | None = None,
        **sizes: Unpack[SizeKeywords],
    ) -> RemoteCausalLM | TunedCausalLM:
        """Return the swarm as a transformers model: one that generates, or with a new adapter or `is_trainable` one that trains.

        Args:
            hold_ends: Run embedding and head on this machine, so that token ids and logits never leave it. By default only a model
                that trains does; without them it has a loss and no logits.
            compress: Codec of the activations, and of gradients, between machines.
            adapter: To generate, the name of the swarm's LoRA adapter or a folder of yours; "" is the model alone. To train, peft's
                config or fields of a recipe such as {"method": "lora", "rank": 16}.
            is_trainable: Train the adapter in the folder `adapter` further; without an adapter, only parameters of yours train.
            **sizes: Of a model that trains: `rows` (8) and `positions` (512), the most rows of a batch and tokens of a row, and
                `window` (4), the most forward passes that wait for their backward pass.

        Raises:
            UsageError: If the swarm has no language model, codec or adapter of this name, or the adapter cannot be trained.
            CheckpointError: If the folder or the ends cannot be read.
            NoRoute, Busy: If a model shall train, and no machines tune within the client's patience.
        """
        names_one = adapter is None or isinstance(adapter, str | Path)
        if is_trainable or (not names_one and is_trainable is None):
            ends = hold_ends is not False
            return self.run(self._client.trainable_lm(adapter, hold_ends=ends, compress=compress, **sizes))
        if not names_one or sizes:
            raise UsageError("a new adapter, and the sizes of batches, are for a model with is_trainable=True")
        name = str(adapter.absolute()) if isinstance(adapter, Path) else adapter or ""
        return self.run(self._client.acausal_lm(hold_ends=bool(hold_ends), compress=compress, adapter=name))

    def close(self) -> None:
        """Leave the swarm and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            self.run(self._client.close())
            self._stop()

    def _stop(self) -> None:
        self.run(cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def connect(
    swarm: Swarm | str | Path,
    *,
    home: str | Path | None = None,
    patience_s: float = 60.0,
    trust: Sequence[str] = (),
    audit_share: float = ClientConfig.audit_share,
) -> SyncSwarm:
    """Join a swarm as a client: `with connect(...) as swarm`.

    Args:
        swarm: The result of `create`, a .swarm file, an invite, or the name of a joined, founded or public swarm.
        home: Folder for the client's state; by default $SWARMNODE_HOME, else the platform's place for user data.
        patience_s: How long to wait for the swarm, in seconds; also how long a later request waits for a route.
        trust: Peers that may compute: peer ids or their ends, `group:NAME`, `net:203.0.113.0/24`. Empty allows all.
        audit_share: Share of the answers' cost to spend on recomputing some of them at other peers; 0 turns this off.

    Returns:
        The client.

    Raises:
        NetworkDown: No peer answers in time.
        UsageError: `swarm` or `trust` cannot be read.
        NotAdmitted: The swarm refuses this client.
    """
    return SyncSwarm(aconnect(swarm, home=home, patience_s=patience_s, trust=trust, audit_share=audit_share))
