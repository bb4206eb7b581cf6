"""Errors as OpenAI's API tells them: a status, and a body that its clients turn into exceptions of their own."""

from __future__ import annotations

import json
import math
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

RETRY_S = 5.0  # where nothing says when asking again is worth it


class ApiError(HTTPException):
    """What a request is answered with. `retry_s` says after how many seconds asking again is worth it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        parameter: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(status, message.encode(errors="replace").decode())  # it may tell of half a character
        self.kind = kind
        self.code = code
        self.parameter = parameter
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """The JSON of it. Anthropic's clients look for the outer type, OpenAI's for the rest."""
        told = {"message": self.detail, "type": self.kind, "param": self.parameter, "code": self.code}
        return {"type": "error", "error": told}

    def json(self) -> str:
        """The same, written."""
        return json.dumps(self.body())

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {} if self.retry_s is None else {"Retry-After": str(math.ceil(self.retry_s))}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


def bad_request(message: str, parameter: str | None = None, *, code: str | None = None) -> ApiError:
    """Return the error for a request that cannot be answered as it is, for `parameter` of it."""
    return ApiError(400, message, code=code, parameter=parameter)


def too_many(message: str, retry_s: float) -> ApiError:
    """For who asks more than there is room for now."""
    return ApiError(429, message, kind="requests", code="rate_limit_exceeded", retry_s=retry_s)


def api_error(error: SwarmnodeError) -> ApiError:
    """An error of the swarm or of this machine, by whose fault it is."""
    text = str(error)
    if isinstance(error, ContextTooLong):
        return bad_request(text, "messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        return bad_request(text)
    if isinstance(error, Busy):
        return too_many(text, error.retry_s)
    if isinstance(error, NoRoute | NetworkDown):
        return ApiError(503, text, kind="server_error", code="no_route", retry_s=RETRY_S)
    if isinstance(error, PeerRefused) and error.code is ErrorCode.TOO_LARGE:
        text = "no machine of the swarm has memory for so many tokens: shorten the prompt, or ask for fewer new ones"
        return bad_request(text, code="context_length_exceeded")
    if isinstance(error, PeerRefused) and error.code is ErrorCode.INVALID_REQUEST:
        return bad_request(text)
    if isinstance(error, PeerError):
        return ApiError(502, text, kind="server_error", code=error.code.name.lower())
    return ApiError(500, text, kind="server_error")
