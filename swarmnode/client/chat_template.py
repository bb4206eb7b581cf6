"""Conversations as text by a checkpoint's template, in transformers' sandbox, without transformers around it.

The one module of transformers that renders templates is imported in 0.1 s, the package around it in 1.5 s. So it is imported a
second time, under another name, in packages without contents: the real one stays untouched, whether it is imported or not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.hollow_package import folders_of, put_hollow_package

PACKAGE = "hollow_transformers"
RENDERER = "utils.chat_template_utils"
OWN_WAYS = ("apply_chat_template", "get_chat_template", "special_tokens_map")  # in which a family may do it otherwise
TRIAL = "{{ messages | tojson }} {{ tools }} {{ add_generation_prompt }} {{ bos_token }} {{ eos_token }}"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The conversation which the model is to answer, as text. `variables` are what the template knows beside it, special tokens
    among them. Raises what transformers and jinja raise where the template cannot be used on it."""
    rendered, _ = _renderer().render_jinja_template(
        conversations=[list(messages)],
        tools=list(tools) or None,
        chat_template=template,
        add_generation_prompt=True,
        **variables,
    )
    return str(rendered[0])


def chosen_template(templates: str | Mapping[str, str] | None, *, with_tools: bool) -> str | None:
    """Which of a checkpoint's templates is used, of those that bear names; None where that cannot be said."""
    if not isinstance(templates, Mapping):
        return templates
    default = templates.get("default")
    return templates.get("tool_use", default) if with_tools else default


def is_ordinary(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every version of transformers gives these to the template as they are: newer ones take values of None away, and
    refuse that there are no messages."""
    return bool(messages) and all(type(message) is dict and None not in message.values() for message in messages)


def renders_as_transformers(tokenizer: Any) -> bool:
    """Whether `render_chat` writes conversations as this tokenizer of transformers does: by its general way, as a trial shows.
    The trial is by a template of ours, as a checkpoint's may be anything."""
    from transformers import PreTrainedTokenizerBase

    kind = type(tokenizer)
    if any(getattr(kind, way) is not getattr(PreTrainedTokenizerBase, way) for way in OWN_WAYS):
        return False
    trial: Any = [{"role": "user", "content": "hello"}]
    theirs = tokenizer.apply_chat_template(trial, chat_template=TRIAL, tokenize=False, add_generation_prompt=True)
    try:
        return bool(render_chat(TRIAL, trial, (), tokenizer.special_tokens_map) == theirs)
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def _renderer() -> Any:
    """transformers' module. Raises ImportError where this version has none."""
    inner = f"{PACKAGE}.utils"
    if inner not in sys.modules:
        folders = folders_of("transformers")
        put_hollow_package(PACKAGE, folders)
        put_hollow_package(inner, [f"{folder}/utils" for folder in folders])
    return importlib.import_module(f"{PACKAGE}.{RENDERER}")
