"""A job's life, from the ledger's own notes to what `carpool jobs show` prints: with real processes that are killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import redis

from ops.timeline import timeline
from tasks.life import parse_life, until_claim
from tasks.settings import Settings
from tests.api_keys import make_key
from tests.api_server import ApiServer, running_api
from tests.instance import carpool
from tests.ledger_harness import LedgerOnAClock, write
from tests.receiver import Receiver
from tests.scripted_owner import ScriptedOwner
from tests.service import Service, eventually, simulated_text
from tests.webhooks_process import WebhooksProcess, webhook_settings

pytestmark = pytest.mark.timeout(120)
SHORT: dict[str, Any] = {"lease_s": 1, "renew_s": 0.3, "grace_s": 0.5, "reaper_tick_s": 0.2, "heartbeat_s": 0.3}


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=20, **SHORT) as service:
        yield service


@pytest.fixture
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def told(api: ApiServer, id: str, **headers: str) -> dict[str, Any]:
    """A job's object with its events, which are in order."""
    with api.client(headers=headers) as client:
        answer = client.get(f"/jobs/{id}", params={"include": "events"})
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    times = [event["at"] for event in job["events"]]
    assert times == sorted(times)
    return job


def names(job: dict[str, Any]) -> list[str]:
    return [event["event"] for event in job["events"]]


def of_kind(job: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in job["events"] if event["event"] == name]


# --- the ledger's notes ----------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def life(ledger: LedgerOnAClock, id: str = "j") -> list[tuple[str, int, int]]:
    """What is noted of a job: event, seconds since it was accepted, tokens."""
    created = int(ledger.field(id, "created_at"))
    events = parse_life(ledger.field(id, "life") + ledger.field(id, "first"))
    return [(event.event, (event.at_ms - created) // 1000, event.tokens) for event in events]


def test_each_ride_notes_its_claim_and_its_first_token_and_how_it_was_lost(ledger: LedgerOnAClock) -> None:
    ledger.accept()
    ledger.advance(10)
    rider = ledger.claim(worker="worker 1")
    ledger.board(rider)
    ledger.step(write(rider, 1, 3))
    ledger.step(write(rider, 4, 2))
    ledger.let_lease_run_out(rider)
    second = ledger.claim(worker="w2")
    ledger.board(second)
    ledger.step(write(second, 6))
    lease_s = round(ledger.settings.lease_s)
    assert life(ledger) == [
        ("claimed", 10, 0),
        ("first_token", 10, 3),
        ("lost", 10 + lease_s, 5),
        ("claimed", 10 + lease_s, 5),
        ("first_token", 10 + lease_s, 6),
    ]
    claims = [event for event in parse_life(ledger.field("j", "life")) if event.event == "claimed"]
    assert [(event.worker, event.epoch) for event in claims] == [("worker 1", 1), ("w2", 2)]
    assert claims[0].waited_ms // 1000 == 10
    assert claims[1].waited_ms < 1000, "it waits from the end of the lease on"


def test_a_claim_that_is_sent_again_is_noted_once_and_tells_the_same_life(ledger: LedgerOnAClock) -> None:
    ledger.accept()
    first, nonce = ledger.try_claim()
    again, _ = ledger.try_claim(nonce=nonce)
    assert first.life == again.life == ledger.field("j", "life")
    assert [name for name, _, _ in life(ledger)] == ["claimed"]


def test_what_happens_before_a_claim_is_sent_again_stands_behind_it(ledger: LedgerOnAClock) -> None:
    ledger.accept()
    _, nonce = ledger.try_claim()
    ledger.run(ledger.calls.cancel("j"))
    again, _ = ledger.try_claim(nonce=nonce)
    assert [event.event for event in parse_life(again.life)] == ["claimed", "cancel_asked"]
    assert [event.event for event in until_claim(again.life, again.epoch)] == ["claimed"]
    with pytest.raises(ValueError, match="no claim of epoch 7"):
        until_claim(again.life, 7)


def test_a_hand_back_is_noted_and_the_wait_counts_from_there(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride(tokens=2)
    ledger.run(ledger.calls.release(rider))
    ledger.advance(5)
    claim, _ = ledger.try_claim()
    assert [name for name, _, _ in life(ledger)] == ["claimed", "first_token", "handed_back", "claimed"]
    assert parse_life(claim.life)[-1].waited_ms // 1000 == 5


def test_a_long_life_is_bounded_and_keeps_its_first_event_and_its_last(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride(worker="w-first")
    for n in range(100):
        ledger.run(ledger.calls.release(rider))
        rider = ledger.claim(worker=f"w{n} " + "ü" * 120)
    found = parse_life(ledger.field("j", "life"))
    assert len(ledger.field("j", "life").encode()) < 2600
    assert (found[0].worker, found[1].event) == ("w-first", "omitted")
    assert [event.event for event in found].count("omitted") == 1
    assert found[-1].worker.startswith("w99 üü")
    assert found[-1].epoch == rider.epoch == 101


def test_a_note_is_one_line_whatever_a_worker_is_called(ledger: LedgerOnAClock) -> None:
    ledger.accept()
    ledger.claim(worker="w\n1 died 0 by itself")
    assert [name for name, _, _ in life(ledger)] == ["claimed"]


def test_an_event_of_a_newer_release_is_passed_over() -> None:
    assert [event.event for event in parse_life("5 warmed 0 \n7 handed_back 3 \n\n")] == ["handed_back"]


# --- with processes --------------------------------------------------------------------------------------------------


def test_a_job_that_was_killed_twice_shows_both_deaths_and_where_it_went_on(service: Service, api: ApiServer) -> None:
    first = service.worker("worker-1")
    job = service.submit(max_tokens=300)
    service.wait_for_token(job, 5)
    (info,) = service.list_workers()
    assert info.child_pid is not None
    psutil.Process(info.child_pid).kill()
    eventually("it rides again", lambda: "model_process_died" in names(told(api, job)))
    at = told(api, job)["usage"]["completion_tokens"]
    service.wait_for_token(job, at + 5)
    first.signal(signal.SIGKILL)
    first.wait()
    service.worker("worker-2", simulated_step_ms=0)
    assert service.wait_for_end(job)["text"] == simulated_text("Hello, I am", 7, 300)

    found = told(api, job)
    assert names(found) == [
        "accepted",
        "invited",
        "claimed",
        "first_token",
        "model_process_died",
        "first_token",
        "worker_lost",
        "invited",
        "claimed",
        "first_token",
        "ended",
    ]
    one, two = of_kind(found, "claimed")
    assert (one["worker"], one["ride"], one["tokens"]) == ("worker-1", 1, 0)
    assert (two["worker"], two["ride"]) == ("worker-2", 2)
    assert two["tokens"] == of_kind(found, "worker_lost")[0]["tokens"] > at
    (death,) = of_kind(found, "model_process_died")
    assert death["cause"] == "signal 9 (SIGKILL) while decoding"
    assert of_kind(found, "worker_lost")[0]["worker"] == "worker-1"
    (end,) = of_kind(found, "ended")
    assert (end["status"], end["finish_reason"], end["tokens"]) == ("succeeded", "length", 300)
    assert end["tokens_per_s"] > 50
    assert found["expires_at"] - found["finished_at"] == pytest.approx(service.settings.retention_s, abs=5)

    text = timeline(found)
    assert "claimed by worker-1 (ride 1) after 0." in text
    assert "the model process died under it: signal 9 (SIGKILL) while decoding; " in text
    assert f"claimed by worker-2 (ride 2) after {two['waited_s']:.3f} s of waiting, at {two['tokens']} tokens" in text
    assert "worker-1 was lost: it died or lost touch; " in text
    assert "succeeded (length), 300 tokens, " in text


def test_a_poison_job_shows_each_death_and_its_end(service: Service, api: ApiServer) -> None:
    service.worker()
    job = service.submit("[[exit 3]]@1 now", max_tokens=5)
    service.wait_for_end(job)
    found = told(api, job)
    assert names(found)[:3] == ["accepted", "invited", "claimed"]
    deaths = of_kind(found, "model_process_died")
    assert [death["cause"] for death in deaths] == ["exit code 3 while decoding"] * 3
    assert names(found)[-1] == "ended"
    end = of_kind(found, "ended")[0]
    assert (end["status"], end["finish_reason"], end["tokens_per_s"]) == ("failed", "error", None)
    assert "error    worker_died: the process that ran this job died 3 times" in timeline(found)


def test_a_cancelled_job_shows_who_was_asked_and_when_it_ended(service: Service, api: ApiServer) -> None:
    owner = ScriptedOwner(service.settings)
    owner.heartbeat()
    job = service.submit(max_tokens=50)
    ride = owner.write(owner.claim(job), "a")
    assert service.cancel(job) == "requested"
    assert service.cancel(job) == "requested"
    assert timeline(told(api, job)).splitlines()[1] == "status   running, a cancel was asked for"
    owner.finish(ride, "cancelled", "cancelled")
    found = told(api, job)
    assert names(found)[-3:] == ["first_token", "cancel_requested", "ended"]
    assert of_kind(found, "ended")[0]["status"] == "cancelled"


def test_a_waiting_job_shows_its_place_and_a_lost_one_that_it_is_lost(service: Service, api: ApiServer) -> None:
    job = service.submit()
    found = told(api, job)
    assert names(found) == ["accepted"]
    assert timeline(found).splitlines()[1] == "status   queued at position 1"
    owner = ScriptedOwner(service.settings)
    owner.claim(job)
    eventually("its lease runs out", lambda: names(told(api, job))[-1] == "worker_lost")
    lost = told(api, job)["events"][-1]
    assert lost["worker"] == owner.name
    assert lost["at"] > told(api, job)["started_at"]


def test_a_group_shows_the_events_of_its_children(service: Service, api: ApiServer) -> None:
    service.worker(simulated_step_ms=0)
    with api.client() as client:
        answer = client.post("/generate", json={"prompts": ["a", "b"], "max_tokens": 3})
    found = told(api, answer.headers["x-carpool-job-id"])
    assert sorted(event["job"] for event in of_kind(found, "ended")) == found["children"]
    assert "[0] claimed by worker-1" in timeline(found)


def test_events_are_there_for_who_asks_and_whose_the_job_is(
    service: Service, redis_client: redis.Redis, api: ApiServer
) -> None:
    mine, other = make_key(redis_client, "nightly import"), make_key(redis_client, "other")
    with api.client() as stranger:
        # what is known of keys may be a second old
        eventually("keys are asked for", lambda: stranger.get("/jobs").status_code == 401)
    with api.client(headers=mine.headers) as client:
        job = client.post("/jobs", json={"prompt": "Hello"}).json()["id"]
        assert "events" not in client.get(f"/jobs/{job}").json()
        assert client.get(f"/jobs/{job}?include=everything").status_code == 422
    accepted = told(api, job, **mine.headers)
    assert accepted["events"][0]["key"] == "nightly import"
    assert "accepted by API key nightly import, priority 5" in timeline(accepted)
    with api.client(headers=other.headers) as client:
        assert client.get(f"/jobs/{job}?include=events").status_code == 404


def test_deliveries_of_a_webhook_stand_in_the_life_of_its_job(redis_url: str, tmp_path: Path) -> None:
    settings = webhook_settings(redis_url)
    with Receiver() as receiver, Service(redis_url, tmp_path) as service, running_api(settings) as api:
        service.worker()
        with api.client() as client, WebhooksProcess(settings, tmp_path):
            job = client.post("/jobs", json={"prompt": "a", "max_tokens": 2, "webhook_url": receiver.url}).json()["id"]
            eventually("it is delivered", lambda: told(api, job)["webhook"]["status"] == "delivered")
        found = told(api, job)
    assert names(found)[-2:] == ["ended", "webhook_attempted"]
    assert of_kind(found, "webhook_attempted")[0]["status_code"] == 200
    assert "webhook: HTTP 200 after " in timeline(found)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_plain_lines_into_a_pipe_and_json_where_asked(service: Service, api: ApiServer) -> None:
    service.worker(simulated_step_ms=0)
    job = service.submit("a secret prompt", max_tokens=4)
    service.wait_for_end(job)
    shown = carpool("jobs", "show", job, "--url", api.url)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "secret" not in shown.stdout
    lines = shown.stdout.splitlines()
    assert lines[0] == f"job      {job}"
    offsets = [float(line.split()[0]) for line in lines if line.lstrip().startswith("+")]
    assert len(offsets) == 5
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    as_json = json.loads(carpool("jobs", "show", job, "--json", "--url", api.url).stdout)
    assert as_json == told(api, job)


def test_a_terminal_gets_colours() -> None:
    event = {"at": 1.5, "event": "ended", "job": "j", "tokens": 2, "status": "failed", "finish_reason": "error"}
    job = {"id": "j", "status": "failed", "model": "m", "created_at": 1.0, "events": [event], "expires_at": None}
    assert "\x1b[31mfailed (error), 2 tokens\x1b[0m" in timeline(job, colors=True)
    assert "+0.500 s  failed (error), 2 tokens" in timeline(job)


def test_a_job_that_is_not_there_is_named(api: ApiServer) -> None:
    assert httpx2.get(f"{api.url}/jobs/nothing?include=events", trust_env=False).status_code == 404
    shown = carpool("jobs", "show", "nothing", "--url", api.url)
    assert "there is no job 'nothing'" in shown.stderr
