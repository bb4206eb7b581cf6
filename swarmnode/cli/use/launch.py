"""Command `swarmnode config tool`: print or write the configuration of a tool that is to use a gateway."""

from __future__ import annotations

import urllib.error
import urllib.request

from swarmnode.files import home_folder, parse_json, write_private
from swarmnode.gateway.gateway_address import LOOPBACK, PORT, other_gateways
from swarmnode.gateway.integrations.configurations import TOOLS, Endpoint
from swarmnode.swarm.records.manifest import EMBED, GENERATE
from swarmnode.terminal.console import command, fail, say
from swarmnode.terminal.option import argument, option

ASK_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
NO_KEY = "none"  # tools want a key even if the gateway needs none


@command
def configure_tool(
    tool: str = argument(..., f"The tool: {', '.join(TOOLS)}.", metavar="TOOL"),
    url: str = option(f"http://{LOOPBACK}:{PORT}/v1", "Address of `swarmnode serve`.", show_default=True),
    model: str = option("", "Use this swarm; default: all that are served."),
    key: str = option(NO_KEY, "API key, if the gateway needs one.", envvar="SWARMNODE_API_KEY", show_default=False),
    write: bool = option(False, "Write the tool's file, unless it already exists."),
) -> None:
    """Set up a tool of yours for `swarmnode serve`.

    It prints the tool's configuration; --write writes it.

    Example: swarmnode config tool aider --write
    """
    if tool not in TOOLS:
        fail(f"{tool} is unknown; choose {', '.join(TOOLS)}, or set {url} in it as an OpenAI-compatible server", 2)
    if not url.startswith(("http://", "https://")):
        fail(f"--url {url}: write it as http://HOST:PORT/v1", 2)
    target, url = TOOLS[tool], url.rstrip("/")
    endpoint = Endpoint(url, [model], key) if model else _endpoint(url, key)
    if not target.can_use(endpoint):
        fail(f"the gateway at {url} serves no model that generates text, which {tool} needs; serve one")
    text = target.configuration(endpoint)
    if not write:
        say(text, nl=False)
        say(f"# Put this into {target.file}; then: {target.then}", err=True)
        return
    path = target.file.expanduser()
    if path.exists():
        fail(f"{path} already exists: add the output of `swarmnode config tool {tool}` to it")
    write_private(path, text.encode(), make_folder=True)  # it may hold a key
    say(f"Wrote {path}. Then: {target.then}")


def _endpoint(url: str, key: str) -> Endpoint:
    """Return the gateway at `url` with the models that it lists. Ends the command if it does not answer."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:  # nosec B310  # http or https, checked above
            served = [
                (str(one["id"]), one.get("task", GENERATE)) for one in parse_json(answer.read(MAX_ANSWER_BYTES))["data"]
            ]
    except urllib.error.HTTPError as error:
        wants_key = "it needs a key: give --key" if error.code == 401 else f"it answers with status {error.code}"
        fail(f"the gateway at {url} does not list its models: {wants_key}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        elsewhere = other_gateways(home_folder())
        advice = (
            f"yours is at {elsewhere[0].url}: give --url" if elsewhere else "start `swarmnode serve`, or give --model"
        )
        fail(f"no API answers at {url}; {advice}")
    named = {task: [name for name, each in served if each == task] for task in (GENERATE, EMBED)}
    return Endpoint(url, named[GENERATE], key, embedders=named[EMBED])
