"""OpenAI's JavaScript client against the API: one program that uses all of it (`tests/openai_client.mjs`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api_server import ApiServer
from tests.missing import give_up
from tests.openai_clients import chat_text
from tests.service import simulated_text

PROGRAM = Path(__file__).parent / "openai_client.mjs"
VERSION = "6.49.0"
#: What npm says where there is no way to its registry; anything else is a fault.
_NO_NETWORK = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|ECONNRESET|ENOTCACHED")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client installed."""
    folder = tmp_path_factory.mktemp("javascript")
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        give_up("node and npm are not installed")
    install = [str(npm), "install", "--no-audit", "--no-fund", "--fetch-retries=1", f"openai@{VERSION}"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry did not answer within 120 s")
    if done.returncode and _NO_NETWORK.search(done.stderr):
        pytest.skip(f"npm's registry cannot be reached: {done.stderr[-200:]}")
    if done.returncode:
        give_up(f"npm could not install the client: {done.stderr[-500:]}")
    shutil.copy(PROGRAM, folder)
    return folder


@pytest.mark.timeout(200)
def test_a_program_with_the_javascript_client_changes_only_its_base_url(simulated_api: ApiServer, folder: Path) -> None:
    done = subprocess.run(
        ["node", PROGRAM.name, f"{simulated_api.url}/v1"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    text = chat_text([("user", "Hello")], 3, 5)
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert set(seen["models"]) == {"simulated", "gpt-4o-mini"}
    assert seen["completion"]["text"] == simulated_text("Hello, I am", 3, 5)
    assert seen["completion"]["usage"] == usage
    assert seen["chat"] == {"text": text, "job": True}
    assert len(set(seen["stream"].pop("ids"))) == 1
    assert seen["stream"] == {"text": text, "roles": ["assistant"], "reasons": ["length"], "usage": usage}
    types = seen["response"]["types"]
    assert (types[0], types[-1]) == ("response.created", "response.incomplete")
    assert types.count("response.output_text.delta") == 5
    assert seen["response"]["numbers"] == list(range(len(types)))
    assert seen["response"]["status"] == "incomplete"
    assert len(seen["response"]["text"].split()) == 5
    assert seen["errors"] == {
        "field": {"kind": "BadRequestError", "status": 400, "code": "unsupported_field", "param": "suffix"},
        "model": {"kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"},
        "stream": {"kind": "APIError", "code": "engine_error", "param": None},
    }
    assert seen["idempotent"]
    with httpx2.Client(base_url=simulated_api.url, trust_env=False) as http:
        assert http.get(f"/jobs/{seen['completion']['id']}").json()["text"] == seen["completion"]["text"]
