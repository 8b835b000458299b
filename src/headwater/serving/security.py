"""Security middleware: Host and Origin checks, token authentication, and security headers on every response.

Host must be an address this server is bound to: another name that resolves to it (DNS rebinding) is refused.
Origin and Sec-Fetch-Site must be same-origin: another site's page can neither read nor send. Nothing allows CORS.
Where there is a token, every route but /healthz requires it, in a header or in the cookie that a one-time link sets.
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
from headwater.i18n import _
from headwater.serving.errors import (
    Forbidden,
    MethodNotAllowed,
    RouteNotFound,
    Unauthorized,
    UnsupportedMediaType,
    error_body,
)

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
COOKIE_NAME = "headwater"
LOGIN_PATH = "/login/"  # followed by a one-time code
PUBLIC_PATHS = ("/healthz",)
WILDCARD_HOSTS = ("0.0.0.0", "::")
ALLOWED_METHODS = ("GET", "HEAD", "POST")
_SAFE_PATH = re.compile(rb"/[A-Za-z0-9_\-./]*")

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address: 127.0.0.0/8, ::1 or localhost; any other name may resolve to anything.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "::ffff:127.0.0.1", "my-laptop")]
    [True, True, True, False, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback and not host.lower().startswith("::ffff:")
    except ValueError:
        return host == "localhost"


def is_ip_address(host: str) -> bool:
    """Whether a host is an IP address, in brackets or not."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


@dataclass
class AccessPolicy:
    """Access policy of the server. host: the address it is bound to; a token is required unless it is loopback."""

    host: str
    port: int
    token: str = ""
    on_login_url: Callable[[str], None] = lambda link: None
    login_code: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # valid once

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise BadSetting(
                _(
                    "--host {host} is reachable from other machines, so it requires a token, got none; add "
                    "--token, or leave --host out",
                    host=self.host,
                )
            )

    @property
    def allowed_hosts(self) -> set[str]:
        """Values of the Host header that are accepted."""
        return {f"{name}:{self.port}" for name in (*LOOPBACK_HOSTS, _bracketed(self.host))}

    def allows_host(self, host: str) -> bool:
        """Whether a Host header is accepted. A wildcard bind accepts every IP address, but no other name."""
        if host in self.allowed_hosts:
            return True
        name, _separator, port = host.rpartition(":")
        return self.host in WILDCARD_HOSTS and port == str(self.port) and is_ip_address(name)

    def login_url(self) -> str:
        """The address to open in a browser, with the one-time code where a token is required."""
        host = "127.0.0.1" if self.host in WILDCARD_HOSTS else _bracketed(self.host)
        path = f"{LOGIN_PATH}{self.login_code}" if self.token else "/"
        return f"http://{host}:{self.port}{path}"

    def redeem_login_code(self, code: str) -> bool:
        """Whether a one-time code is correct. It is then replaced, and the new login URL reported to on_login_url."""
        if not self.token or not hmac.compare_digest(code.encode(), self.login_code.encode()):
            return False
        self.login_code = secrets.token_urlsafe(24)
        self.on_login_url(self.login_url())
        return True

    def has_token(self, headers: Headers) -> bool:
        """Whether the request carries the token, compared in constant time."""
        scheme, _separator, credentials = headers.get("authorization", "").partition(" ")
        bearer = credentials if scheme.lower() == "bearer" else ""
        cookie = _read_cookie(headers.get("cookie", ""))
        matches = [hmac.compare_digest(value.encode(), self.token.encode()) for value in (bearer, cookie)]
        return any(matches)


def _bracketed(host: str) -> str:
    """An address as a URL has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _read_cookie(cookie_header: str) -> str:
    try:
        cookie = SimpleCookie(cookie_header).get(COOKIE_NAME)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


class SecurityMiddleware:
    """ASGI middleware: authorizes before routing or reading the body, and sets SECURITY_HEADERS on every response."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        try:
            response = self.authorize(scope)
        except Fault as fault:
            response = JSONResponse(error_body(fault), fault.http_code)
        await (response or self.app)(scope, receive, _with_headers(send))

    def authorize(self, scope: Scope) -> Response | None:
        """Check a request: None lets it pass, a response answers it, a Fault refuses it."""
        headers = Headers(scope=scope)
        path = scope["path"]
        method = scope["method"]
        _check_host(headers.getlist("host"), self.policy)
        _check_origin(headers, scope["scheme"])
        if method not in ALLOWED_METHODS:
            raise MethodNotAllowed(_("the method {method!r} is not supported; use GET or POST", method=method[:20]))
        if not _SAFE_PATH.fullmatch(scope.get("raw_path") or path.encode()) or "//" in path or "/." in path:
            raise RouteNotFound(_("there is nothing at this path"))
        if method == "POST":
            _check_content_type(headers)
        is_login = method == "GET" and path.startswith(LOGIN_PATH)
        if is_login and self.policy.redeem_login_code(path.removeprefix(LOGIN_PATH)):
            return _login_redirect(self.policy)
        if self.policy.token and path not in PUBLIC_PATHS and not self.policy.has_token(headers):
            raise Unauthorized(_("this server requires its token; open the link that its terminal shows"))
        return None


def _check_host(hosts: Iterable[str], policy: AccessPolicy) -> None:
    match list(hosts):
        case [host] if policy.allows_host(host.lower()):
            return
    own_host = policy.login_url().split("/")[2]
    raise Forbidden(_("the address of this server is {host}; open that address", host=own_host))


def _check_origin(headers: Headers, scheme: str) -> None:
    origin = headers.get("origin")
    own_origin = f"{scheme}://{headers['host']}"
    site = headers.get("sec-fetch-site")
    if (origin is not None and origin != own_origin) or site not in (None, "same-origin", "none"):
        raise Forbidden(_("requests from other sites are refused; type the address into the browser"))


def _check_content_type(headers: Headers) -> None:
    media_type, _separator, parameters = headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json" or parameters.strip().lower() not in ("", "charset=utf-8"):
        raise UnsupportedMediaType(_("a request must be application/json"))
    if headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType(_("a request must not be compressed"))


def _login_redirect(policy: AccessPolicy) -> Response:
    response = RedirectResponse("/", 303)
    response.set_cookie(COOKIE_NAME, policy.token, httponly=True, samesite="strict", path="/")
    return response


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_with_headers
