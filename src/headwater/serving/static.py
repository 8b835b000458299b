"""The page's files: read once from the package, served by exact name, never from a path that somebody sent."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


class Static:
    def __init__(self) -> None:
        self.files = dict(_walk(resources.files("headwater") / "web", "/static/"))
        self.files["/"] = self.files.pop("/static/index.html")

    async def answer(self, request: Request) -> Response:
        """The browser keeps a file and asks whether it is still the same."""
        content, kind, tag = self.files[request.scope["path"]]
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)


def _walk(folder: Traversable, path: str) -> list[tuple[str, tuple[bytes, str, str]]]:
    found: list[tuple[str, tuple[bytes, str, str]]] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        ending = "." + entry.name.rpartition(".")[2]
        if entry.is_dir():
            found += _walk(entry, f"{path}{entry.name}/")
        elif ending in TYPES and entry.name != "tsconfig.json":
            content = entry.read_bytes()
            tag = '"' + hashlib.sha256(content).hexdigest()[:20] + '"'
            found.append((path + entry.name, (content, TYPES[ending], tag)))
    return found
