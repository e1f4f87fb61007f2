"""The page at /docs: Swagger UI over /openapi.json. It needs no other host, and its policy lets it ask none.

Swagger UI's own files are those that the package fastapi-offline ships; nothing else of it is used.
"""

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

_ASSETS = Path(__file__).parent / "assets"
_SWAGGER_UI = Path(str(files("fastapi_offline"))) / "static"
_FILES = {
    "docs.js": _ASSETS / "docs.js",
    "swagger-ui.css": _SWAGGER_UI / "swagger-ui.css",
    "swagger-ui-bundle.js": _SWAGGER_UI / "swagger-ui-bundle.js",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "  # its icons are data URIs
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def add_docs_page(app: FastAPI) -> None:
    """Add /docs and the files that it names."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(_ASSETS / "docs.html", headers=_HEADERS)

    @app.get("/docs/{name}", include_in_schema=False)
    async def docs_file(name: str) -> FileResponse:
        if name not in _FILES:
            raise HTTPException(404)
        return FileResponse(_FILES[name], headers=_HEADERS)
