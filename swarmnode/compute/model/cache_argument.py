"""What families call the argument that takes a KV cache, and the output that gives it back: it was renamed in transformers 5.24."""

from __future__ import annotations

from dataclasses import fields

from swarmnode.compute.model.lean import lean

with lean():
    from transformers.modeling_outputs import CausalLMOutputWithPast

_NAMES = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE_ARGUMENT = "cache" if "cache" in _NAMES else "past_key_values"
