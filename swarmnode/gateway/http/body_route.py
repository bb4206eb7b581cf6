"""Route for endpoints that take only a JSON body, without the cost of FastAPI's general request handling."""

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
            if not written or not _is_json(request):
                return await theirs(request)  # FastAPI responds with the error
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
    """Parse a JSON body. Raises ApiError if it is not JSON or nested too deeply."""
    try:
        return json.loads(written)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body cannot be read: {error}") from None
