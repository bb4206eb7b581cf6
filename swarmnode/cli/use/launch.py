"""`swarmnode launch`: what a tool must be told to use a swarm."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from swarmnode.cli.options.gateway import LOOPBACK, PORT
from swarmnode.cli.options.option import argument, option
from swarmnode.cli.terminal.console import command, fail, say
from swarmnode.files import write_private
from swarmnode.gateway.integrations.configurations import TOOLS, Endpoint
from swarmnode.swarm.records.manifest import EMBED, GENERATE

ASK_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
NO_KEY = "none"  # tools want one, the gateway does not


@command
def launch(
    tool: str = argument(..., f"{', '.join(TOOLS)}.", metavar="TOOL"),
    url: str = option(f"http://{LOOPBACK}:{PORT}/v1", "Where `swarmnode serve` answers.", show_default=True),
    model: str = option("", "The swarm; default: those that are served."),
    key: str = option(NO_KEY, "Where it wants one.", envvar="SWARMNODE_API_KEY", show_default=False),
    write: bool = option(False, "Write the tool's file; one that is there already is left as it is."),
) -> None:
    """Print how a tool that you have uses the swarms that `swarmnode serve` answers for.

    Example: swarmnode launch aider --write
    """
    if tool not in TOOLS:
        fail(f"{tool} is not known here; choose {', '.join(TOOLS)}, or tell it {url} as an OpenAI-compatible server", 2)
    if not url.startswith(("http://", "https://")):
        fail(f"--url {url}: give it as http://HOST:PORT/v1", 2)
    known, url = TOOLS[tool], url.rstrip("/")
    endpoint = Endpoint(url, [model], key) if model else _endpoint(url, key)
    if not known.can_use(endpoint):
        fail(f"the gateway at {url} serves no model that generates text, and {tool} has use for no other")
    text = known.configuration(endpoint)
    if not write:
        say(text, nl=False)
        say(f"# That is for {known.file}; then: {known.then}", err=True)
        return
    path = known.file.expanduser()
    if path.exists():
        fail(f"{path} is there already: add what `swarmnode launch {tool}` prints to it")
    write_private(path, text.encode(), make_folder=True)  # a key may be in it
    say(f"Wrote {path}. Then: {known.then}")


def _endpoint(url: str, key: str) -> Endpoint:
    """The gateway at this URL, with the models that it names."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:  # nosec B310  # http or https, as was checked
            told = [
                (str(one["id"]), one.get("task", GENERATE)) for one in json.loads(answer.read(MAX_ANSWER_BYTES))["data"]
            ]
    except urllib.error.HTTPError as error:
        wants_key = "it wants a key: give --key" if error.code == 401 else f"it answers {error.code}"
        fail(f"the gateway at {url} does not tell its models: {wants_key}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fail(f"no gateway answers at {url}: start `swarmnode serve`, or name the --model")
    named = {task: [name for name, each in told if each == task] for task in (GENERATE, EMBED)}
    return Endpoint(url, named[GENERATE], key, embedders=named[EMBED])
