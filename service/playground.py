"""The playground: one page at `/` and its files below `/playground/`, for people with a browser and a picture.

The files lie in `service/assets` and are read once, at start. They need no key; what the page calls in /v1/* does, as
from anybody else.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from service.errors import NotFound

_ASSETS = Path(__file__).parent / "assets"
_MEDIA_TYPES = {  # of all files there are: the machine's own table may say otherwise
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page may load its own files, draw pictures that it was given, and call this service. Nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again with the ETag: another version is seen at once
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is sent."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Of its bytes: files of two releases may have one size and, in an image, one time."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def add_playground(app: FastAPI) -> None:
    """Let `app` serve the page and its files."""
    paths = [*(_ASSETS / "playground").iterdir(), _ASSETS / "photograph.jpg"]
    assets = {path.name: Asset(path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in paths}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, assets["index.html"])

    @app.api_route("/playground/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise NotFound("the playground has no such file")
        return _answer(request, assets[name])


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "etag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):  # maybe among others, or made weak by a proxy
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
