"""Adapters as people use them: a founder's command, nodes with an invite alone, a command that asks, a gateway and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.demo import generate_alone
from swarmnode.errors import LocalError
from tests.adapters import merged_checkpoint, save_llama_adapter
from tests.browser.chromium import Chromium, find_chromium
from tests.gateway.speaking import save_speaking_llama
from tests.real.forked import ForkedSwarm

IDS = [5, 17, 3, 42, 7, 11]
NEW = 16
SPANS = {"a": "0:2", "b": "2:4"}


class Poets:
    """A swarm of two nodes, neither of which has the adapter on its disk; `folder` has what it was founded on."""

    def __init__(self, local: ForkedSwarm, folder: Path) -> None:
        self.local = local
        self.model = folder / "model"
        save_speaking_llama(self.model)
        adapter = save_llama_adapter(folder / "verse", self.model)
        self.merged = merged_checkpoint(folder / "merged", self.model, adapter)
        self.prose = save_llama_adapter(folder / "prose", self.model, seed=1)
        self.merged_prose = merged_checkpoint(folder / "merged-prose", self.model, self.prose)
        invite = local.create(self.model, "--adapter", f"verse={adapter}")
        local.bootstrap()
        for node in [local.node(name, "--span", span, swarm=invite) for name, span in SPANS.items()]:
            node.wait_for("ready")


@pytest.fixture(scope="module")
def poets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poets]:
    folder = tmp_path_factory.mktemp("poets")
    with ForkedSwarm(folder) as local:
        yield Poets(local, folder)


def test_two_nodes_serve_an_adapter_that_the_founder_gives_them(poets: Poets) -> None:
    ask = ["generate", str(poets.local.file), "--ids", ",".join(map(str, IDS)), "-n", str(NEW), "--json"]
    told = json.loads(poets.local.command(*ask, "--adapter", "verse"))
    assert told["ids"] == list(generate_alone(poets.merged, IDS, NEW))
    assert [hop["span"] for hop in told["route"]] == [[0, 2], [2, 4]]
    alone = json.loads(poets.local.command(*ask))
    assert alone["ids"] == list(generate_alone(poets.model, IDS, NEW)) != told["ids"]
    assert json.loads(poets.local.command("status", str(poets.local.file), "--json"))["adapters"] == ["verse"]
    assert "adapters: verse" in poets.local.command("status", str(poets.local.file))
    with pytest.raises(LocalError, match=r"ended with code 2: .*no adapter 'rhyme': it has verse"):
        poets.local.command(*ask, "--adapter", "rhyme")


def test_a_member_brings_another_one_into_the_running_swarm(poets: Poets) -> None:
    file, run = str(poets.local.file), poets.local.command
    added = json.loads(run("adapter", "add", file, str(poets.prose), "--share", "members", "--json"))
    ask = ["generate", file, "--ids", ",".join(map(str, IDS)), "-n", str(NEW), "--json", "--adapter"]
    for name in (str(poets.prose), "prose"):
        told = json.loads(run(*ask, name))
        assert told["ids"] == list(generate_alone(poets.merged_prose, IDS, NEW)), name
        assert [hop["span"] for hop in told["route"]] == [[0, 2], [2, 4]]
    listed = {one["name"]: one for one in json.loads(run("adapter", "list", file, "--json"))}
    assert listed.keys() == {"verse", "prose"}
    assert (listed["prose"]["id"], listed["prose"]["of"], listed["prose"]["share"]) == (added["id"], "you", "members")
    assert run("adapter", "remove", file, "prose").startswith("Removed prose.")


def test_the_page_offers_it_as_a_model_of_its_own(poets: Poets, tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    server = poets.local.server("gateway", "--port", "0")
    with Chromium(program, tmp_path / "profile") as browser:
        page = browser.open(server.wait_for("serving")["page"])
        page.wait_until("document.getElementById('model').value")
        labels = "[...document.querySelectorAll('#model option')].map((option) => option.textContent)"
        assert page.evaluate(labels) == ["local", "local:verse (adapter)"]
        page.evaluate("document.getElementById('model').value = 'local:verse'")
        page.evaluate("document.getElementById('model').dispatchEvent(new Event('change'))")
        page.evaluate("document.getElementById('max-tokens').value = 12")
        page.type_and_enter("#prompt", "How are the hens?")
        page.wait_until("document.querySelector('.message.assistant footer')")
        page.evaluate("location.hash = '#swarm'")
        head = page.wait_until("document.querySelector('#swarm-head p')?.textContent")
        assert "Adapters: verse." in head
        assert page.complaints() == []
