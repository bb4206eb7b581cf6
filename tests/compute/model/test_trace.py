"""Models are built under switches of the whole process, and so one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import nn

from swarmnode.compute.model.trace import build_on_meta


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
