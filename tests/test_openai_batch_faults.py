"""Batches through kills: whoever dies, every line is answered, and each answer is written once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
from openai.types import Batch

from tasks import keys
from tests.api_process import ApiProcess
from tests.batch_lines import answers_of, by_custom_id, chat_line, submit
from tests.openai_clients import chat_text
from tests.redis_server import RedisServer
from tests.service import Service, eventually

BOUND_S = 90.0
pytestmark = pytest.mark.timeout(180)
SHORT: dict[str, Any] = {
    "lease_s": 2,
    "renew_s": 0.5,
    "grace_s": 1,
    "reaper_tick_s": 0.2,
    "heartbeat_s": 0.3,
    "redis_timeout_s": 1,
}


def client_of(api: ApiProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=5, timeout=20)


def until_completed(client: openai.OpenAI, id: str, at_least: int) -> Batch:
    """The batch, once so many of its lines are answered."""

    def look() -> Batch | None:
        batch = client.batches.retrieve(id)
        return batch if batch.request_counts and batch.request_counts.completed >= at_least else None

    found = eventually(f"{at_least} lines of {id} are answered", look, BOUND_S)
    assert isinstance(found, Batch)
    return found


def assert_whole(client: openai.OpenAI, id: str, num_lines: int) -> None:
    """Every line has the right answer, once."""
    until_completed(client, id, num_lines)
    batch = eventually(f"{id} ends", lambda: _done(client, id))
    assert batch.request_counts.model_dump() == {"total": num_lines, "completed": num_lines, "failed": 0}
    found = by_custom_id(answers_of(client, batch.output_file_id))
    assert len(found) == num_lines
    for i in range(num_lines):
        body = found[f"line-{i}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == chat_text([("user", f"Say {i}")], i, 3)


def _done(client: openai.OpenAI, id: str) -> Batch | None:
    batch = client.batches.retrieve(id)
    return batch if batch.status == "completed" else None


@pytest.mark.parametrize("victim", ["api", "worker", "redis"])
def test_a_batch_goes_on_whoever_is_killed(tmp_path: Path, victim: str) -> None:
    num_lines = 150
    with (
        RedisServer(tmp_path / "redis", appendfsync="always") as server,
        Service(server.url, tmp_path, batch_window=20, **SHORT) as service,
    ):
        worker = service.worker()
        with ApiProcess(service.settings, tmp_path) as api, client_of(api) as client:
            batch = submit(client, [chat_line(i) for i in range(num_lines)])
            until_completed(client, batch.id, 20)
            if victim == "worker":
                worker.end()
                service.worker("worker-2")
            elif victim == "redis":
                server.kill()
                server.start()
            if victim != "api":
                assert_whole(client, batch.id, num_lines)
                return
            api.kill()
        with ApiProcess(service.settings, tmp_path) as second, client_of(second) as client:
            assert client.batches.retrieve(batch.id).status == "in_progress"
            assert_whole(client, batch.id, num_lines)
        assert service.keys_without_ttl() == set()


def test_servers_that_take_a_batch_from_each_other_write_each_answer_once(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    over = threading.Event()

    def steal_locks() -> None:
        with redis.Redis.from_url(redis_url) as client:
            while not over.wait(0.02):
                client.delete(keys.batch_lock(batch.id))

    with Service(redis_url, tmp_path, batch_window=20, **SHORT) as service:
        service.worker()
        with (
            ApiProcess(service.settings, tmp_path) as first,
            ApiProcess(service.settings, tmp_path),
            ApiProcess(service.settings, tmp_path),
            client_of(first) as client,
        ):
            batch = submit(client, [chat_line(i) for i in range(80)])
            thief = threading.Thread(target=steal_locks)
            thief.start()
            try:
                assert_whole(client, batch.id, 80)
            finally:
                over.set()
                thief.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_lines_of_twenty_megabytes_are_not_held_in_memory(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    num_lines, padding = 10_000, "x" * 1900
    lines = [chat_line(i, max_tokens=1, metadata={"a": padding[:1], "b": padding}) for i in range(num_lines)]
    assert sum(map(len, lines)) > 20 * 10**6
    with Service(redis_url, tmp_path) as service:
        service.worker()
        with ApiProcess(service.settings, tmp_path) as api, client_of(api) as client:
            warm = submit(client, [chat_line(0)])
            eventually("it ends", lambda: _done(client, warm.id))
            before = most = api.rss()
            batch = submit(client, lines)

            def done() -> Batch | None:
                nonlocal most
                most = max(most, api.rss())
                return _done(client, batch.id)

            found = eventually("it ends", done, 500)
            counts = found.request_counts.model_dump()
            assert counts == {"total": num_lines, "completed": num_lines, "failed": 0}
            assert len(by_custom_id(answers_of(client, found.output_file_id))) == num_lines
            assert most - before < 20 * 2**20, f"{(most - before) / 2**20:.1f} MiB"
