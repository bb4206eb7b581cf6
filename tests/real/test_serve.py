"""The gateway as people run it: a process of its own between a swarm and OpenAI's client, or a browser. More: tests/gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from swarmnode.gateway.gateway_address import PAGE_LINK
from swarmnode.lending.control import running_gateways, tell_node
from swarmnode.localswarm import STOP_TIMEOUT_S, NodeProcess
from tests.browser.axe import serious_faults
from tests.browser.chromium import BrowserPage, Chromium, find_chromium
from tests.browser.keyboard import unreached
from tests.browser.views import VIEWS, show_view
from tests.contrib.script import CONTRIB, ROOT
from tests.gateway.speaking import never_ends, save_speaking_llama
from tests.real.forked import ForkedSwarm

NODES = ("a", "b", "c")
STREAMS = 64
MARKUP = "<img src=x onerror=alert(1)>{}"  # what a stranger may call a machine
PASSWORD = "correct horse"
ASK = {"model": "local", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSwarm]:
    folder = tmp_path_factory.mktemp("served")
    save_speaking_llama(folder / "model")
    never_ends(folder / "model")
    with ForkedSwarm(folder) as local:
        local.environment["SWARMNODE_OWNER_PASSWORD"] = PASSWORD
        local.create(folder / "model", membership="private")
        local.bootstrap()
        for node in [local.node(name, "--span", "0:4", "--name", MARKUP.format(name)) for name in NODES]:
            node.wait_for("ready")
        yield local


@pytest.fixture(scope="module")
def server(local: ForkedSwarm) -> NodeProcess:
    server = local.server("gateway", "--port", "0")
    server.wait_for("serving")
    return server


def test_ctrl_c_while_the_tokenizer_is_loaded(local: ForkedSwarm) -> None:
    """A home of its own has none yet, so that transformers makes it in a thread."""
    server = local.server("interrupted", "--port", "0")
    server.wait_for("serving")
    server.kill(signal.SIGINT)
    assert server.finish(STOP_TIMEOUT_S) == 0
    assert "Traceback" not in server.tail()


def test_a_node_dies_in_the_middle_of_sentences(local: ForkedSwarm, server: NodeProcess) -> None:
    url = server.wait_for("serving")["url"]
    with openai.OpenAI(api_key="none", base_url=url) as client:
        said = [{"role": "user", "content": "How are the hens?"}]
        alone = client.chat.completions.create(messages=said, **ASK).choices[0].message.content
    assert asyncio.run(while_one_is_killed(url, local.members[1])) == [alone] * STREAMS
    told = tell_node(running_gateways(server.home)["local"], "why")
    assert told is not None and told["state"] == "serving" and told["sessions"] == 0
    assert any(decision["topic"] == "routing" and decision["facts"] for decision in told["decisions"])
    assert "error" in (tell_node(running_gateways(server.home)["local"], "pause") or {})


async def while_one_is_killed(url: str, node: NodeProcess) -> list[str]:
    begun = asyncio.Semaphore(0)

    async def tell(client: openai.AsyncOpenAI) -> str:
        said = [{"role": "user", "content": "How are the hens?"}]
        text = ""
        async for chunk in await client.chat.completions.create(messages=said, stream=True, **ASK):
            text += chunk.choices[0].delta.content or ""
            begun.release()
        return text

    async with openai.AsyncOpenAI(api_key="none", base_url=url) as client:
        telling = [asyncio.ensure_future(tell(client)) for _ in range(STREAMS)]
        for _ in range(4 * STREAMS):
            await begun.acquire()
        node.kill()
        return list(await asyncio.gather(*telling))


@pytest.mark.parametrize("package", ["openai", "anthropic", "langchain_openai", "litellm"])
def test_the_clients_that_people_have(server: NodeProcess, package: str) -> None:
    """Those that are installed here; `contrib/clients/run.py` tries all, npm's too."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = CONTRIB / "clients" / f"{package.removesuffix('_openai')}_package.py"
    url = server.wait_for("serving")["url"]
    scripts = [script, ROOT / "examples" / "langchain_chat.py"] if package == "langchain_openai" else [script]
    for each in scripts:
        done = subprocess.run([sys.executable, str(each), url, "local"], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr


LAST = "document.querySelector('.message.assistant:last-child .text').textContent"
SIZES = {"wide": (1280, 800), "phone": (390, 780)}


def test_a_chat_in_a_browser_goes_on_while_its_writer_is_killed(
    local: ForkedSwarm, server: NodeProcess, tmp_path: Path
) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with Chromium(program, tmp_path / "profile") as browser:
        page = browser.open(own_link(server))
        page.wait_until("document.getElementById('model').value")
        page.evaluate("document.getElementById('max-tokens').value = 60000")
        page.type_and_enter("#prompt", "# <script>alert(1)</script>\n**bold**")
        writer = page.wait_until("document.querySelector('#writers .badge')?.textContent")
        alive = [node for node in local.members if node.name in NODES and node.process.poll() is None]
        next(node for node in alive if MARKUP.format(node.name) == writer).kill()
        length = len(page.evaluate(LAST))
        happened = page.wait_until("document.querySelector('#writers .happened')?.textContent")
        assert happened.startswith(f"{writer} left") and "took over layers 0–3" in happened
        page.wait_until(f"{LAST}.length > {length + 20}")
        page.press("Escape")
        page.wait_until("document.querySelector('.message footer')?.textContent.includes('stopped')")
        page.evaluate("location.hash = '#swarm'")
        left = len(alive) - 1
        page.wait_until(f"document.querySelectorAll('#machines .machine').length === {left}")
        page.wait_until(f"document.querySelectorAll('#strip .bar').length === {left}")
        assert page.evaluate("document.querySelector('#machines .machine h3 span').textContent") in {
            MARKUP.format(name) for name in NODES
        } - {writer}
        invite_somebody(page)
        page.evaluate("location.hash = '#chat'")
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0, "text stays text"
        take_pictures(page, tmp_path)
        assert page.complaints() == []
        assert serious_faults(page, tmp_path) == []


def own_link(server: NodeProcess) -> str:
    """The page with the owner's token, which is not printed into a pipe."""
    assert "#owner=" not in server.wait_for("serving")["page"]
    return (server.home / PAGE_LINK).read_text().strip()


def invite_somebody(page: BrowserPage) -> None:
    """As the swarm's owner, who mistypes the password first, with a note that is markup."""
    page.wait_until("document.querySelectorAll('#members .member').length")
    form = "[...document.querySelectorAll('#invite-role option, #invite-life, #invite-uses')].map((each) => each.value)"
    assert page.evaluate(form) == ["volunteer", "client", "bootstrap", "31536000", "1"], "as `swarmnode invite`"
    page.evaluate("document.getElementById('invite-note').value = '<img src=x onerror=alert(2)>'")
    page.evaluate("document.getElementById('invite-make').click()")
    page.type_and_enter("#owner-password", "guess")
    page.wait_until("document.getElementById('owner-error').textContent.includes('password is wrong')")
    page.type_and_enter("#owner-password", PASSWORD)
    page.wait_until(
        "document.querySelector('#new-invite textarea')?.value && document.querySelector('#new-invite .qr path')"
    )
    steps = page.evaluate("[...document.querySelectorAll('#new-invite li code')].map((each) => each.textContent)")
    assert steps[0] == "swarmnode join" and steps[1].startswith("swarmnode run "), "what the friend types"
    page.wait_until("document.querySelector('#invites').textContent.includes('onerror=alert(2)')")
    assert not page.evaluate(
        "document.getElementById('owner-dialog').open || document.getElementById('owner-password').value"
    )


def take_pictures(page: BrowserPage, folder: Path) -> None:
    """Of each view at both widths, none of which is wider than its window, and all of which the keyboard reaches."""
    for name, size in SIZES.items():
        page.resize(*size)
        for view in VIEWS:
            show_view(page, view)
            page.picture(folder / f"{view}-{name}.png")
            assert unreached(page) == [], (view, name)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (view, name)
