"""The client for everybody without asyncio: a SwarmClient on a loop in a thread of its own.

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
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnode.client.swarm_client import SwarmClient, aconnect
from swarmnode.client.text_stream import GeneratedText, TextStream
from swarmnode.config import ClientConfig
from swarmnode.net.tasks import cancel_the_rest
from swarmnode.serving.client.generation import GenerateOptions, Generation

if TYPE_CHECKING:
    import numpy as np

    from swarmnode.serving.client.causal_lm import RemoteCausalLM

T = TypeVar("T")


class SyncStream:
    """A TextStream for threads: `for piece in stream`; `result` holds all of it in the end."""

    def __init__(self, owner: SyncSwarm, stream: TextStream) -> None:
        self._owner = owner
        self._stream = stream

    def __repr__(self) -> str:
        return f"<SyncStream {self._stream!r}>"

    @property
    def result(self) -> Generation:
        """What has been generated so far, by which route, and how fast."""
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
    """Runs the client, in a thread that ends with `close`. Made by `connect`."""

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
        """The result of a coroutine on the client's loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def status(self) -> dict[str, Any]:
        """See SwarmClient.status."""
        return self._client.status()

    def generate(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None, **changes: Any
    ) -> Generation:
        """See SwarmClient.generate."""
        return self.run(self._client.generate(prompt, options, **changes))

    def stream(self, prompt: str | Sequence[int], options: GenerateOptions | None = None, **changes: Any) -> SyncStream:
        """See SwarmClient.stream."""
        return SyncStream(self, self.run(self._client.stream(prompt, options, **changes)))

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """See SwarmClient.infer."""
        return self.run(self._client.infer(inputs))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[np.ndarray]:
        """See SwarmClient.embed."""
        return self.run(self._client.embed(texts))

    def classify(self, texts: Sequence[str | Sequence[int]]) -> list[dict[str, float]]:
        """See SwarmClient.classify."""
        return self.run(self._client.classify(texts))

    def causal_lm(self, *, hold_ends: bool = False, compress: str = "none", adapter: str = "") -> RemoteCausalLM:
        """See SwarmClient.acausal_lm."""
        return self.run(self._client.acausal_lm(hold_ends=hold_ends, compress=compress, adapter=adapter))

    def close(self) -> None:
        """Leave the swarm and end the thread. Safe to call twice."""
        if self._thread.is_alive():
            self.run(self._client.close())
            self._stop()

    def _stop(self) -> None:
        self.run(cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def connect(
    swarm: str | Path,
    *,
    home: str | Path | None = None,
    patience_s: float = 60.0,
    trust: Sequence[str] = (),
    audit_share: float = ClientConfig.audit_share,
) -> SyncSwarm:
    """Join a swarm as a client: `with connect(...) as swarm`. Arguments and errors are those of `aconnect`."""
    return SyncSwarm(aconnect(swarm, home=home, patience_s=patience_s, trust=trust, audit_share=audit_share))
