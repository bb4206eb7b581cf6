"""Options of sampling, for the commands that generate text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.swarm import complete_adapters
from swarmnode.codec.messages import LOOKUP
from swarmnode.codec.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from swarmnode.codec.tensors import AUTO, COMPRESSIONS
from swarmnode.errors import UsageError
from swarmnode.swarm.storage.small_files import read_user_file
from swarmnode.terminal.option import of_same_names, option

if TYPE_CHECKING:
    from swarmnode.serving.client.generation import GenerateOptions


def _logit_bias(texts: Sequence[str], flag: str) -> dict[int, float]:
    """Return biases by token id. Raises UsageError if a text is not ID=BIAS."""
    try:
        pairs = [text.split("=") for text in texts]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise UsageError(f"{flag} takes a token id and a number, as in 42=-100, not {' '.join(texts)!r}") from None


def _from_zero(number: int, _flag: str) -> int | None:
    """Return the number, or None if it is below 0."""
    return number if number >= 0 else None


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling. A field that GenerateOptions has, too, becomes that field."""

    max_new_tokens: int = option(64, "Generate at most this many tokens.", "--max-new-tokens", "-n")
    temperature: float = option(0.0, "0 takes the most likely token; higher values are more random.")
    top_p: float = option(1.0, "Choose among the most likely tokens that add up to this probability.")
    top_k: int = option(0, "Choose among this many most likely tokens; 0 is all.")
    min_p: float = option(0.0, "Leave out tokens less likely than this share of the likeliest one's probability.")
    frequency_penalty: float = option(0.0, "Make tokens less likely each time they appear, from -2 to 2.")
    presence_penalty: float = option(0.0, "Make tokens less likely once they have appeared, from -2 to 2.")
    repetition_penalty: float = option(1.0, "Above 1, make tokens of the text and the prompt less likely; 1 is off.")
    logit_bias: Mapping[int, float] = option(
        [],
        "Add BIAS to a token id's logit, from -100 (never) to 100. Repeatable.",
        metavar="ID=BIAS",
        parse=_logit_bias,
    )
    json_schema: str = option("", "JSON schema that the text must fit, or a file with one.", metavar="FILE|{…}")
    lark: str = option("", "File with a Lark grammar that the text must follow.", "--grammar", metavar="FILE")
    compress: str = option(
        AUTO,
        "How data between machines is encoded: auto compresses on slow links, none never does.",
        metavar="|".join(COMPRESSIONS),
    )
    drafts: str = option(
        LOOKUP,
        "Write faster by guessing tokens ahead; the text stays the same. Guesses come from prompt, answer and schema (lookup), "
        "also from a draft model of the first machine (auto, or the model's name; see `status`). Wrong guesses may show "
        "the last machine words of your prompt.",
        metavar="off|lookup|auto|MODEL",
    )
    adapter: str = option(
        "",
        "Use this adapter: a name that `adapter list` shows, or a folder that peft saved, with a slash in its path.",
        metavar="NAME|./DIR",
        autocompletion=complete_adapters,
    )

    @property
    def needs_torch(self) -> bool:
        """Whether this machine computes something for these options: it checks an adapter in a folder."""
        return "/" in self.adapter or os.sep in self.adapter

    logprobs: int | None = option(
        None,
        "With --json: print each token's log probability, and those of this many others.",
        text=-1,
        parse=_from_zero,
    )
    seed: int | None = option(None, "The same seed gives the same text; default: a new one.", text=-1, parse=_from_zero)

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the text must follow; None without one. Raises UsageError if its file cannot be read."""
        return read_grammar(self.json_schema, self.lark)

    def options(self) -> GenerateOptions:
        """Return the settings of a generation. Raises UsageError, which names the wrong value."""
        from swarmnode.serving.client.generation import GenerateOptions

        return of_same_names(GenerateOptions, self)


def read_grammar(json_schema: str, grammar: str) -> Grammar | None:
    """Return the grammar: `json_schema` is a schema or the path of one, `grammar` the path of a Lark grammar. None if both are
    empty. Raises UsageError if both are given, or a file cannot be read."""
    if json_schema and grammar:
        raise UsageError("give either --json-schema or --grammar, not both")
    if not json_schema and not grammar:
        return None
    if json_schema.lstrip().startswith("{"):
        return Grammar(GrammarKind.JSON_SCHEMA, json_schema)
    file = Path(json_schema or grammar)
    content = read_user_file(file, max_bytes=MAX_GRAMMAR_CHARS, what=f"a grammar of at most {MAX_GRAMMAR_CHARS} bytes")
    if content is None:
        raise UsageError(f"cannot read {file}: there is no such file; check its name")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}; convert it") from None
    return Grammar(GrammarKind.JSON_SCHEMA if json_schema else GrammarKind.LARK, text)
