"""Endpoints that take a body, without what FastAPI does for those that take more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.client_watch import ClientGone

LARGE_BYTES = 1 << 16  # each step with such a body is a turn of the loop by itself


class BodyRoute(APIRoute):
    """Of an endpoint `(body, request)` that answers with a Response or a model. Its schema, and what is said of a wrong body, are
    FastAPI's, whose own handler looks for forms and dependencies: a sixth of what the gateway does before a first token."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What is called for each request."""
        theirs, endpoint, body_field = super().get_route_handler(), self.endpoint, self.body_field
        if body_field is None:
            return theirs

        async def handle(request: Request) -> Response:
            try:
                written = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            if not written or not _is_json(request):
                return await theirs(request)  # which says so
            is_large = len(written) > LARGE_BYTES
            body = _read(written)
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


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _read(written: bytes) -> Any:
    """Raises ApiError."""
    try:
        return json.loads(written)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body cannot be read: {error}") from None
