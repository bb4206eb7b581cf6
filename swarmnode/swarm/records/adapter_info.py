"""An adapter, as a manifest lists it: a small change to the model that a session may ask for (`protocol/records.md`)."""

from __future__ import annotations

import re

import msgspec

from swarmnode.codec.body import MAX_ADAPTER_CHARS
from swarmnode.swarm.storage.content import HASH_BYTES, FileContent

MAX_ADAPTERS = 256
MAX_CONFIG_BYTES = 64 << 10
MAX_WEIGHTS_BYTES = 1 << 36  # 64 GiB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter by its name, and its two files: peft's `adapter_config.json` and `adapter_model.safetensors`, under names that
    no other file of the swarm has."""

    name: str
    config: FileContent
    weights: FileContent

    @property
    def files(self) -> tuple[FileContent, FileContent]:
        """Both."""
        return self.config, self.weights


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may be called so: it becomes a part of files' names, and of a model's in the API."""
    return len(name) <= MAX_ADAPTER_CHARS and _NAME.fullmatch(name) is not None


def file_names(name: str) -> tuple[str, str]:
    """What the config and the weights of an adapter are called."""
    return f"adapter-{name}.json", f"adapter-{name}.safetensors"


def is_valid(adapter: AdapterInfo) -> bool:
    """Whether name and files are within their bounds."""
    config, weights = adapter.files
    return (
        is_adapter_name(adapter.name)
        and (config.name, weights.name) == file_names(adapter.name)
        and 0 < config.size <= MAX_CONFIG_BYTES
        and 0 < weights.size <= MAX_WEIGHTS_BYTES
        and len(config.root) == len(weights.root) == HASH_BYTES
    )
