"""Access control: hosts, origins, methods, tokens, paths; and the security headers of every response."""

from __future__ import annotations

import itertools
from urllib.parse import unquote

import pytest
from asyncio_runner import run
from starlette.routing import Route
from starlette.testclient import TestClient

from headwater.errors import BadSetting
from headwater.serving.app import create_app
from headwater.serving.security import SECURITY_HEADERS, AccessPolicy, is_loopback

HOST = "127.0.0.1:8017"
OWN_HOSTS = ["127.0.0.1:8017", "localhost:8017", "[::1]:8017", "LOCALHOST:8017"]
STRANGE_HOSTS = [
    "evil.example",
    "evil.example:8017",
    "127.0.0.1",
    "127.0.0.1:80",
    "localhost.evil.example:8017",
    "",
    "127.0.0.1:8017.evil.example",
    "127.0.0.1:8017@evil.example",
    "0.0.0.0:8017",
    "2130706433:8017",
]
STRANGE_ORIGINS = [
    "null",
    "http://evil.example",
    "https://127.0.0.1:8017",
    "http://127.0.0.1:8018",
    "http://127.0.0.1",
    "http://127.0.0.1:8017.evil.example",
    "file://",
    "",
]
SITES = ["cross-site", "same-site", "anything"]
CASES = [
    ("GET", "/"),
    ("GET", "/healthz"),
    ("GET", "/static/style.css"),
    ("POST", "/api/models"),
    ("POST", "/api/model_info"),
]


def ask(client, method, path, **headers):
    content = b"{}" if method == "POST" else None
    headers = {"content-type": "application/json", **headers} if method == "POST" else headers
    return client.request(method, path, content=content, headers=headers, follow_redirects=False)


@pytest.mark.parametrize(("method", "path"), CASES)
@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_another_name_is_refused(client, method, path, host):
    assert ask(client, method, path, host=host).status_code == 403


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_its_own_names_are_known(client, host):
    assert ask(client, "GET", "/", host=host).status_code == 200


@pytest.mark.parametrize(("method", "path"), CASES)
@pytest.mark.parametrize("origin", STRANGE_ORIGINS)
def test_another_origin_is_refused(client, method, path, origin):
    answer = ask(client, method, path, origin=origin)
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("method", "path"), CASES)
@pytest.mark.parametrize("site", SITES)
def test_another_site_is_refused(client, method, path, site):
    assert ask(client, method, path, **{"sec-fetch-site": site}).status_code == 403


def test_its_own_page_may_ask(client):
    own = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    assert ask(client, "POST", "/api/models", **own).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("path", ["/", "/api/models", "/nothing"])
def test_no_other_method_is_answered(client, method, path):
    answer = ask(client, method, path, origin=f"http://{HOST}")
    assert answer.status_code == 405 and not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "application/jsonp",
        "application/json; charset=gbk",
    ],
)
def test_what_a_form_can_send_is_refused(client, kind):
    answer = client.post("/api/models", content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415


def test_a_compressed_body_is_refused(client):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert client.post("/api/models", content=b"{}", headers=headers).status_code == 415


PATHS = [
    "//",
    "/static/../style.css",
    "/static/%2e%2e/app.py",
    "/static/..%2fapp.py",
    "/static//style.css",
    "/static/style.css/",
    "/static/js/..;/main.js",
    "/static/style.css%00",
    "/static/.hidden",
    "/static/tsconfig.json",
    "/static/STYLE.css",
    "/static\\style.css",
    "/static/js",
    "/static/",
    "/static",
    "/api/models/",
    "/API/model_store",
    "/api/models;x",
    "/etc/passwd",
    "/static/js/%6dain.js",
    "/./",
    "/index.html",
    "/static/index.html",
    "/api/",
    "/api/../api/models",
    "/login/",
    "/login/x",
]


def raw_get(application, raw: bytes) -> int:
    """A raw request path, which a client would normalize before sending it."""
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": unquote(raw.decode()),
        "raw_path": raw,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", HOST.encode())],
        "state": {},
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    run(application(scope, receive, send))
    return sent[0]["status"]


@pytest.mark.parametrize("path", PATHS)
def test_only_exact_names_are_served(application, path):
    assert raw_get(application, path.encode()) in (404, 405)


def test_exact_names_are(application):
    assert {raw_get(application, path) for path in (b"/", b"/static/style.css", b"/static/js/views/start.js")} == {200}


def every_route(application):
    return [
        (next(iter(route.methods - {"HEAD"})), route.path) for route in application.routes if isinstance(route, Route)
    ]


def test_every_route_refuses_by_default(model_store):
    """Over all routes of the app, so that new ones are tested too. Without the token only /healthz responds."""
    guarded = create_app(model_store, AccessPolicy("192.0.2.7", 8017, token="t" * 32))
    client = TestClient(guarded, base_url="http://192.0.2.7:8017", raise_server_exceptions=False)
    routes = every_route(guarded)
    assert len(routes) > 30
    open_ = [path for method, path in routes if ask(client, method, path).status_code != 401]
    assert open_ == ["/healthz"]
    for method, path in routes:
        assert ask(client, method, path, host="evil.example").status_code == 403
        assert ask(client, method, path, origin="http://evil.example").status_code == 403
        assert path == "/healthz" or ask(client, method, path, authorization="Bearer " + "u" * 32).status_code == 401
        assert ask(client, method, path, authorization="Bearer " + "t" * 32).status_code != 401


def test_a_route_that_forgot_would_be_seen(model_store):
    """The planted fault: the router without the middleware responds to everybody."""
    guarded = create_app(model_store, AccessPolicy("192.0.2.7", 8017, token="t" * 32))
    client = TestClient(guarded.middleware_stack or guarded, base_url="http://192.0.2.7:8017")
    inner = TestClient(guarded.router, base_url="http://192.0.2.7:8017")
    assert (
        ask(client, "POST", "/api/models").status_code == 401 and ask(inner, "POST", "/api/models").status_code == 200
    )


def test_a_one_time_link_brings_the_token_once(model_store):
    printed: list[str] = []
    guard = AccessPolicy("192.0.2.7", 8017, token="t" * 32, on_login_url=printed.append)
    client = TestClient(create_app(model_store, guard), base_url="http://192.0.2.7:8017", raise_server_exceptions=False)
    link = guard.login_url().removeprefix("http://192.0.2.7:8017")
    assert ask(client, "GET", "/").status_code == 401
    answer = ask(client, "GET", link)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert ask(client, "GET", "/").status_code == 200, "the cookie is carried along"
    client.cookies.clear()
    assert ask(client, "GET", link).status_code == 401, "the link is spent"
    assert printed == [guard.login_url()] and printed[0] != f"http://192.0.2.7:8017{link}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "my-laptop", "::ffff:127.0.0.1", "", "8.8.8.8"])
def test_others_can_reach_it_only_with_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(BadSetting, match="it requires a token, got none; add --token"):
        AccessPolicy(host, 8017)
    AccessPolicy(host, 8017, token="t")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host):
    AccessPolicy(host, 8017)


def test_a_wildcard_answers_to_addresses_and_to_no_name():
    guard = AccessPolicy("0.0.0.0", 8017, token="t")
    assert (
        guard.allows_host("192.0.2.7:8017")
        and guard.allows_host("[fe80::1]:8017")
        and guard.allows_host("localhost:8017")
    )
    assert (
        not guard.allows_host("evil.example:8017")
        and not guard.allows_host("192.0.2.7:80")
        and not guard.allows_host("192.0.2.7")
    )


@pytest.mark.parametrize(("method", "path"), [*CASES, ("GET", "/nothing"), ("PUT", "/"), ("POST", "/api/next_token")])
@pytest.mark.parametrize("host", [HOST, "evil.example"])
def test_every_answer_carries_the_headers(client, method, path, host):
    answer = ask(client, method, path, host=host)
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "server" not in answer.headers


def test_the_full_attention_matrix(client):
    """Host × origin × site × method, 200 cases: a request with any wrong value is rejected."""
    hosts, origins, sites = (
        [HOST, *STRANGE_HOSTS[:4]],
        [f"http://{HOST}", *STRANGE_ORIGINS[:4]],
        ["same-origin", *SITES],
    )
    for host, origin, site in itertools.product(hosts, origins, sites):
        good = (host, origin, site) == (HOST, f"http://{HOST}", "same-origin")
        headers = {"host": host, "origin": origin, "sec-fetch-site": site}
        for method, path in (("GET", "/"), ("POST", "/api/models")):
            assert (ask(client, method, path, **headers).status_code == 200) is good, headers
