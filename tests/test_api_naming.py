"""Whatever goes wrong once a job was made: the answer names the job, so that nobody makes a second one of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from redis.exceptions import ConnectionError

from api.errors import naming_job, of_redis
from tasks.codes import CarpoolError
from tasks.redis_clients import connect_async
from tasks.settings import Settings
from tests.api_server import running_api
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner

ERROR = {"message": "no", "type": "server_error", "param": None, "code": "engine_error"}


def test_a_group_that_failed_is_answered_as_that_also_where_its_culprit_cannot_be_read(own_redis: RedisServer) -> None:
    """Which prompt it was is a call of its own: Redis may be away for this one."""
    settings = Settings(redis_url=own_redis.url, engine="simulated")
    of_api = settings.model_copy(update={"redis_url": own_redis.url.replace("//", "//api:secret@")})
    with own_redis.client() as redis:
        redis.execute_command("ACL", "SETUSER", "api", "on", ">secret", "~*", "&*", "+@all")
        with (
            running_api(of_api) as api,
            api.client() as client,
            ScriptedOwner(settings) as owner,
            ThreadPoolExecutor(1) as threads,
        ):
            answer = threads.submit(client.post, "/generate", json={"prompts": ["a", "b"]})
            group = owner.next_job().rpartition(".")[0]
            redis.execute_command("ACL", "SETUSER", "api", "-hget")
            owner.run([" x"], f"{group}.0")
            owner.finish(owner.claim(f"{group}.1"), "failed", "error", error=json.dumps(ERROR))
            response: httpx2.Response = answer.result(20)
    assert response.headers["x-carpool-job-id"] == group
    assert (response.status_code, response.json()["error"]) == (500, ERROR)


def test_an_error_of_redis_after_the_acceptance_names_the_job() -> None:
    with pytest.raises(CarpoolError) as caught, naming_job("j"):
        raise ConnectionError("closed")
    assert (caught.value.code.name, caught.value.job_id) == ("redis_unavailable", "j")


async def test_a_server_that_is_busy_does_not_say_that_redis_does_not_answer(own_redis: RedisServer) -> None:
    client = connect_async(Settings(redis_url=own_redis.url, redis_timeout_s=0.05), max_connections=1)
    async with client.client():  # holds the one connection
        with pytest.raises(ConnectionError) as unsent:
            await client.get("x")
    assert of_redis(unsent.value).code.name == "server_busy"
    own_redis.kill()
    with pytest.raises(ConnectionError) as refused:
        await client.get("x")
    assert of_redis(refused.value).code.name == "redis_unavailable"
    await client.aclose()


def test_an_error_that_names_a_job_keeps_it_and_one_that_names_none_gets_it() -> None:
    for own, named in ((None, "j"), ("other", "other")):
        with pytest.raises(CarpoolError) as caught, naming_job("j"):
            raise CarpoolError("job_not_found", "gone", job_id=own)
        assert caught.value.job_id == named
