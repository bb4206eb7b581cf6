"""The options that say how tokens are drawn, for the commands that have text generated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.codec.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from swarmnode.errors import UsageError
from swarmnode.roles.serving.client.compressions import AUTO, COMPRESSIONS
from swarmnode.swarm.storage.user_file import read_user_file

if TYPE_CHECKING:
    from swarmnode.roles.serving.client.generation import GenerateOptions

# What is usual differs from command to command.
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="How many tokens to generate at most.")]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 takes the most likely token; higher is more random.")
]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the most likely tokens that make up this probability.")]

MIN_P = typer.Option(
    0.0, "--min-p", help="Leave out tokens less likely than this share of the most likely one's probability."
)
FREQUENCY_PENALTY = typer.Option(
    0.0, "--frequency-penalty", help="Make tokens less likely each time that they were said, from -2 to 2."
)
PRESENCE_PENALTY = typer.Option(
    0.0, "--presence-penalty", help="Make tokens less likely once they were said, from -2 to 2."
)
REPETITION_PENALTY = typer.Option(
    1.0, "--repetition-penalty", help="Over 1 makes what was said less likely, in the prompt too; 1 is off."
)
LOGIT_BIAS = typer.Option(
    [], "--logit-bias", metavar="ID=BIAS", help="Add to the logit of a token id, from -100 (never) to 100. Repeatable."
)
ADAPTER = typer.Option(
    "", "--adapter", metavar="NAME", help="Ask the model as this adapter of the swarm changes it; `status` lists them."
)
COMPRESS = typer.Option(
    AUTO,
    "--compress",
    metavar="|".join(COMPRESSIONS),
    help="As what states go from peer to peer; auto lets them compress where a link is slow, none keeps them exact.",
)
JSON_SCHEMA = typer.Option(
    "", "--json-schema", metavar="FILE|{…}", help="A JSON schema that the text shall fit, or a file with one."
)
GRAMMAR = typer.Option(
    "", "--grammar", metavar="FILE", help="A file with a grammar, in Lark, that the text shall follow."
)

AS_THEY_ARE = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "compress",
    "adapter",
)


def generate_options(options: Mapping[str, Any]) -> GenerateOptions:
    """How to draw, by the names of a command's parameters. Raises UsageError, which names the wrong one."""
    from swarmnode.roles.serving.client.generation import GenerateOptions

    seed, logprobs = options.get("seed", -1), options.get("logprobs", -1)
    return GenerateOptions(
        **{name: options[name] for name in AS_THEY_ARE if name in options},
        seed=seed if seed >= 0 else None,
        logprobs=logprobs if logprobs >= 0 else None,
        logit_bias=parse_logit_bias(options["logit_bias"]),
        grammar=read_grammar(options.get("json_schema", ""), options.get("grammar", "")),
    )


def parse_logit_bias(texts: list[str]) -> dict[int, float]:
    """Biases by token id. Raises UsageError."""
    try:
        pairs = [text.split("=") for text in texts]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise UsageError(
            f"--logit-bias takes a token id and a number, as in 42=-100, not {' '.join(texts)!r}"
        ) from None


def read_grammar(json_schema: str, grammar: str) -> Grammar | None:
    """From one of these files, or the schema itself. Raises UsageError."""
    if json_schema and grammar:
        raise UsageError("give either --json-schema or --grammar")
    if not json_schema and not grammar:
        return None
    if json_schema.lstrip().startswith("{"):
        return Grammar(GrammarKind.JSON_SCHEMA, json_schema)
    file = Path(json_schema or grammar)
    content = read_user_file(file, max_bytes=MAX_GRAMMAR_CHARS, what=f"a grammar of at most {MAX_GRAMMAR_CHARS} bytes")
    if content is None:
        raise UsageError(f"cannot read {file}: there is no such file")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    return Grammar(GrammarKind.JSON_SCHEMA if json_schema else GrammarKind.LARK, text)
