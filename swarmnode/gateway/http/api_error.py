"""Errors in the format of OpenAI's API: a status, and a body that its clients turn into their own exceptions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from swarmnode.errors import (
    Busy,
    ContextTooLong,
    ErrorCode,
    NetworkDown,
    NoRoute,
    PeerError,
    PeerRefused,
    SwarmnodeError,
    UsageError,
)

RETRY_S = 5.0  # Retry-After if the error itself has no better value
STATUS: Mapping[str, int] = {
    "context_length_exceeded": 400,
    "model_not_supported": 400,
    "no_chat_template": 400,
    "invalid_api_key": 401,
    "not_owner": 403,
    "wrong_host": 403,
    "wrong_origin": 403,
    "model_not_found": 404,
    "previous_response_not_found": 404,
    "rate_limit_exceeded": 429,
    **{code.name.lower(): 502 for code in ErrorCode},
    "loading": 503,
    "no_route": 503,
}
"""HTTP status of each `code` of an error, the table of docs/api.md: the gateway's own codes, and those of peers"""


class ApiError(HTTPException):
    """Error response to a request.

    `failure` is a code of `STATUS`, or the status of an error without a code. `parameter` is the field that is wrong, if one is.
    `retry_s` is the number of seconds after which the client may try again; None if there is no such time.
    """

    def __init__(
        self, failure: str | int, message: str, *, parameter: str | None = None, retry_s: float | None = None
    ) -> None:
        self.code, status = (failure, STATUS[failure]) if isinstance(failure, str) else (None, failure)
        super().__init__(status, message.encode(errors="replace").decode())  # it may quote a lone surrogate
        self.kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
        self.parameter = parameter
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """Return the body as a dict. Anthropic's clients read the outer `type`, OpenAI's the rest."""
        told = {"message": self.detail, "type": self.kind, "param": self.parameter, "code": self.code}
        return {"type": "error", "error": told}

    def json(self) -> str:
        """Return the body as JSON text."""
        return json.dumps(self.body())

    def response(self) -> JSONResponse:
        """Return the HTTP response, with the headers Retry-After and WWW-Authenticate if they apply."""
        headers = {} if self.retry_s is None else {"Retry-After": str(math.ceil(self.retry_s))}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


def bad_request(message: str, parameter: str | None = None) -> ApiError:
    """Return an error with status 400 for an invalid request; `parameter` is the field that is wrong, if one is."""
    return ApiError(400, message, parameter=parameter)


def too_many(message: str, retry_s: float) -> ApiError:
    """Return an error with status 429 for a client that exceeds a limit; it may try again after `retry_s` seconds."""
    return ApiError("rate_limit_exceeded", message, retry_s=retry_s)


def api_error(error: SwarmnodeError) -> ApiError:
    """Convert an error of the swarm or of this machine: 4xx if the request must change, 429 if the swarm is busy, 5xx otherwise."""
    text = str(error)
    if isinstance(error, ContextTooLong):
        return ApiError("context_length_exceeded", text, parameter="messages")
    if isinstance(error, UsageError):
        return bad_request(text)
    if isinstance(error, Busy):
        return too_many(text, error.retry_s)
    if isinstance(error, NoRoute | NetworkDown):
        return ApiError("no_route", text, retry_s=RETRY_S)
    if isinstance(error, PeerRefused) and error.code is ErrorCode.TOO_LARGE:
        text = "no machine of the swarm has enough memory for this many tokens: shorten the prompt, or lower max_tokens"
        return ApiError("context_length_exceeded", text)
    if isinstance(error, PeerRefused) and error.code is ErrorCode.INVALID_REQUEST:
        return bad_request(text)
    if isinstance(error, PeerError):
        return ApiError(error.code.name.lower(), text)
    return ApiError(500, text)
