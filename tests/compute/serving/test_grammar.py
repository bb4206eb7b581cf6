"""Texts follow their grammars whatever the model would say; and no grammar, however made, takes more than its bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.codec.sampling import Grammar, GrammarKind, Sampling
from swarmnode.compute.serving import grammar as grammars
from swarmnode.compute.serving.device_transfers import DeviceOutputs
from swarmnode.compute.serving.grammar import GrammarCompiler, check_grammar
from swarmnode.compute.serving.sampler import Sampler
from swarmnode.errors import Busy, ErrorCode, ProtocolError
from tests.gateway.speaking import VOCABULARY, save_speaking_llama

LENGTH = 120
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "eats": {"type": "array", "maxItems": 3, "items": {"enum": ["seeds", "bread", "grass"]}},
    },
    "required": ["name", "age", "eats"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking_llama(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCABULARY)


def schema(definition: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, definition if isinstance(definition, str) else json.dumps(definition))


def write(compiler: GrammarCompiler, grammar: Grammar, seed: int, cut: int = 0) -> list[int]:
    """The tokens that a model without any sense writes; with `cut`, another hop goes on from there."""
    parameters = Sampling(1, LENGTH, temperature=2.0, seed=seed, grammar=grammar)
    generator, text = torch.Generator().manual_seed(seed), []
    sampler = Sampler(parameters, LENGTH, compiler.compile(grammar))
    for position in range(1, LENGTH):
        if position == cut:
            sampler = Sampler(parameters, LENGTH, compiler.compile(grammar))
            sampler.tell(torch.tensor(text, dtype=torch.int32).numpy().astype("<i4").tobytes())
        outputs = DeviceOutputs()
        draw = sampler.launch(torch.randn(1, 1, VOCABULARY, generator=generator) * 3, position, outputs)
        (drawn,) = draw(outputs.fetch())
        text.append(drawn.ids[0])
        if drawn.final:
            break
    return text


@pytest.mark.parametrize("seed", range(5))
def test_a_text_fits_its_schema(compiler: GrammarCompiler, folder: Path, seed: int) -> None:
    text = write(compiler, schema(PERSON), seed)
    jsonschema.validate(json.loads(Tokenizer(folder).decode(text)), PERSON)
    assert write(compiler, schema(PERSON), seed, cut=len(text) // 2) == text, "who takes over goes on in the middle"


@pytest.mark.parametrize(("kind", "source", "said"), [
    (GrammarKind.REGEX, "(hen|duck){2}[.]", {"henhen.", "henduck.", "duckhen.", "duckduck."}),
    (GrammarKind.LARK, 'start: "a" b\nb: "b" | "c"', {"ab", "ac"}),
])  # fmt: skip
def test_a_text_follows_its_grammar(
    compiler: GrammarCompiler, folder: Path, kind: GrammarKind, source: str, said: set[str]
) -> None:
    texts = {Tokenizer(folder).decode(write(compiler, Grammar(kind, source), seed)) for seed in range(8)}
    assert texts <= said and len(texts) > 1


WRONG = {
    "no JSON": schema("{{"),
    "no schema": schema({"type": "objct"}),
    "nothing fits": schema("false"),
    "no grammar": Grammar(GrammarKind.LARK, "start: ("),
    "nested too deeply": schema('{"type":"array","items":' * 500 + "{}" + "}" * 500),
}


@pytest.mark.parametrize("grammar", WRONG.values(), ids=WRONG)
def test_what_is_no_grammar_is_the_askers_mistake(compiler: GrammarCompiler, grammar: Grammar) -> None:
    for use in (check_grammar, compiler.compile):
        with pytest.raises(ProtocolError) as refusal:
            use(grammar)
        assert refusal.value.code == ErrorCode.INVALID_REQUEST


HOSTILE = {
    "itself": schema({"$ref": "#"}),
    "doubles at each level": schema(
        {
            "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)}
            | {"d25": {"type": "object"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "two ways at each level": schema(
        {
            "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)} | {"d25": {}},
            "$ref": "#/$defs/d0",
        }
    ),
    "backtracking": Grammar(GrammarKind.REGEX, "(.*a){25}b"),
    "many optional letters": Grammar(GrammarKind.REGEX, "(a?){500}a{500}"),
    "ambiguous": Grammar(GrammarKind.LARK, 'start: e\ne: e e | "a" | e e e'),
    "very long": schema({"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}),
    "many patterns": schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for n in range(200)}}
    ),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_what_would_take_too_much_ends_with_the_askers_error(compiler: GrammarCompiler, grammar: Grammar) -> None:
    try:
        write(compiler, grammar, 1)
    except ProtocolError as error:
        assert error.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 10_000_019}}}),
        Grammar(GrammarKind.LARK, 'start: <|im_end|> %json {"type": "integer", "multipleOf": 10000019}'),
        Grammar(GrammarKind.LARK, 'start: <[3]> %json {"type": "integer", "multipleOf": 10000019}'),
        schema({"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n}}}b"} for n in range(20)]}),
    ],
    ids=["multiples", "behind a token", "behind a token's number", "patterns"],
)
def test_what_cannot_be_ended_is_tried_in_a_process(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "TRIAL_S", 0)
    monkeypatch.setattr(grammars, "TRIAL_PATIENCE_S", 600.0)  # however busy this machine is
    with pytest.raises(ProtocolError, match="too much time or memory") as refusal:
        check_grammar(grammar)
    assert refusal.value.code == ErrorCode.INVALID_REQUEST


def test_a_machine_that_has_no_time_for_a_trial_asks_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(GrammarKind.REGEX, "no other test has this")
    for place, name, value in ((grammars, "TRIAL_PATIENCE_S", 1e-3), (sys, "executable", "/none")):
        with monkeypatch.context() as patch, pytest.raises(Busy):
            patch.setattr(place, name, value)
            check_grammar(grammar)
    check_grammar(grammar)


def test_a_text_that_strays_is_refused(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "a+"))
    with pytest.raises(ProtocolError):
        matcher.allowed([0, 1, 2])


def test_a_checkpoint_without_a_tokenizer_knows_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="tokenizer"):
        GrammarCompiler(tmp_path, VOCABULARY).compile(schema(PERSON))


def test_a_grammar_that_keeps_the_compute_thread_busy_fails_its_session(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s = iter(range(100))
    monkeypatch.setattr("swarmnode.compute.serving.grammar.time.thread_time", lambda: 0.3 * next(spent_s))
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "a+"))
    for _ in range(3):
        matcher.allowed([])
    with pytest.raises(ProtocolError, match="takes too long"):
        matcher.allowed([])


@pytest.mark.parametrize("seed", range(3))
def test_forced_tokens_are_those_that_any_model_would_write(compiler: GrammarCompiler, seed: int) -> None:
    text, matcher = write(compiler, schema(PERSON), seed), compiler.compile(schema(PERSON))
    forced_places = 0
    for place in range(len(text)):
        forced = matcher.forced(text[:place])
        assert forced == text[place : place + len(forced)]
        forced_places += bool(forced)
        allowed = int(matcher.allowed(text[:place]).sum())
        assert allowed == 1 if forced else allowed >= 1
    assert forced_places > 5
    assert matcher.forced(text) == []


def test_forced_tokens_of_a_text_that_breaks_the_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(ProtocolError, match="grammar"):
        compiler.compile(schema(PERSON)).forced([1, 2, 3])


def test_a_sampler_names_the_forced_tokens_behind_each_draw(compiler: GrammarCompiler) -> None:
    grammar = schema(PERSON)
    text = write(compiler, grammar, 1)
    sampler = Sampler(
        Sampling(1, LENGTH, temperature=2.0, seed=1, grammar=grammar), LENGTH, compiler.compile(grammar), foresees=3
    )
    generator = torch.Generator().manual_seed(1)
    named = 0
    for position in range(1, 1 + len(text)):
        outputs = DeviceOutputs()
        draw = sampler.launch(torch.randn(1, 1, VOCABULARY, generator=generator) * 3, position, outputs)
        (drawn,) = draw(outputs.fetch())
        assert drawn.ids[0] == text[position - 1]
        assert list(drawn.forced) == text[position : position + len(drawn.forced)]
        assert len(drawn.forced) <= 3
        named += len(drawn.forced)
    assert named > 10
