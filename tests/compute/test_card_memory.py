"""Memory of NVIDIA cards, with stand-ins for the driver and for torch's sight of the cards."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
import torch

from swarmnode.compute import device
from swarmnode.compute.device import probe_device, probe_devices
from swarmnode.errors import LocalError

CARDS = {"GPU-aaaa": (4 << 30, 24 << 30), "GPU-bbbb": (20 << 30, 24 << 30)}  # free, total bytes


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    uuids = [name.removeprefix("GPU-") for name in CARDS]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr(device, "_compute_on", lambda card, name: None)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda card: SimpleNamespace(free=CARDS[card][0], total=CARDS[card][1])
    )
    return monkeypatch


def test_the_card_with_most_free_memory_is_taken_by_the_drivers_word(two_cards):
    found = probe_device("auto")
    assert (found.index, found.name, found.free_bytes, found.total_bytes) == (1, "card 1", 20 << 30, 24 << 30)
    assert probe_device("cuda:0").free_bytes == 4 << 30


def test_without_the_drivers_library_torch_is_asked(two_cards):
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    two_cards.setattr(pynvml, "nvmlInit", fails)
    two_cards.setattr(torch.cuda, "mem_get_info", lambda index: [(9, 10), (5, 10)][index])
    assert probe_device("cuda").index == 0


def test_several_cards_in_the_order_asked_for(two_cards):
    assert [found.torch_device.index for found in probe_devices("cuda:1,cuda:0")] == [1, 0]
    assert [found.free_bytes for found in probe_devices("all")] == [4 << 30, 20 << 30]
    assert len(probe_devices("auto")) == 1
    with pytest.raises(LocalError, match="no device cuda:7: there are 2"):
        probe_devices("cuda:0,cuda:7")


def test_without_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LocalError, match="no device 'all': torch finds no usable card"):
        probe_devices("all")
    with pytest.raises(LocalError, match="no device 'cuda:0' on this machine"):
        probe_devices("cuda:0,cuda:1")


def test_cores_as_devices(monkeypatch):
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    assert [(found.kind, found.index, found.torch_device) for found in probe_devices("cpu:0,cpu:1")] == [
        ("cpu", 0, torch.device("cpu")),
        ("cpu", 1, torch.device("cpu")),
    ]
    with pytest.raises(LocalError, match="no device cpu:2: there are 2 cores"):
        probe_devices("cpu:0,cpu:2")
