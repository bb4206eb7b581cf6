"""Text to token ids and back, by the checkpoint's own tokenizer; and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.errors import CheckpointError


class Tokenizer:
    """transformers' tokenizer of a checkpoint folder. No code of the checkpoint is ever run."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint's tokenizer cannot be used: {error}") from error

    def __repr__(self) -> str:
        return f"<Tokenizer of {len(self._tokenizer)} tokens>"

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text of any length, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def separator(self) -> int | None:
        """The token between two documents: the end of text, where there is one."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-text tokens that a checkpoint's configs name."""
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def vocabulary_size(folder: Path) -> int | None:
    """How many token ids the model knows, where its config says so."""
    size = _read(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
