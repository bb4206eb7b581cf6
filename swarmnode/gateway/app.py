"""The application: a gateway's endpoints, and how what fails is told."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response

from swarmnode.errors import SwarmnodeError
from swarmnode.gateway import monitoring
from swarmnode.gateway.access.guard import Guard
from swarmnode.gateway.anthropic import messages
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError, api_error, bad_request
from swarmnode.gateway.http.client_watch import ClientGone
from swarmnode.gateway.openai import chat_completions, completions, encoders, models, responses
from swarmnode.gateway.page import machine, members, static_files, swarms
from swarmnode.gateway.page.page import Page
from swarmnode.version import __version__

TRIED_TYPE = re.compile(r"str|int|float|bool|[\w-]+\[.*|[A-Z]\w+|\[key\]")
API_PATHS = ("/v1/", "/classify", "/rerank", "/tokenize", "/detokenize", "/api/")
GONE = 499  # nginx's, for logs: nobody reads it


def build_app(gateway: Gateway, page: Page | None = None) -> FastAPI:
    """The ASGI application, with a page where there is to be one. FastAPI's pages of documentation are off: they would load scripts
    from elsewhere."""
    app = FastAPI(title="swarmnode", version=__version__, docs_url=None, redoc_url=None, exception_handlers=HANDLERS)
    app.state.gateway = gateway
    # Tried in this order.
    for each in (chat_completions, completions, responses, messages, encoders, models, monitoring):
        app.include_router(each.router)
    if page is not None:
        app.state.page = page
        for part in (static_files, swarms, members, machine):
            app.include_router(part.router)
    app.add_middleware(Guard, keys=gateway.keys, config=gateway.config)
    if gateway.config.origins:  # outside of the guard: a browser asks without a key whether it may ask
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gateway.config.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | SwarmnodeError)
    return (error if isinstance(error, ApiError) else api_error(error)).response()


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found: dict[str, list[str]] = {}  # what could be there instead, by field
    for each in error.errors():
        if each["type"] == "json_invalid":
            return bad_request(
                f"the body is not JSON: {each['ctx']['error']} at character {each['loc'][-1]}"
            ).response()
        found.setdefault(_field(each["loc"]), []).append(each["msg"])
    where, wanted = next(iter(found.items()))
    text = "; or: ".join(dict.fromkeys(wanted))
    if not where and "json" not in request.headers.get("content-type", ""):
        text = "it is not read as JSON without Content-Type: application/json"
    return bad_request(f"{where or 'the body'}: {text}", where or None).response()


def _field(place: Sequence[int | str]) -> str:
    """The field at a place in the body: of several types that it may have, pydantic names the one that it tried."""
    path = itertools.takewhile(lambda step: not TRIED_TYPE.fullmatch(str(step)), place[1:])
    return ".".join(map(str, path))


async def _http_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "route" not in request.scope:
        there = ", ".join(path for path in request.app.openapi()["paths"] if path.startswith(API_PATHS))
        return ApiError(404, f"{request.method} {request.url.path}: no such path; there are {there}").response()
    unread = isinstance(error.__cause__, ValueError | RecursionError)  # a body, by FastAPI
    text = f"the body cannot be read: {error.__cause__}" if unread else str(error.detail)
    response = ApiError(error.status_code, text).response()
    response.headers.update(error.headers or {})
    return response


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _bug(request: Request, error: Exception) -> Response:
    """Starlette has logged it."""
    return ApiError(500, "the gateway failed by a bug of its own; its log says where", kind="server_error").response()


HANDLERS: dict[int | type[Exception], Any] = {
    ApiError: _failed,
    SwarmnodeError: _failed,
    RequestValidationError: _not_valid,
    HTTPException: _http_failed,
    ClientGone: _nobody_there,
    Exception: _bug,
}
