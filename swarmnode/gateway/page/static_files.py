"""Static files of the page, from the package. They hold no secrets, so they need no key."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePosixPath
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarmnode.gateway.http.api_error import ApiError

router = APIRouter(include_in_schema=False)
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Only scripts and styles of this gateway run, and no text becomes markup (`trusted-types 'none'`), wherever it slipped in.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Cache-Control": "no-cache",  # the browser checks each time for a newer file
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class StaticFile(NamedTuple):
    """File of the page. `tag` is its ETag, a hash of the content."""

    content: bytes
    media_type: str
    tag: str


FILES: dict[str, StaticFile] = {}
for _file in resources.files(__package__).joinpath("static").iterdir():
    _content = _file.read_bytes()
    _tag = f'"{hashlib.sha256(_content).hexdigest()[:16]}"'
    FILES[_file.name] = StaticFile(_content, MEDIA_TYPES[PurePosixPath(_file.name).suffix], _tag)


@router.get("/")
async def index(request: Request) -> Response:
    """Return the page."""
    return _answer(request, INDEX)


@router.get("/page/{name}")
async def static_file(name: str, request: Request) -> Response:
    """Return a script, a style or a picture of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = FILES.get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {name!r}: reload the page")
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
