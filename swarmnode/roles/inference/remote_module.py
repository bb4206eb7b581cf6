"""A swarm as a module: arrays in, arrays out, every unit computed by somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.compute.graph.arrays import input_values, output_arrays
from swarmnode.compute.graph.layout import Layout
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.plan.view import Span
from swarmnode.roles.host import Host
from swarmnode.roles.inference.client import InferenceClient, Served
from swarmnode.roles.inference.pass_auditor import PassAuditor
from swarmnode.roles.serving.client.router import Router

if TYPE_CHECKING:
    import numpy as np


class RemoteModule:
    """Made by `open`, ended by `close`. Passes may run at once."""

    def __init__(self, client: InferenceClient) -> None:
        self.graph = client.layout.graph
        self._client = client

    def __repr__(self) -> str:
        return f"<RemoteModule {self.graph!r}>"

    @classmethod
    async def open(
        cls,
        host: Host,
        folder: Path,
        router: Callable[[Span], Router],
        *,
        patience_s: float,
        on_served: Served,
        audit_share: float,
    ) -> RemoteModule:
        """The module whose graph is in `folder`; the others are InferenceClient's. Raises CheckpointError."""
        layout = await asyncio.to_thread(lambda: Layout(read_graph(folder)))
        client = InferenceClient(
            host, layout, router, patience_s=patience_s, on_served=on_served, audit_share=audit_share
        )
        return cls(client)

    async def close(self) -> None:
        """End all links."""
        await self._client.close()

    @property
    def auditor(self) -> PassAuditor:
        """Has some passes computed again."""
        return self._client.auditor

    def output_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Of the outputs by name, for so many samples."""
        types = {value.ref: value.type for value in self._client.layout.boundaries[-1]}
        return {output.name: types[output.value].sizes(batch) for output in self.graph.outputs}

    async def infer(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs by name for inputs by name. Raises UsageError where they do not fit or cannot be computed, NoRoute, Busy."""
        values = await asyncio.to_thread(input_values, self.graph, arrays)
        return output_arrays(self.graph, await self._client.run(values))
