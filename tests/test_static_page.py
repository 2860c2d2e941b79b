"""The files of the page at `/`, as any client gets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from api.static_page import PATHS
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api
from tests.service import ROOT

FOLDER = ROOT / "api" / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@pytest.fixture
def api(redis_url: str) -> Iterator[ApiServer]:
    with running_api(Settings(redis_url=redis_url, engine="simulated")) as api:
        yield api


def files() -> list[Path]:
    return sorted(FOLDER.iterdir())


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


def test_each_file_is_served_with_its_type_and_nothing_else_is(client: httpx2.Client) -> None:
    assert {path_of(file) for file in files()} == PATHS
    for file in files():
        answer = client.get(path_of(file))
        assert answer.status_code == 200
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"] == TYPES[file.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        head = client.head(path_of(file))
        assert (head.status_code, head.content) == (200, b"")
    for path in ("/page", "/page/", "/page/index.html", "/page/x.js", "/page/..%2fapp.py", "/page/main.js/x"):
        assert client.get(path).status_code == 404, path
    assert client.post("/", json={}).status_code == 405


def test_a_file_that_is_known_is_not_sent_again(client: httpx2.Client) -> None:
    first = client.get("/page/main.js")
    for known in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = client.get("/page/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["cache-control"] == "no-cache"
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_policy_lets_nothing_in_but_this_server_s_own_files(client: httpx2.Client) -> None:
    policy = dict(part.strip().split(" ", 1) for part in client.get("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src"):
        assert policy[kind] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert not any(word in value for value in policy.values() for word in ("unsafe", "http", "*"))


def test_no_file_names_another_host_or_has_a_script_or_style_within() -> None:
    for file in files():
        text = file.read_text()
        others = set(re.findall(r"""(?:https?:)?//[\w-]+\.[\w.-]+""", text)) - {"http://www.w3.org"}
        assert others == set(), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:", html)


def test_the_page_asks_by_relative_addresses_alone() -> None:
    html = (FOLDER / "index.html").read_text()
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)["']""", html)
    assert len(addresses) > 3
    assert [address for address in addresses if address.startswith(("/", "http"))] == []


def test_under_a_proxy_s_prefix_the_page_is_there(redis_url: str) -> None:
    with (
        running_api(Settings(redis_url=redis_url, engine="simulated", root_path="/car")) as api,
        api.client() as client,
    ):
        assert client.get("/car/").content == (FOLDER / "index.html").read_bytes()
        assert client.get("/car/page/main.js").status_code == 200


def test_the_page_is_no_part_of_the_description(client: httpx2.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert PATHS.isdisjoint(paths)
    assert "/service" in paths


def test_the_page_is_there_while_redis_is_not() -> None:
    with running_api(Settings(redis_url="redis://127.0.0.1:1/0", engine="simulated")) as api, api.client() as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/main.js").status_code == 200
