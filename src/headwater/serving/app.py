"""The routes, all of them: each a method, a path, what may be asked, and who answers. What is not listed is refused."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
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
from headwater.inspection.places import positions
from headwater.inspection.words import Both
from headwater.serving import anatomy, asking, checking, choosing, reasons, runs, talking, walking
from headwater.serving.faults import Busy, NotHere, WrongMethod, told
from headwater.serving.gate import Gate, Guard
from headwater.serving.shelf import Shelf
from headwater.serving.static import Static
from headwater.serving.tracing import Traces
from headwater.serving.worker import Worker

log = logging.getLogger("headwater.serving")


@dataclass
class House:
    """What the answers share. Models, traces and what was said are touched in the model's thread only.

    files: another thread, for answers that read a run's files and need no model: they come while a model is busy.
    """

    shelf: Shelf
    static: Static = field(default_factory=Static)
    worker: Worker = field(default_factory=Worker)
    files: Worker = field(default_factory=partial(Worker, name="files"))
    traces: Traces = field(default_factory=Traces)
    said: choosing.Said = field(default_factory=choosing.Said)

    # ------------------------------------------------------------------------------------------- answers in JSON

    def shelf_list(self, ask: asking.Ask) -> Any:
        items = self.shelf.items.values()
        found = [runs.summary(i.name, i.path) for i in items if i.kind == "run" and i.path is not None]
        return {"version": __version__, "items": [{"name": i.name, "kind": i.kind} for i in items], "runs": found}

    def about(self, ask: asking.OfModel) -> Any:
        return anatomy.about(self.shelf.open(ask.model))

    def anatomy(self, ask: asking.OfModel) -> Any:
        return anatomy.anatomy(self.shelf.open(ask.model))

    def positions(self, ask: asking.OfModel) -> Any:
        return positions(self.shelf.open(ask.model).given, length=48).to_plain()

    def tokens(self, ask: asking.OfText) -> Any:
        return anatomy.tokens(self.shelf.open(ask.model), ask)

    def attention(self, ask: asking.OfText) -> Any:
        opened = self.shelf.open(ask.model)
        return self.traces.make(opened.key, asking.reading_of(opened, ask)).plain()

    def next(self, ask: asking.Chosen) -> Any:
        return choosing.next_token(self.shelf.open(ask.model), ask, self.said)

    def hidden(self, ask: asking.Hidden) -> Any:
        return choosing.hidden(self.shelf.open(ask.model), ask)

    def lens(self, ask: asking.Lens) -> Any:
        return choosing.lens_of(self.shelf.open(ask.model), ask)

    def why(self, ask: asking.Why) -> Any:
        return reasons.why(self.shelf.open(ask.model), ask)

    def without(self, ask: asking.Without) -> Any:
        return reasons.without(self.shelf.open(ask.model), ask)

    def each_off(self, ask: asking.EachOff) -> Any:
        return reasons.each_off(self.shelf.open(ask.model), ask)

    def walk(self, ask: asking.Step) -> Any:
        return walking.walk(self.shelf.open(ask.model), ask)

    def check(self, ask: asking.Check) -> Any:
        return checking.checked(self.shelf.open(ask.model), ask)

    def run(self, ask: asking.OfRun) -> Any:
        return runs.run(self.shelf, ask)

    def scrub(self, ask: asking.Checkpoint) -> Any:
        return runs.scrubbed(self.shelf, ask)

    # ----------------------------------------------------------------------------------------- answers in bytes

    def tile(self, ask: asking.Tile) -> bytes:
        trace = self.traces.get(ask.trace)
        tile = trace.tile(ask.kind, ask.layer, ask.head, ask.level, ask.row, ask.column, ask.power)
        return tile.contiguous().numpy().tobytes()

    def block(self, ask: asking.Block) -> bytes:
        block = self.traces.get(ask.trace).block(ask.kind, ask.layer, ask.head, ask.rows, ask.columns)
        return block.contiguous().numpy().astype("<f4").tobytes()

    def thumbs(self, ask: asking.Thumbs) -> bytes:
        trace = self.traces.get(ask.trace)
        trace.layer(ask.kind, 0)  # a kind that does not exist is refused
        return b"".join(layer.contiguous().numpy().tobytes() for layer in trace.kinds[ask.kind].thumbs)


ASKS: dict[str, type[asking.Ask]] = {
    "shelf_list": asking.Ask,
    "about": asking.OfModel,
    "anatomy": asking.OfModel,
    "positions": asking.OfModel,
    "tokens": asking.OfText,
    "attention": asking.OfText,
    "next": asking.Chosen,
    "hidden": asking.Hidden,
    "lens": asking.Lens,
    "why": asking.Why,
    "without": asking.Without,
    "each_off": asking.EachOff,
    "walk": asking.Step,
    "check": asking.Check,
    "run": asking.OfRun,
    "scrub": asking.Checkpoint,
    "tile": asking.Tile,
    "block": asking.Block,
    "thumbs": asking.Thumbs,
}
OF_FILES = {"shelf_list", "run"}
Handler = Callable[[Request], Awaitable[Response]]


async def answered(house: House, name: str, request: Request) -> Response:
    """Parse, answer in the thread for it, and send: bytes as they are, all else as JSON without NaN."""
    ask = asking.parsed(ASKS[name], await request.body() or b"{}")
    worker = house.files if name in OF_FILES else house.worker
    found = await worker.call(partial(getattr(house, name), ask))
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream")
    return Response(_json(found), media_type="application/json")


async def talked(house: House, request: Request) -> Response:
    """The answer as it is said: a JSON object a line. The first is waited for, so that a refusal has its status."""
    ask = asking.parsed(asking.Talk, await request.body())
    lines = house.worker.stream(lambda: talking.talk(house.shelf.open(ask.model), ask))
    first = await anext(lines, None)

    async def sent() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield _json(first) + b"\n"
            async for line in lines:
                yield _json(line) + b"\n"
        except Fault as fault:
            yield _json(told(fault)) + b"\n"
        finally:
            await lines.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(sent(), media_type="application/x-ndjson")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


async def alive(request: Request) -> Response:
    return JSONResponse({"alive": True})


def guarded(handler: Handler) -> Handler:
    """Whatever goes wrong becomes typed JSON. What is ours to mend gets a number, and the terminal the rest."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Fault as fault:
            later = {"retry-after": "1"} if isinstance(fault, Busy) else {}
            return JSONResponse(told(fault), fault.http_code, later)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            if type(error).__name__ == "_RequestBodyTooLarge":  # its own middleware answers it
                raise
            number = secrets.token_hex(4)
            log.exception("error %s in %s", number, request.scope["path"])
            en = f"something went wrong in the server; its terminal says what, under {number}"
            return JSONResponse(told(Fault(Both(en, f"服务器出了错；它的终端里有说明，编号 {number}"))), 500)

    return handle


def app(shelf: Shelf, guard: Guard) -> ASGIApp:
    """The whole application behind its gate."""
    house = House(shelf)
    routes = [Route("/healthz", guarded(alive), methods=["GET"])]
    for path in house.static.files:
        routes.append(Route(path, guarded(house.static.answer), methods=["GET"]))
    for name in ASKS:
        path = "/api/" + name.replace("_list", "")
        routes.append(Route(path, guarded(partial(answered, house, name)), methods=["POST"]))
    routes.append(Route("/api/talk", guarded(partial(talked, house)), methods=["POST"]))
    limit = Middleware(RequestBodyLimitMiddleware, max_body_size=asking.MOST_BODY)
    gate = Middleware(Gate, guard=guard)
    handlers: dict[Any, Any] = {404: _missing, 405: _method}
    made = Starlette(routes=routes, middleware=[gate, limit], exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made


async def _missing(request: Request, error: Exception) -> Response:
    return JSONResponse(told(NotHere(Both("there is nothing of that name here", "这里没有这个名字的东西"))), 404)


async def _method(request: Request, error: Exception) -> Response:
    return JSONResponse(told(WrongMethod(Both("this path is not asked in that way", "这个路径不是这样问的"))), 405)
