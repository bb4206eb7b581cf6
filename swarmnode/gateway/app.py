"""Web application of the gateway: its endpoints, and the responses for errors.

Endpoints for monitoring: /health, /ready and /metrics.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from swarmnode.errors import SwarmnodeError
from swarmnode.gateway.access.guard import Guard
from swarmnode.gateway.anthropic import messages
from swarmnode.gateway.gateway import Gateway, gateway_of
from swarmnode.gateway.http.api_error import ApiError, api_error, bad_request
from swarmnode.gateway.http.event_stream import ClientGone
from swarmnode.gateway.openai import completions, encoders, responses
from swarmnode.gateway.page import endpoints
from swarmnode.gateway.page.page import Page
from swarmnode.metrics.exposition import CONTENT_TYPE, Sources, exposed
from swarmnode.version import __version__

TRIED_TYPE = re.compile(r"str|int|float|bool|[\w-]+\[.*|[A-Z]\w+|\[key\]")
API_PATHS = ("/v1/", "/v2/", "/classify", "/rerank", "/tokenize", "/detokenize", "/api/")
GONE = 499  # nginx's status for a client that has closed the connection; no client receives it
MAX_PATH = 200  # characters of a path that an error repeats


def build_app(gateway: Gateway, page: Page | None = None) -> FastAPI:
    """Return the ASGI application of `gateway`; with a `page`, it has the page's endpoints too. FastAPI's own documentation pages
    are off because they load scripts from other hosts."""
    app = FastAPI(title="swarmnode", version=__version__, docs_url=None, redoc_url=None, exception_handlers=HANDLERS)
    app.state.gateway = gateway
    # Requests are matched in this order.
    for each in (completions, responses, messages, encoders):
        app.include_router(each.router)
    app.include_router(router)
    if page is not None:
        app.state.page = page
        for part in (endpoints.files, endpoints.router):
            app.include_router(part)
    app.add_middleware(Guard, keys=gateway.keys, config=gateway.config)
    if gateway.config.origins:  # outside the guard: a browser's preflight request carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gateway.config.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | SwarmnodeError)
    return (error if isinstance(error, ApiError) else api_error(error)).response()


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found: dict[str, list[str]] = {}  # pydantic's messages by field
    for each in error.errors():
        if each["type"] == "json_invalid":
            return bad_request(
                f"the body is not JSON: {each['ctx']['error'].removesuffix(' at')} at character {each['loc'][-1]}"
            ).response()
        path = itertools.takewhile(lambda step: not TRIED_TYPE.fullmatch(str(step)), each["loc"][1:])
        found.setdefault(".".join(map(str, path)), []).append(each["msg"])
    where, wanted = next(iter(found.items()))
    text = "; or: ".join(dict.fromkeys(wanted))
    if not where and "json" not in request.headers.get("content-type", ""):
        text = "send it with Content-Type: application/json, or it is not read as JSON"
    return bad_request(f"{where or 'the body'}: {text}", where or None).response()


async def _http_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unread = isinstance(error.__cause__, ValueError | RecursionError)  # FastAPI could not parse the body
    text = f"the body cannot be read: {error.__cause__}" if unread else str(error.detail)
    if not isinstance(error, ApiError) and error.status_code in (404, 405):
        text = f"{text}: {request.method} {request.url.path[:MAX_PATH]} is not answered here"
    if error.status_code == 404 and "route" not in request.scope:
        text += (
            f"; there are {', '.join(path for path in request.app.openapi()['paths'] if path.startswith(API_PATHS))}"
        )
    response = ApiError(error.status_code, text).response()
    response.headers.update(error.headers or {})
    return response


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _bug(request: Request, error: Exception) -> Response:
    """Return status 500 for an unexpected exception. Starlette raises the exception again afterwards, so that the server logs
    it."""
    return ApiError(500, "the gateway failed by a bug: report the traceback in its log").response()


HANDLERS: dict[int | type[Exception], Any] = {
    ApiError: _failed,
    SwarmnodeError: _failed,
    RequestValidationError: _not_valid,
    HTTPException: _http_failed,
    ClientGone: _nobody_there,
    Exception: _bug,
}


router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Return status 200 as long as this process runs."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Return status 200 if every unit of each swarm's model has a holder and the tokenizers are loaded, else 503 with the
    missing units and the swarms that are still loading. A gateway that has reached no swarm yet is not ready."""
    swarms = gateway_of(request).swarms
    missing = {name: model.missing for name, model in swarms.items() if model.missing}
    loading = [name for name, model in swarms.items() if not model.loader.is_done]
    is_ready = bool(swarms) and not missing and not loading
    return JSONResponse({"ready": is_ready, "missing": missing, "loading": loading}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of all swarms in Prometheus' text format."""
    sources = [Sources(name, model.client.readings) for name, model in gateway_of(request).swarms.items()]
    return Response(await exposed(sources), media_type=CONTENT_TYPE)
