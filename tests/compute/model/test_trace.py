"""Models are built under switches of the whole process, and so one after the other, each config once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.compute.model import traced_model
from swarmnode.compute.model.traced_model import build_on_meta, trace_model


def test_who_builds_a_model_waits_for_who_builds_another() -> None:
    told: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self, _config: object) -> None:
            super().__init__()
            told.append("the first begins")
            begun.set()
            go_on.wait(60)
            told.append("the first is built")

    class Quick(nn.Module):
        def __init__(self, _config: object) -> None:
            super().__init__()
            told.append("the second begins")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build_on_meta, Slow, None)
        assert begun.wait(60)
        second = threads.submit(build_on_meta, Quick, None)
        go_on.set()
        first.result(60)
        second.result(60)
    assert told == ["the first begins", "the first is built", "the second begins"]


def test_a_config_is_tried_once_and_another_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def build(model_class: type[nn.Module], config: LlamaConfig) -> nn.Module:
        built.append(config.num_hidden_layers)
        return build_on_meta(model_class, config)

    monkeypatch.setattr(traced_model, "build_on_meta", build)
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=77)
    first = trace_model(LlamaForCausalLM, config)
    assert trace_model(LlamaForCausalLM, LlamaConfig(**config.to_dict())) == first
    config.num_hidden_layers = 2
    assert [len(trace_model(LlamaForCausalLM, config).cache_shapes) for _ in range(2)] == [2, 2]
    assert built == [3, 2]
