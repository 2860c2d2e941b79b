"""The OpenAPI description: random requests by it are answered as it says, and hostile ones get a clear refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api
from tests.redis_server import RedisServer
from tests.service import Service

load_all_checks()
CONFORMANCE: list[Any] = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
#: Answers above 499 that a request can ask for, and where no other is true: there is no vLLM worker here.
FAIR_ENDS = {"deadline_exceeded", "no_worker"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API whose model ends soon, so that no request takes long."""
    folder = tmp_path_factory.mktemp("described")
    with (
        RedisServer(folder / "redis") as server,
        Service(server.url, folder, simulated_context_length=48, max_batch_size=16, reaper_tick_s=0.05) as service,
    ):
        service.worker()
        with running_api(service.settings.model_copy(update={"max_wait_s": 1, "max_body_bytes": 2**17})) as api:
            yield api


schema = schemathesis.openapi.from_dict(create_app(Settings(engine="simulated")).openapi())


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.timeout(120)
def test_every_answer_is_as_it_is_described(case: schemathesis.Case[Any], api: ApiServer) -> None:
    response = case.call(base_url=api.url, timeout=30)
    if response.status_code >= 500:
        assert response.json()["error"]["code"] in FAIR_ENDS, response.text
    case.validate_response(response, checks=CONFORMANCE)


def test_the_page_of_these_endpoints_names_them_all() -> None:
    page = (Path(__file__).parent.parent / "docs" / "openai.md").read_text()
    for path, operations in create_app(Settings(engine="simulated")).openapi()["paths"].items():
        for method in operations:
            if path.startswith("/v1/"):
                assert f"{method.upper()} {path.replace('{model}', '{id}')}`" in page
