"""What is in a body is counted before it is read, and the check of it ends at the first thing that is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi.routing import APIRoute
from pydantic import AfterValidator, TypeAdapter, ValidationError

from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.generation.request_fields import Biases
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.http.body_route import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, BodyRoute, Items, JsonBound
from swarmnode.gateway.openai.requests import Texts
from swarmnode.gateway.page.page import Page
from tests.gateway.conftest import MODEL, serving
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

CHARACTERS = '\\",:[{}]\n aé'


def some_json(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.4:
        return "".join(chance.choice(CHARACTERS) for _ in range(chance.randrange(8)))
    count = chance.randrange(4)
    if kind < 0.7:
        return [some_json(chance, depth + 1) for _ in range(count)]
    return {f"{chance.choice(CHARACTERS)}{number}": some_json(chance, depth + 1) for number in range(count)}


def counted(value: Any) -> tuple[int, int]:
    """Structural characters, and opening ones among them, of what json writes."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    keys, commas = len(value) if isinstance(value, dict) else 0, max(0, len(value) - 1)
    return 1 + keys + commas + sum(one for one, _ in inner), 1 + sum(one for _, one in inner)


def test_what_is_in_a_body_is_counted_however_it_is_cut() -> None:
    chance = random.Random(1)
    for _ in range(500):
        value = some_json(chance)
        written, bound, begin = json.dumps(value, ensure_ascii=False).encode(), JsonBound(), 0
        while begin < len(written):
            end = begin + chance.randrange(1, 6)
            bound.push(written[begin:end])
            begin = end
        assert (bound.values, bound.containers) == counted(value), written


def test_a_text_of_any_length_is_one_value_and_many_values_are_too_many() -> None:
    bound = JsonBound()
    bound.push(json.dumps({"prompt": '[,{":\\' * 1_000_000}).encode())
    assert (bound.values, bound.containers) == (2, 1)
    for piece, most, what in ((b"1,", MAX_VALUES, "values"), (b"[]", MAX_CONTAINERS, "objects and lists")):
        JsonBound().push(piece * most)
        with pytest.raises(ApiError, match=f"{most:,} {what}") as refusal:
            JsonBound().push(piece * (most + 1))
        assert refusal.value.status_code == 413


def test_objects_and_lists_within_one_another_are_counted_however_they_are_cut() -> None:
    for pair in ("[]", "{}"):
        for depth in (MAX_DEPTH, MAX_DEPTH + 1):
            bound, written = JsonBound(), (pair[0] * depth + '"[{"' + pair[1] * depth + ",[]").encode()
            try:
                for begin in range(0, len(written), 7):
                    bound.push(written[begin : begin + 7])
                assert depth == MAX_DEPTH and bound.depth == 0
            except ApiError as refusal:
                assert depth > MAX_DEPTH and refusal.status_code == 400


def nested(depth: int) -> Any:
    return {} if depth == 0 else {"items": nested(depth - 1)}


@in_virtual_time
async def test_deeply_nested_schemas_are_answered_or_refused(founded: Founded, tmp_path: Path) -> None:
    says = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with serving(founded, tmp_path) as served:
        for depth in (60, 300, 900, 5000):
            schema = "@" if depth > 900 else nested(depth)
            function = {"name": "f", "parameters": schema}
            tools, format = (
                [{"type": "function", "function": function}],
                {"type": "json_schema", "name": "s", "schema": schema},
            )
            for path, body in (
                ("/v1/chat/completions", {**says, "tools": tools}),
                ("/v1/chat/completions", {**says, "tools": tools, "tool_choice": "required"}),
                ("/v1/chat/completions", {**says, "response_format": {"type": "json_schema", "json_schema": format}}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "tools": [{"type": "function", **function}]}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "text": {"format": format}}),
                ("/v1/messages", {**says, "tools": [{"name": "f", "input_schema": schema}]}),
                ("/v1/messages", {**says, "output_config": {"format": format}}),
            ):
                written = json.dumps(body).replace('"@"', '{"items":' * depth + "{}" + "}" * depth)
                reply = await served.http.post(path, content=written, headers={"content-type": "application/json"})
                assert reply.status_code == (200 if depth < MAX_DEPTH else 400), reply.text
                assert depth < MAX_DEPTH or "nests more than" in reply.text


def test_the_check_of_a_list_ends_at_its_first_wrong_element() -> None:
    looked: list[int] = []
    numbers = TypeAdapter(Items[Annotated[int, AfterValidator(looked.append)]])
    with pytest.raises(ValidationError) as refusal:
        numbers.validate_python([1, 2, "x", *range(1000)])
    assert (len(looked), refusal.value.error_count()) == (2, 1)


@pytest.mark.parametrize("wrong", [[1] * 9999 + ["x"], ["x"] * 9999 + [1], [[1], ["x"] * 9999], [None] * 9999])
def test_texts_of_no_kind_are_told_of_once_for_each_kind(wrong: list[Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(Texts).validate_python(wrong)
    assert refusal.value.error_count() <= 4


def test_too_many_biases_are_counted_and_not_looked_at() -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(Biases).validate_python({f"x{number}": "y" for number in range(5000)})
    assert refusal.value.error_count() == 1


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Each core schema of pydantic's in one."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for inner in schema.values():
            yield from schemas_in(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from schemas_in(inner)


def test_no_list_of_any_request_is_checked_beyond_its_first_wrong_element(tmp_path: Path) -> None:
    gateway = Gateway({})
    routes = [
        route
        for included in build_app(gateway, Page(gateway, tmp_path)).routes
        for route in getattr(getattr(included, "original_router", included), "routes", [included])
    ]
    asked = [route for route in routes if isinstance(route, APIRoute) and route.body_field is not None]
    assert len(asked) >= 12
    for route in asked:
        assert isinstance(route, BodyRoute) or route.path.startswith("/api/v1/")
        for schema in schemas_in(TypeAdapter(route.body_field.field_info.annotation).core_schema):
            if schema["type"] == "list":
                assert schema.get("fail_fast"), (route.path, schema)
            if schema["type"] == "dict" and schema.get("values_schema", {"type": "any"})["type"] != "any":
                assert schema["values_schema"]["type"] in ("float", "union"), (
                    "biases and options, which are counted before"
                )


@in_virtual_time
async def test_prompts_are_counted_before_any_is_read(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        tokenizer, read = await served.client.tokenizer(), []
        monkeypatch.setattr(type(tokenizer), "encode", lambda _self, text: read.append(text))
        for asked in ({"prompt": ["hens"] * 17}, {"prompt": ["hens"] * 9, "n": 2}):
            answer = await served.http.post("/v1/completions", json={"model": MODEL, **asked})
            assert answer.status_code == 400 and "at most 16 texts" in answer.json()["error"]["message"]
        assert not read
        for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/messages"):
            answer = await served.http.post(path, json={"messages": [[]] * 30_000, "input": [[]] * 30_000})
            assert answer.status_code == 413
