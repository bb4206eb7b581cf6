"""Endpoints that take a body and nothing else, without what FastAPI does for those that take more."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from swarmnode.gateway.http.client_watch import ClientGone


class BodyRoute(APIRoute):
    """Of an endpoint `(body, request)` that answers with a Response. Its schema, and what is said of a wrong body, are FastAPI's,
    whose own handler looks for forms and dependencies: a sixth of what the gateway does before a first token."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What is called for each request."""
        theirs, endpoint, body_field = super().get_route_handler(), self.endpoint, self.body_field
        assert body_field is not None

        async def handle(request: Request) -> Response:
            if request.headers.get("content-type") != "application/json":
                return await theirs(request)  # another way of writing it, or wrong
            try:
                body = json.loads(await request.body())
            except ClientDisconnect:
                raise ClientGone from None
            except (ValueError, RecursionError):
                return await theirs(request)
            asked, errors = body_field.validate(body, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors, body=body)
            answer: Response = await endpoint(asked, request)
            return answer

        return handle
