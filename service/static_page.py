"""A page for browsers and its files: read once at start, kept by browsers, and loading nothing from elsewhere."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from service.errors import NotFound

_MEDIA_TYPES = {  # of all files there are: the machine's own table may say otherwise
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page may load its own files and call this service. Nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src {images}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again with the ETag: another version is seen at once
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    """One file, as it is sent. The ETag is of its bytes: files of two releases may have one size and one time."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "_Asset":
        content = path.read_bytes()
        return cls(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def add_static_page(
    app: FastAPI, path: str, page: Path, files: Iterable[Path], *, folder: str, images: str = "'self'"
) -> None:
    """Let `app` serve `page` at `path` and `files` by their names below `folder`, to GET and HEAD, without a key.

    `images` are the sources that its policy allows for them.
    """
    headers = {**_HEADERS, "content-security-policy": _POLICY.format(images=images)}
    shown = _Asset.read(page)
    assets = {each.name: _Asset.read(each) for each in files}

    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def static_page(request: Request) -> Response:
        return _answer(request, shown, headers)

    @app.api_route(f"{folder}/{{name}}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static_file(request: Request, name: str) -> Response:
        if name not in assets:
            raise NotFound("this page has no such file")
        return _answer(request, assets[name], headers)


def _answer(request: Request, asset: _Asset, headers: Mapping[str, str]) -> Response:
    headers = {**headers, "etag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):  # maybe among others, or made weak by a proxy
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
