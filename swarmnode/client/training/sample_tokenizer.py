"""Tokenizer for training samples: plain documents and conversations, by the model's own rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from swarmnode.client.tokenizer import ChatEnding, Tokenizer
from swarmnode.data.samples import Message
from swarmnode.errors import CheckpointError

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # of the text that the assistant writes, in a chat template


class TrainingTokenizer:
    """Tokenizer of a model that makes samples (`data/samples.py`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"TrainingTokenizer({self._tokenizer!r})"

    @property
    def end(self) -> int | None:
        """Token that ends a text; None if the model has none."""
        return self._tokenizer.separator

    @cached_property
    def begin(self) -> int | None:
        """Token that the tokenizer puts before a text (BOS); None if it puts none there."""
        token: int | None = self._tokenizer.own.bos_token_id
        return token if token is not None and self._tokenizer.encode("")[:1] == [token] else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.has_chat_template

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model expects around it."""
        return self._tokenizer.encode(text)

    def chat(self, messages: Sequence[Message], tools: Sequence[Any], *, begins_answer: bool) -> list[int]:
        """Return the tokens of a conversation by the chat template. Raises CheckpointError if there is none, or it cannot be
        used."""
        self._check_template()
        ending = ChatEnding.ANSWER if begins_answer else ChatEnding.CLOSED
        return self._tokenizer.encode_messages(messages, tools, ending=ending)

    def answers(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of a conversation, and which of them the template marks as the assistant's; None if the template has
        no marks. Raises CheckpointError if it cannot be used."""
        self._check_template()
        own = self._tokenizer.own
        if not MARK.search(own.get_chat_template(tools=list(tools) or None)):
            return None
        tokens = self.chat(messages, tools, begins_answer=False)
        found: Mapping[str, list[int]] = own.apply_chat_template(
            list(messages), tools=list(tools) or None, return_dict=True, return_assistant_tokens_mask=True
        )
        return tokens, [bool(mark) for mark in found["assistant_masks"]]

    def _check_template(self) -> None:
        if not self.has_chat_template:
            raise CheckpointError(
                'the model has no chat template, so messages cannot be written; give "prompt" and "completion" as texts'
            )
