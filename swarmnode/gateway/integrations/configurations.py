"""Configuration files of tools that use a gateway."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from swarmnode.errors import UsageError

MAX_SHOWN_CHARS = 64  # of a text that an error repeats


@dataclass(frozen=True)
class Endpoint:
    """Gateway at `url`, which ends in /v1. `models` generate text, `embedders` make embeddings. `key` is any word if the gateway
    needs no key. Raises UsageError if one of these texts has a control character, which some of the tools' formats cannot hold."""

    url: str
    models: Sequence[str]
    key: str
    embedders: Sequence[str] = ()

    def __post_init__(self) -> None:
        for text in (self.url, self.key, *self.models, *self.embedders):
            if not text.isprintable():
                raise UsageError(f"{text[:MAX_SHOWN_CHARS]!r} has control characters: no tool is given such a text")

    @property
    def origin(self) -> str:
        """URL without its path."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True)
class Tool:
    """Tool that uses a gateway. `file` is its configuration file, in the home folder if it begins with ~, else in the project.
    `then` is the next thing for the user to do. If `embeds` is true, the tool also uses embedders."""

    name: str
    file: Path
    then: str
    configuration: Callable[[Endpoint], str]
    embeds: bool = False

    def can_use(self, endpoint: Endpoint) -> bool:
        """Return whether the gateway serves a model that the tool can use."""
        return bool(endpoint.models or (self.embeds and endpoint.embedders))


def _open_webui(endpoint: Endpoint) -> str:
    variables = {"OPENAI_API_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key}
    if endpoint.embedders:
        variables |= {"RAG_EMBEDDING_ENGINE": "openai", "RAG_EMBEDDING_MODEL": endpoint.embedders[0]}
        variables |= {"RAG_OPENAI_API_BASE_URL": endpoint.url, "RAG_OPENAI_API_KEY": endpoint.key}
    return _environment(variables)


def _goose(endpoint: Endpoint) -> str:
    variables = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": endpoint.models[0]}
    path = urlsplit(endpoint.url).path.strip("/") + "/chat/completions"
    variables |= {"OPENAI_HOST": endpoint.origin, "OPENAI_BASE_PATH": path, "OPENAI_API_KEY": endpoint.key}
    return _environment(variables)


def _continue(endpoint: Endpoint) -> str:
    lines = ["name: swarmnode", "version: 1.0.0", "schema: v1", "models:"]
    roles = dict.fromkeys(endpoint.models, "chat, edit, apply") | dict.fromkeys(endpoint.embedders, "embed")
    for model, role in roles.items():
        lines += [f"  - name: {_quoted(model)}", "    provider: openai", f"    model: {_quoted(model)}"]
        lines += [
            f"    apiBase: {_quoted(endpoint.url)}",
            f"    apiKey: {_quoted(endpoint.key)}",
            f"    roles: [{role}]",
        ]
    return _lines(lines)


def _litellm(endpoint: Endpoint) -> str:
    lines = ["model_list:"]
    for model in (*endpoint.models, *endpoint.embedders):
        lines += [f"  - model_name: {_quoted(model)}", "    litellm_params:"]
        lines += [f"      model: {_quoted(f'openai/{model}')}", f"      api_base: {_quoted(endpoint.url)}"]
        lines += [f"      api_key: {_quoted(endpoint.key)}"]
        lines += ["    model_info:", "      mode: embedding"] if model in endpoint.embedders else []
    return _lines(lines)


def _aider(endpoint: Endpoint) -> str:
    told = {"model": f"openai/{endpoint.models[0]}", "openai-api-base": endpoint.url, "openai-api-key": endpoint.key}
    return _lines([f"{name}: {_quoted(value)}" for name, value in told.items()])


def _opencode(endpoint: Endpoint) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "swarmnode",
        "options": {"baseURL": endpoint.url, "apiKey": endpoint.key},
        "models": {model: {"name": model} for model in endpoint.models},
    }
    told = {"$schema": "https://opencode.ai/config.json", "provider": {"swarmnode": provider}}
    return _json({**told, "model": f"swarmnode/{endpoint.models[0]}"})


def _claude_code(endpoint: Endpoint) -> str:
    model = endpoint.models[0]
    variables = {"ANTHROPIC_BASE_URL": endpoint.origin, "ANTHROPIC_AUTH_TOKEN": endpoint.key}
    return _json({"env": {**variables, "ANTHROPIC_MODEL": model, "ANTHROPIC_SMALL_FAST_MODEL": model}})


def _environment(variables: Mapping[str, str]) -> str:
    """Return assignments for a POSIX shell, which the user sources: unquoted, a model's name could be a command."""
    return _lines([f"{name}={shlex.quote(value)}" for name, value in variables.items()])


def _quoted(text: str) -> str:
    """Return a printable text as a scalar of YAML: its double quotes have JSON's escapes, but no pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


_TOOLS = (
    Tool(
        "open-webui",
        Path("open-webui.env"),
        "set -a; . ./open-webui.env; set +a; open-webui serve",
        _open_webui,
        embeds=True,
    ),
    Tool("continue", Path("~/.continue/config.yaml"), "choose the model in your editor", _continue, embeds=True),
    Tool("litellm", Path("litellm.yaml"), "litellm --config litellm.yaml", _litellm, embeds=True),
    Tool("aider", Path(".aider.conf.yml"), "aider", _aider),
    Tool("goose", Path("goose.env"), "set -a; . ./goose.env; set +a; goose session", _goose),
    Tool("opencode", Path("opencode.json"), "opencode", _opencode),
    Tool("claude-code", Path(".claude/settings.json"), "claude", _claude_code),
)
TOOLS: Mapping[str, Tool] = MappingProxyType({tool.name: tool for tool in _TOOLS})
