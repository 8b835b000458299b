"""The gate before every route: who may ask, in which way, and what every answer carries.

Host must be an address this server was opened on: a page of another name that points here (DNS rebinding) is refused.
Origin and Sec-Fetch-Site must be our own: another site's page can neither read nor send. Nothing allows CORS.
Where there is a token, every route but /healthz asks for it, in a header or in the cookie that a one-time link sets.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.errors import BadSetting, Fault
from headwater.inspection.words import Both
from headwater.serving.faults import NotHere, NoToken, Refused, WrongMethod, WrongType, told

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
COOKIE, ENTRANCE, OPEN = "headwater", "/enter/", ("/healthz",)
METHODS = ("GET", "HEAD", "POST")
_PLAIN = re.compile(rb"/[A-Za-z0-9_\-./]*")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def is_loopback(host: str) -> bool:
    """127.0.0.0/8, ::1 and localhost; any other name may point anywhere.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "::ffff:127.0.0.1", "my-laptop")]
    [True, True, True, False, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback and not host.lower().startswith("::ffff:")
    except ValueError:
        return host == "localhost"


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


@dataclass
class Guard:
    """Who may come in. host: what the server is bound to. A token is needed wherever others can reach it."""

    host: str
    port: int
    token: str = ""
    announce: Callable[[str], None] = lambda link: None
    code: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise BadSetting(
                f"--host {self.host} can be reached by others, so a token must guard it, got none; "
                "add --token, or leave --host out"
            )

    @property
    def hosts(self) -> set[str]:
        own = f"[{self.host}]" if ":" in self.host else self.host
        return {f"{name}:{self.port}" for name in (*LOOPBACK, own)}

    def knows(self, host: str) -> bool:
        """A wildcard bind answers on every address of this machine; a name that is not ours is still refused."""
        name, _, port = host.rpartition(":")
        everywhere = self.host in ("0.0.0.0", "::")
        return host in self.hosts or (everywhere and port == str(self.port) and is_address(name))

    def entrance(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}" + (f"{ENTRANCE}{self.code}" if self.token else "/")

    def enter(self, code: str) -> bool:
        """A one-time code is spent by being right; the next one is told to the terminal."""
        if not self.token or not hmac.compare_digest(code.encode(), self.code.encode()):
            return False
        self.code = secrets.token_urlsafe(24)
        self.announce(self.entrance())
        return True

    def shown(self, headers: Headers) -> bool:
        """Whether the request carries the token, compared in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        candidates = [given if scheme.lower() == "bearer" else "", _cookie(headers.get("cookie", ""))]
        return any([hmac.compare_digest(one.encode(), self.token.encode()) for one in candidates])


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


class Gate:
    """Refuses before anything is routed or read, and puts HEADERS on every answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan: nothing here speaks them
        try:
            answer = self.judge(scope)
        except Fault as fault:
            answer = JSONResponse(told(fault), fault.http_code)
        await (answer or self.app)(scope, receive, _with_headers(send))

    def judge(self, scope: Scope) -> Response | None:
        """None lets the request pass."""
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        _check_host(headers.getlist("host"), self.guard)
        _check_site(headers, scope["scheme"])
        if method not in METHODS:
            raise WrongMethod(Both(f"{method[:20]!r} is not answered here; use GET or POST", "这里只回答 GET 和 POST"))
        if not _PLAIN.fullmatch(scope.get("raw_path") or path.encode()) or "//" in path or "/." in path:
            raise NotHere(Both("there is nothing of that name here", "这里没有这个名字的东西"))
        if method == "POST":
            _check_body(headers)
        if path.startswith(ENTRANCE) and method == "GET" and self.guard.enter(path.removeprefix(ENTRANCE)):
            return _welcome(self.guard)
        if self.guard.token and path not in OPEN and not self.guard.shown(headers):
            raise NoToken(
                Both(
                    "this server asks for its token; open the link that its terminal shows",
                    "本服务要令牌；请打开终端里显示的链接",
                )
            )
        return None


def _check_host(hosts: Iterable[str], guard: Guard) -> None:
    match list(hosts):
        case [host] if guard.knows(host.lower()):
            return
    own = guard.entrance().split("/")[2]
    raise Refused(Both(f"this server answers as {own}; open it by that address", f"本服务的地址是 {own}；请用它打开"))


def _check_site(headers: Headers, scheme: str) -> None:
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if (origin is not None and origin != f"{scheme}://{headers['host']}") or site not in (None, "same-origin", "none"):
        en = "another site may not ask this server; type its address into the browser"
        raise Refused(Both(en, "别的网站不能向本服务提问；请在浏览器里直接输入地址"))


def _check_body(headers: Headers) -> None:
    kind, _, more = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json" or more.strip().lower() not in ("", "charset=utf-8"):
        raise WrongType(Both("a request must be application/json", "请求应是 application/json"))
    if headers.get("content-encoding", "identity") != "identity":
        raise WrongType(Both("a request must not be compressed", "请求不能压缩"))


def _welcome(guard: Guard) -> Response:
    answer = RedirectResponse("/", 303)
    answer.set_cookie(COOKIE, guard.token, httponly=True, samesite="strict", path="/")
    return answer


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending
