"""First and last unit of a model in the owner's process, with gradients: the layers in between are elsewhere.

So soft prompts, the embedding, and a head are ordinary parameters of the owner, and logits come out.

Positions of a microbatch that have a label: only for these are logits computed, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.span import ModelSpan, load_model
from swarmnode.compute.serving.loading import check_family
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import PROMPT, AdapterLayers, TrainedDora
from swarmnode.compute.training.lm import NullCache
from swarmnode.data.rows import NO_LABEL

NAME = "tuned"  # of the adapter among those of a span, which has no other


class HeldEnds(nn.Module):
    """Embedding, final norm and head of a model, with the family's own code, and an adapter's tensors there.

    The weights are float32 and frozen until their owner says otherwise. A tied head and the embedding are one parameter. Passes
    compute as in serving, without dropout.
    """

    def __init__(self, front: ModelSpan, back: ModelSpan, recipe: AdapterRecipe) -> None:
        """Make the ends of the spans of the first and of the last unit."""
        super().__init__()
        self.front, self.back, self.recipe = front, back, recipe
        self.embedding, self.head = front.model, back.model
        if front.family.tied:
            self.head.get_output_embeddings().weight = self.embedding.get_input_embeddings().weight
        self._cache = NullCache(front.config)
        self._layers = [AdapterLayers(front, recipe), AdapterLayers(back, recipe)]
        self._doras: list[tuple[TrainedDora, Tensor, Tensor]] = []  # with copies of the matrices that its norms are of
        self._changed = [False, False]
        self._prompt_PH: Tensor | None = None
        self.train(False)

    def __repr__(self) -> str:
        return f"<HeldEnds of {self.front.family.model_class.__name__}, {self.weight_bytes / 1e6:.1f} MB>"

    @classmethod
    def load(cls, checkpoint: Checkpoint, recipe: AdapterRecipe) -> HeldEnds:
        """Load both units in float32. Raises CheckpointError if they cannot be read, or the family cannot be split."""
        check_family(checkpoint.family)
        units = checkpoint.family.units
        front, back = (
            ModelSpan(checkpoint.family, load_model(checkpoint, unit, unit + 1, dtype=torch.float32), unit, unit + 1)
            for unit in (0, units - 1)
        )
        return cls(front, back, recipe)

    @property
    def family(self) -> Family:
        """Family of the whole model."""
        return self.front.family

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; tied ones count once."""
        return sum(one.nbytes for one in self.parameters())

    def train(self, mode: bool = True) -> HeldEnds:
        """Stay without dropout, in whichever mode the module around is."""
        return super().train(False)

    # -- the adapter's tensors in these units

    def starts(self) -> dict[str, Tensor]:
        """Return the values before the first step of all tensors that the adapter has here, trained and frozen."""
        return {name: tensor for layers in self._layers for name, tensor in layers.starts().items()}

    @property
    def trained(self) -> frozenset[str]:
        """Names of the tensors here that take gradients."""
        return frozenset(name for layers in self._layers for name in layers.trained)

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these tensors of the adapter from now on. They are read anew in each pass."""
        self._prompt_PH = tensors.get(PROMPT)
        for place, (span, layers) in enumerate(zip((self.front, self.back), self._layers, strict=True)):
            changes = layers.changes(tensors)
            for change in changes.values():
                if isinstance(change, TrainedDora):
                    change.refresh()
            self._changed[place] = bool(changes)
            self._doras += [
                (change, change.lora.a_RI.detach().clone(), change.lora.b_OR.detach().clone())
                for change in changes.values()
                if isinstance(change, TrainedDora)
            ]
            if changes:
                span.adapters.add(NAME, changes)

    # -- passes

    def enter(self, x: Tensor, places_BS: Tensor | None) -> Tensor:
        """Return hidden_BTH that enter the layers, from ids_BS or embedded_BSH. A soft prompt of the recipe comes first."""
        self._refresh()
        if self._prompt_PH is not None:
            embedded_BSH = x if x.is_floating_point() else self.embedding.get_input_embeddings()(x)
            prompt_PH = self._prompt_PH.to(embedded_BSH.dtype)
            x = torch.cat((prompt_PH.expand(len(x), *prompt_PH.shape), embedded_BSH), dim=1)
        places_BS = None if places_BS is None else places_BS.to(x.device)
        return self.front.forward(
            x, cache=self._cache, position_ids=places_BS, start=0, end=1, adapters=self._names(0, x)
        )

    @torch.no_grad()
    def _refresh(self) -> None:
        """Compute DoRA's norms anew if its matrices have changed: the norms are in the graphs of passes that wait."""
        for dora, a_RI, b_OR in self._doras:
            if not (torch.equal(a_RI, dora.lora.a_RI) and torch.equal(b_OR, dora.lora.b_OR)):
                dora.refresh()
                a_RI.copy_(dora.lora.a_RI)
                b_OR.copy_(dora.lora.b_OR)

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """Return logits_BTV of the states that left the last layer."""
        return self.back.forward(hidden_BTH, cache=self._cache, adapters=self._names(1, hidden_BTH))

    def normed(self, hidden_BTH: Tensor) -> Tensor:
        """Return the states that enter the head's matrix, from those that left the last layer."""
        return self.back.normed(hidden_BTH, cache=self._cache)

    def _names(self, place: int, x: Tensor) -> tuple[str, ...]:
        return (NAME,) * len(x) if self._changed[place] else ()

    def output_embeddings(self) -> Any:
        """Return the head's matrix as a module."""
        return self.head.get_output_embeddings()

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the head's matrix by another module, such as one with as many outputs as there are classes."""
        self.head.set_output_embeddings(head)


def count_labels(labels_BS: Tensor, prompt_positions: int) -> int:
    """Return the number of labels that some position predicts: a row's first token has one only behind a soft prompt."""
    return len(LabelledPositions.of(labels_BS, labels_BS.shape[1] + prompt_positions))


@dataclass(frozen=True)
class LabelledPositions:
    """Positions of a microbatch whose next token has a label: their places_N among all positions B * T, and these labels_N."""

    places_N: Tensor
    labels_N: Tensor

    @classmethod
    def of(cls, labels_BS: Tensor, length: int) -> LabelledPositions:
        """Return the positions, in rows of `length` positions that end with the S tokens of `labels_BS`."""
        labels_BT = functional.pad(labels_BS, (length - labels_BS.shape[1], 0), value=NO_LABEL)
        next_N = functional.pad(labels_BT[:, 1:], (0, 1), value=NO_LABEL).flatten()
        places_N = (next_N != NO_LABEL).nonzero().squeeze(1)
        return cls(places_N, next_N[places_N])

    def __len__(self) -> int:
        return len(self.places_N)

    def split(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places and labels, at most `count` at a time."""
        yield from zip(self.places_N.split(count), self.labels_N.split(count), strict=True)
