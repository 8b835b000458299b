"""The web application: its routes, and the static files of the page, served by exact name with ETags."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from headwater import __version__
from headwater.errors import Fault
from headwater.i18n import _
from headwater.inspection.position_plots import position_effects
from headwater.serving import schemas
from headwater.serving.errors import Busy, MethodNotAllowed, RouteNotFound, error_body
from headwater.serving.handlers import (
    attribution,
    chat,
    check,
    image,
    model,
    next_token,
    runs,
    speech,
    visibility,
    walkthrough,
)
from headwater.serving.handlers.attention import TraceCache
from headwater.serving.handlers.next_token import LogitsCache
from headwater.serving.model_store import ModelStore
from headwater.serving.security import AccessPolicy, SecurityMiddleware
from headwater.serving.worker import ThreadWorker

# --------------------------------------------------------------------------------------------------
# Static files of the web page: read once from the package and served by exact name, with ETags.


CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


class StaticFiles:
    """The files of the web page: path -> (content, media type, ETag)."""

    def __init__(self) -> None:
        self.files = dict(_read_files(resources.files("headwater") / "web", "/static/"))
        self.files["/"] = self.files.pop("/static/index.html")

    async def respond(self, request: Request) -> Response:
        """A file, or 304 where the browser has it in its cache."""
        content, media_type, etag = self.files[request.scope["path"]]
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)


def _read_files(folder: Traversable, path: str) -> list[tuple[str, tuple[bytes, str, str]]]:
    files: list[tuple[str, tuple[bytes, str, str]]] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        suffix = "." + entry.name.rpartition(".")[2]
        if entry.is_dir():
            files += _read_files(entry, f"{path}{entry.name}/")
        elif suffix in CONTENT_TYPES and entry.name != "tsconfig.json":
            content = entry.read_bytes()
            etag = '"' + hashlib.sha256(content).hexdigest()[:20] + '"'
            files.append((path + entry.name, (content, CONTENT_TYPES[suffix], etag)))
    return files


# --------------------------------------------------------------------------------------------------
# The ASGI application: routes with their request schemas and handlers, and errors as JSON.


log = logging.getLogger("headwater.serving")


@dataclass
class AppState:
    """State shared by all requests. Models and caches are used in the thread of model_worker only.

    file_worker: a second thread for requests that read the files of a run and need no model, so that they are served
    while a model is busy.
    """

    model_store: ModelStore
    static_files: StaticFiles = field(default_factory=StaticFiles)
    model_worker: ThreadWorker = field(default_factory=ThreadWorker)
    file_worker: ThreadWorker = field(default_factory=partial(ThreadWorker, name="files"))
    traces: TraceCache = field(default_factory=TraceCache)
    logits_cache: LogitsCache = field(default_factory=LogitsCache)

    # ------------------------------------------------------------------------------------------- JSON responses

    def models(self, request: schemas.ApiRequest) -> Any:
        """The models and runs of the store."""
        entries = self.model_store.entries.values()
        names = [{"name": entry.name, "kind": entry.kind} for entry in entries]
        summaries = [
            runs.summarize_run(entry.name, entry.path)
            for entry in entries
            if entry.kind == "run" and entry.path is not None
        ]
        return {"version": __version__, "models": names, "runs": summaries}

    def model_info(self, request: schemas.ModelRequest) -> Any:
        return model.model_info(self.model_store.open(request.model))

    def model_structure(self, request: schemas.ModelRequest) -> Any:
        return model.model_structure(self.model_store.open(request.model))

    def positions(self, request: schemas.ModelRequest) -> Any:
        return position_effects(self.model_store.open(request.model).loaded, length=48).to_dict()

    def tokenize(self, request: schemas.TextRequest) -> Any:
        return model.tokenize(self.model_store.open(request.model), request)

    def attention(self, request: schemas.TextRequest) -> Any:
        open_model = self.model_store.open(request.model)
        inputs = schemas.tokenize_request(open_model, request)
        return self.traces.get_or_create(open_model.cache_key, inputs).to_dict()

    def next_token(self, request: schemas.SamplingRequest) -> Any:
        return next_token.next_token(self.model_store.open(request.model), request, self.logits_cache)

    def fill_mask(self, request: schemas.FillMaskRequest) -> Any:
        return next_token.fill_mask(self.model_store.open(request.model), request)

    def logit_lens(self, request: schemas.LogitLensRequest) -> Any:
        return next_token.logit_lens_table(self.model_store.open(request.model), request)

    def attribution(self, request: schemas.AttributionRequest) -> Any:
        return attribution.token_attribution(self.model_store.open(request.model), request)

    def ablate_head(self, request: schemas.AblateHeadRequest) -> Any:
        return attribution.ablate_head(self.model_store.open(request.model), request)

    def ablate_layer(self, request: schemas.AblateLayerRequest) -> Any:
        return attribution.ablate_layer(self.model_store.open(request.model), request)

    def image(self, request: schemas.ImageRequest) -> Any:
        return image.inspect_image(self.model_store.open(request.model), request)

    def walkthrough(self, request: schemas.WalkthroughRequest) -> Any:
        return walkthrough.walkthrough(self.model_store.open(request.model), request)

    def speech(self, request: schemas.SpeechRequest) -> Any:
        return speech.speech(self.model_store.open(request.model), request)

    def check(self, request: schemas.CheckRequest) -> Any:
        return check.check_model(self.model_store.open(request.model), request)

    def visibility(self, request: schemas.VisibilityRequest) -> Any:
        return visibility.visibility(self.model_store.open(request.model), request)

    def run(self, request: schemas.RunRequest) -> Any:
        return runs.read_run(self.model_store, request)

    def checkpoint(self, request: schemas.CheckpointRequest) -> Any:
        return runs.inspect_checkpoint(self.model_store, request)

    # ----------------------------------------------------------------------------------------- binary responses

    def attention_tile(self, request: schemas.TileRequest) -> bytes:
        trace = self.traces.get(request.trace_id)
        tile = trace.tile(
            request.kind, request.layer, request.head, request.level, request.row, request.column, request.power
        )
        return tile.contiguous().numpy().tobytes()

    def attention_block(self, request: schemas.BlockRequest) -> bytes:
        block = self.traces.get(request.trace_id).block(
            request.kind, request.layer, request.head, request.rows, request.columns
        )
        return block.contiguous().numpy().astype("<f4").tobytes()

    def attention_thumbnails(self, request: schemas.ThumbnailsRequest) -> bytes:
        trace = self.traces.get(request.trace_id)
        trace.layer_weights(request.kind, 0)  # raises on an unknown kind
        return b"".join(layer.contiguous().numpy().tobytes() for layer in trace.kinds[request.kind].thumbnails)


# Name of the path under /api/ and of the method of AppState, with the schema of its request body.
ROUTES: dict[str, type[schemas.ApiRequest]] = {
    "models": schemas.ApiRequest,
    "model_info": schemas.ModelRequest,
    "model_structure": schemas.ModelRequest,
    "positions": schemas.ModelRequest,
    "tokenize": schemas.TextRequest,
    "attention": schemas.TextRequest,
    "next_token": schemas.SamplingRequest,
    "fill_mask": schemas.FillMaskRequest,
    "logit_lens": schemas.LogitLensRequest,
    "attribution": schemas.AttributionRequest,
    "ablate_head": schemas.AblateHeadRequest,
    "ablate_layer": schemas.AblateLayerRequest,
    "image": schemas.ImageRequest,
    "walkthrough": schemas.WalkthroughRequest,
    "speech": schemas.SpeechRequest,
    "check": schemas.CheckRequest,
    "visibility": schemas.VisibilityRequest,
    "run": schemas.RunRequest,
    "checkpoint": schemas.CheckpointRequest,
    "attention_tile": schemas.TileRequest,
    "attention_block": schemas.BlockRequest,
    "attention_thumbnails": schemas.ThumbnailsRequest,
}
FILE_ROUTES = {"models", "run"}
Endpoint = Callable[[Request], Awaitable[Response]]


async def json_endpoint(state: AppState, name: str, request: Request) -> Response:
    """Parse the body, call the handler in its worker thread, and send bytes as they are, all else as JSON."""
    parsed = schemas.parse_request(ROUTES[name], await request.body() or b"{}")
    worker = state.file_worker if name in FILE_ROUTES else state.model_worker
    handler = getattr(state, name)
    result = await worker.call(partial(handler, parsed))
    if isinstance(result, bytes):
        return Response(result, media_type="application/octet-stream")
    return Response(_to_json(result), media_type="application/json")


async def chat_endpoint(state: AppState, request: Request) -> Response:
    """Streamed generation: one JSON object per line.

    The first line is awaited before the response starts, so that a fault still sets the status code.
    """
    parsed = schemas.parse_request(schemas.ChatRequest, await request.body())
    lines = state.model_worker.stream(lambda: chat.stream_chat(state.model_store.open(parsed.model), parsed))
    first = await anext(lines, None)

    async def body() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield _to_json(first) + b"\n"
            async for line in lines:
                yield _to_json(line) + b"\n"
        except Fault as fault:
            yield _to_json(error_body(fault)) + b"\n"
        finally:
            await lines.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(body(), media_type="application/x-ndjson")


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


async def healthz(request: Request) -> Response:
    """Health check: needs no token."""
    return JSONResponse({"status": "ok"})


def with_errors(endpoint: Endpoint) -> Endpoint:
    """Turn exceptions of an endpoint into JSON errors. An unexpected one is logged under a number the client gets."""

    async def handle(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Fault as fault:
            headers = {"retry-after": "1"} if isinstance(fault, Busy) else {}
            return JSONResponse(error_body(fault), fault.http_code, headers)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            if type(error).__name__ == "_RequestBodyTooLarge":  # handled by RequestBodyLimitMiddleware
                raise
            number = secrets.token_hex(4)
            log.exception("error %s in %s", number, request.scope["path"])
            message = _("internal server error; the server's terminal has the traceback, under {number}", number=number)
            return JSONResponse(error_body(Fault(message)), 500)

    return handle


def create_app(model_store: ModelStore, policy: AccessPolicy) -> ASGIApp:
    """The Starlette application: all routes behind the security middleware and a limit on request bodies."""
    state = AppState(model_store)

    # Routes
    routes = [Route("/healthz", with_errors(healthz), methods=["GET"])]
    for path in state.static_files.files:
        routes.append(Route(path, with_errors(state.static_files.respond), methods=["GET"]))
    for name in ROUTES:
        routes.append(Route(f"/api/{name}", with_errors(partial(json_endpoint, state, name)), methods=["POST"]))
    routes.append(Route("/api/chat", with_errors(partial(chat_endpoint, state)), methods=["POST"]))

    # Middleware, outermost first
    security = Middleware(SecurityMiddleware, policy=policy)
    body_limit = Middleware(RequestBodyLimitMiddleware, max_body_size=schemas.MAX_BODY_BYTES)

    exception_handlers: dict[Any, Any] = {404: _not_found, 405: _method_not_allowed}
    app = Starlette(routes=routes, middleware=[security, body_limit], exception_handlers=exception_handlers)
    app.router.redirect_slashes = False
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(RouteNotFound(_("there is nothing at this path"))), 404)


async def _method_not_allowed(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(MethodNotAllowed(_("this path does not allow that method"))), 405)
