"""Route for endpoints that take only a JSON body, without the cost of FastAPI's general request handling.

Bounds on the size of a JSON body's structure, checked while the body arrives: parsing and validating block the interpreter, even
from a thread, so a body that would take long is refused before that. Also list types whose validation ends at the first error.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from swarmnode.gateway.http.api_error import ApiError, bad_request
from swarmnode.gateway.http.event_stream import ClientGone

LARGE_BYTES = 1 << 16  # a larger body is parsed and validated in separate turns of the event loop


class BodyRoute(APIRoute):
    """Route of an endpoint `(body, request)` that returns a Response or a model. The schema and the errors for a wrong body are
    FastAPI's. FastAPI's own handler also looks for forms and dependencies, which took a sixth of the gateway's time before a first
    token."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request; FastAPI's own if the endpoint takes no body."""
        theirs, endpoint, body_field = super().get_route_handler(), self.endpoint, self.body_field
        if body_field is None:
            return theirs

        async def handle(request: Request) -> Response:
            try:
                written = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if not written or not (kind == "application/json" or re.fullmatch(r"application/.*\+json", kind)):
                return await theirs(request)  # FastAPI responds with the error
            is_large = len(written) > LARGE_BYTES
            try:
                body = json.loads(written)
            except json.JSONDecodeError as error:
                sentence = f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
                raise bad_request(sentence) from None
            except (ValueError, RecursionError) as error:  # nested too deeply, for example
                raise bad_request(f"the body cannot be read: {error}") from None
            if is_large:
                await asyncio.sleep(0)
            asked, errors = body_field.validate(body, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors, body=body)
            if is_large:
                await asyncio.sleep(0)
            answer: Response | BaseModel = await endpoint(asked, request)
            if isinstance(answer, BaseModel):
                return Response(answer.model_dump_json(), media_type="application/json")
            return answer

        return handle


T = TypeVar("T")
MAX_VALUES = 150_000  # in one body: numbers, texts, field names, objects and lists
MAX_CONTAINERS = 15_000  # objects and lists among them; each costs the validation of several fields
MAX_DEPTH = 128  # objects and lists within one another: answers that repeat a request are written to 255
STRUCTURE = b",:[{"  # one of these precedes each value except the first
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS = bytes(byte for byte in range(256) if byte not in _STEPS)

Items = Annotated[list[T], Field(fail_fast=True)]
"""List in a request whose validation stops at the first wrong element: reporting each one takes seconds for a megabyte of them."""

WholeNumber = Annotated[int, Field(strict=True)]
"""Integer that is not read from a text."""


def at_most(limit: int, message: str) -> BeforeValidator:
    """Return a validator that refuses an object with more than `limit` fields with the text `message`, before any is validated."""

    def counted(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(message)
        return value

    return BeforeValidator(counted)


class JsonBound:
    """Counter of the values in a JSON body as it arrives; characters inside texts do not count."""

    def __init__(self) -> None:
        self.values = 0
        self.containers = 0
        self.depth = 0
        self._in_text = False
        self._held = b""  # a backslash whose next character has not arrived

    def push(self, piece: bytes) -> None:
        """Count the values in the next piece. Raises ApiError if the body now has too many values, containers or levels."""
        piece = self._held + piece
        self._held = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        whole = piece[: len(piece) - len(self._held)].replace(rb"\\", b"").replace(rb"\"", b"")
        parts = whole.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        self.values += len(outside) - len(outside.translate(None, STRUCTURE))
        self.containers += outside.count(b"[") + outside.count(b"{")
        if self.values > MAX_VALUES:
            raise ApiError(413, f"the request has more than {MAX_VALUES:,} values in its JSON: send a smaller one")
        if self.containers > MAX_CONTAINERS:
            raise ApiError(
                413, f"the request has more than {MAX_CONTAINERS:,} objects and lists in its JSON: send a smaller one"
            )
        for bracket in outside.translate(None, _OTHERS):
            self.depth += _STEPS[bracket]
            if self.depth > MAX_DEPTH:
                raise bad_request(f"the request nests more than {MAX_DEPTH} objects and lists: send a flatter one")
