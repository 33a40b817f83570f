"""The page at `/`: a few files of the package, which ask the API of the same server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

FILES = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere is loaded or asked. No text can become a script: Trusted Types refuse it as HTML."""


def web_page() -> APIRouter:
    """The routes. The files are read once; no path of a request reaches the file system."""
    router = APIRouter(include_in_schema=False)
    found = {
        path.name: Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS)
        for path in FILES.iterdir()
    }

    @router.get("/")
    async def index() -> Response:
        return found["index.html"]

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in found:
            raise HTTPException(404, "there is no such file")
        return found[name]

    return router


def is_open(path: str) -> bool:
    """Whether a path is one of the page's: it has nothing of the model, and asks for the key that the API needs."""
    return path == "/" or path.startswith("/page/")
