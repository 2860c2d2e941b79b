"""`carpool bench` against real servers: our own, others whose streams are legal and odd, and such that fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from ops.bench.serving.command import run_bench
from ops.bench.serving.plan import Endpoint, Plan, Slo, Span
from ops.bench.serving.target import Target
from ops.bench.serving.workload import Prompt
from ops.errors import ExitCode, OperationError
from tests.api_process import ApiProcess
from tests.foreign_server import TOKENS, ForeignServer, foreign_server, raw_server
from tests.instance import CARPOOL, Instance, carpool, plain_environment, until
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer
from tests.service import Service

CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))
STEP_MS = 20
SLOTS = 4


@pytest.fixture(scope="module")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A whole service in processes of its own: four slots, 20 ms a step."""
    folder = tmp_path_factory.mktemp("bench")
    with (
        RedisServer(folder / "redis") as server,
        Service(server.url, folder, simulated_step_ms=STEP_MS, max_batch_size=SLOTS) as service,
    ):
        service.worker()
        with ApiProcess(service.settings, folder) as api:
            yield api.url


@pytest.fixture(scope="module")
def foreign() -> Iterator[ForeignServer]:
    with foreign_server() as server:
        yield server


@pytest.fixture(scope="module")
def raw_url() -> Iterator[str]:
    with raw_server() as url:
        yield url


@dataclass
class Found:
    """What a run left."""

    code: ExitCode | None
    error: str
    report: dict[str, Any]
    shown: str
    plot: str

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self.report["sides"][0]["figures"]
        return figures


def bench(
    folder: Path, *urls: str, endpoint: Endpoint = "completions", prompts: tuple[Prompt, ...] = (), **plan: Any
) -> Found:
    """Measure in this process, as the command does."""
    given = {"requests": 3, "clients": 1, "warmups": 0, "timeout_s": 20.0, "prompt_tokens": Span(4, 8), **plan}
    shown: list[str] = []
    json_file, plot = folder / "bench.json", folder / "bench.svg"
    targets = [Target(url, endpoint) for url in urls]
    code, error = None, ""
    try:
        code = run_bench(Plan(**given), targets, prompts, "of a few words", json_file, plot, shown.append)
    except OperationError as caught:
        error = str(caught)
    report = json.loads(json_file.read_text()) if json_file.exists() else {}
    return Found(code, error, report, "\n".join(shown), plot.read_text() if plot.exists() else "")


def riding(url: str) -> int:
    """Jobs of the service that ride now."""
    jobs = httpx2.get(f"{url}/jobs", trust_env=False).json()["data"]
    return sum(job["status"] == "running" for job in jobs)


# --- our own service --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["jobs", "completions", "chat"])
def test_the_gaps_of_the_simulated_engine_are_its_step(endpoint: Endpoint, service_url: str, tmp_path: Path) -> None:
    found = bench(
        tmp_path,
        service_url,
        endpoint=endpoint,
        clients=SLOTS,
        requests=8,
        warmups=4,
        max_tokens=Span(40, 40),
        slo=Slo.parse("ttft=10s,e2e=30s"),
    )
    figures = found.figures
    assert found.code == ExitCode.OK
    assert (figures["requests"], figures["succeeded"], figures["tokens"]) == (8, 8, 8 * 40)
    assert figures["latencies_s"]["itl"]["count"] == 8 * 39
    assert 0.9 <= figures["latencies_s"]["itl"]["p50"] / (STEP_MS / 1000) <= 1.5
    assert 0.9 <= figures["latencies_s"]["tpot"]["p50"] / (STEP_MS / 1000) <= 2
    assert figures["latencies_s"]["e2e"]["min"] >= 0.9 * 40 * STEP_MS / 1000
    assert figures["latencies_s"]["queue"]["count"] == 8
    assert figures["good_requests_per_s"] == figures["requests_per_s"]
    assert figures["counted"] == 0
    assert figures["prompt_tokens"] >= 8 * 4
    # four slots give no more than four tokens a step
    assert figures["tokens_per_s"] <= 1.05 * SLOTS * 1000 / STEP_MS
    assert "first token (TTFT)" in found.shown
    assert found.plot.startswith("<svg")


def test_what_waits_for_a_slot_is_told_as_queued(service_url: str, tmp_path: Path) -> None:
    found = bench(
        tmp_path, service_url, endpoint="jobs", clients=3 * SLOTS, requests=3 * SLOTS, max_tokens=Span(20, 20)
    )
    latencies = found.figures["latencies_s"]
    ride_s = 20 * STEP_MS / 1000
    assert latencies["queue"]["max"] >= 1.8 * ride_s, "the last four wait for two rides"
    assert latencies["ttft"]["max"] >= latencies["queue"]["max"] - 0.05


def test_requests_that_come_at_a_rate_do_not_wait_for_answers(service_url: str, tmp_path: Path) -> None:
    found = bench(tmp_path, service_url, clients=100, rate=40.0, requests=20, max_tokens=Span(30, 30))
    (round,) = found.report["sides"][0]["rounds"]
    starts = [request["started_s"] for request in round["requests"]]
    assert found.figures["succeeded"] == 20
    assert starts == sorted(starts)
    one_after_another_s = sum(request["e2e_s"] for request in round["requests"])
    assert starts[-1] < one_after_another_s / 3
    for request in round["requests"]:
        assert request["started_s"] >= request["planned_s"]


def test_a_rate_above_what_may_be_under_way_is_seen_from_the_planned_time(service_url: str, tmp_path: Path) -> None:
    found = bench(tmp_path, service_url, clients=1, rate=100.0, requests=6, max_tokens=Span(10, 10))
    latencies = found.figures["latencies_s"]
    assert latencies["e2e_planned"]["max"] >= latencies["e2e"]["max"] + 3 * 10 * STEP_MS / 1000
    assert latencies["late"]["max"] >= 3 * 10 * STEP_MS / 1000
    assert "behind their time" in found.shown


def test_a_run_ends_at_its_duration(service_url: str, tmp_path: Path) -> None:
    found = bench(
        tmp_path, service_url, endpoint="jobs", clients=2, requests=10_000, duration_s=1.5, max_tokens=Span(5, 5)
    )
    assert 2 <= found.figures["requests"] < 100
    starts = [request["started_s"] for request in found.report["sides"][0]["rounds"][0]["requests"]]
    assert max(starts) < 1.5
    late = bench(tmp_path, service_url, clients=1, rate=100.0, requests=100, duration_s=1.0, max_tokens=Span(10, 10))
    assert late.figures["errors"]["not_sent"] >= 50
    assert late.figures["seconds"] < 5


def test_two_sides_are_asked_the_same_in_turn(service_url: str, tmp_path: Path) -> None:
    found = bench(
        tmp_path,
        service_url,
        f"{service_url}/v1",
        clients=SLOTS,
        requests=8,
        rounds=2,
        max_tokens=Span(10, 20),
        warmups=1,
    )
    one, other = found.report["sides"]
    assert one["name"] != other["name"]
    assert [len(round["requests"]) for round in one["rounds"]] == [4, 4]

    def asked(side: dict[str, Any]) -> list[tuple[int, int, int]]:
        requests = [request for round in side["rounds"] for request in round["requests"]]
        return sorted((each["number"], each["tokens"], each["prompt_tokens"]) for each in requests)

    assert asked(one) == asked(other)
    assert 0.5 <= found.report["ratios"]["itl_p50"] <= 2
    assert "RATIO" in found.shown


def test_messages_of_a_data_set_are_jobs_too(service_url: str, tmp_path: Path) -> None:
    prompts = (Prompt([{"role": "user", "content": "Hi"}], 3), Prompt("Hello", 4))
    found = bench(tmp_path, service_url, endpoint="jobs", requests=4, prompts=prompts)
    assert found.figures["tokens"] == 2 * (3 + 4)


def test_a_job_whose_stream_is_cut_is_followed_to_its_end(service_url: str, tmp_path: Path) -> None:
    with RedisProxy(int(urlsplit(service_url).port or 0)) as proxy:
        url = proxy.url.replace("redis://", "http://").removesuffix("/0")
        arguments = ["--requests", "4", "--ignore", "0", "--max-tokens", "100", "--json", str(tmp_path / "a.json")]
        process = subprocess.Popen(
            [CARPOOL, "bench", "--url", url, *arguments],
            env=plain_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        until(lambda: riding(service_url) == SLOTS, "all four ride")
        proxy.cut()
        proxy.mend()
        assert process.wait(40) == ExitCode.OK
        assert process.stderr is not None
        process.stderr.close()
    figures = json.loads((tmp_path / "a.json").read_text())["sides"][0]["figures"]
    assert (figures["succeeded"], figures["tokens"]) == (4, 400)
    assert figures["resumes"] >= 4
    assert figures["latencies_s"]["itl"]["count"] == 4 * 99


def test_what_the_queue_refuses_is_no_failure(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis") as server,
        Service(server.url, tmp_path, max_queued_jobs=1, max_batch_size=1, simulated_step_ms=STEP_MS) as service,
    ):
        service.worker()
        with ApiProcess(service.settings, tmp_path) as api:
            found = bench(tmp_path, api.url, clients=50, rate=100.0, requests=10, max_tokens=Span(30, 30))
    assert found.figures["refusals"]["http_503"] >= 5
    assert found.figures["errors"] == {}
    assert "refused http_503: queue_full" in found.shown


def test_a_service_with_keys_says_which_variable_it_wants(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server, Service(server.url, tmp_path) as service:
        service.worker()
        made = carpool("keys", "create", "--name", "web", "--redis-url", server.url)
        key = next(word for word in made.stdout.split() if word.startswith("cp"))
        with ApiProcess(service.settings, tmp_path) as api:
            found = bench(tmp_path, api.url, endpoint="jobs")
            assert "CARPOOL_API_KEY" in found.error
            done = carpool("bench", "--url", api.url, "--requests", "2", settings={"CARPOOL_API_KEY": key})
            assert done.returncode == ExitCode.OK, done.stderr
            assert key not in done.stdout + done.stderr


def test_the_instance_of_the_data_dir_is_measured_where_no_url_is_given(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        instance.ready()
        done = instance.run("bench", "--requests", "2", "--max-tokens", "5", "--ignore", "0")
        assert done.returncode == ExitCode.OK, done.stderr
        assert f"{instance.api_url()}, jobs: 2 of 2 requests answered" in done.stdout


def test_ctrl_c_shows_what_was_measured_and_frees_the_slots(service_url: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [CARPOOL, "bench", "--url", service_url, "--max-tokens", "200", "--json", str(tmp_path / "a.json")],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "measuring" not in process.stderr.readline():  # said at the end of the first request
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Stopped by Ctrl-C" in shown
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["was_stopped"]
    assert 1 <= report["sides"][0]["figures"]["succeeded"] < 100
    assert report["sides"][0]["figures"]["errors"] == {}
    requests = report["sides"][0]["rounds"][0]["requests"]
    given_up = {request["job_id"] for request in requests if request["error"] == "unfinished"} - {None}
    assert given_up
    for id in given_up:
        job = httpx2.get(f"{service_url}/jobs/{id}", params={"wait": 10}, trust_env=False).json()
        assert job["status"] == "cancelled" or job["usage"]["completion_tokens"] == 200, (
            "it may have been done just then"
        )


# --- other servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tokens", "events"),
    [("crlf", TOKENS, TOKENS), ("several", TOKENS, TOKENS // 3), ("multiline", None, TOKENS)],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_odd_but_legal_streams_are_understood(
    kind: str, tokens: int | None, events: int, endpoint: Endpoint, foreign: ForeignServer, tmp_path: Path
) -> None:
    found = bench(tmp_path, f"{foreign.url}/{kind}/v1", endpoint=endpoint)
    figures = found.figures
    assert (found.code, figures["succeeded"], figures["errors"]) == (ExitCode.OK, 3, {})
    assert figures["tokens"] == 3 * (tokens or events)
    assert figures["counted"] == (0 if tokens else 3)
    assert figures["latencies_s"]["itl"]["count"] == 3 * (events - 1)
    assert figures["latencies_s"]["itl"]["p50"] >= 0.005, "the server sends an event every 10 ms"
    assert found.report["sides"][0]["model"] == "their-model"
    assert "queue" not in figures["latencies_s"]


def test_bytes_and_bursts_are_stamped_as_they_come(foreign: ForeignServer, tmp_path: Path) -> None:
    found = bench(tmp_path, f"{foreign.url}/torn", requests=1)
    assert found.figures["tokens"] == TOKENS
    assert found.figures["latencies_s"]["itl"]["max"] == 0, "all came in the last piece"
    assert found.figures["latencies_s"]["ttft"]["min"] >= 0.4 * 0.9, "the event was not whole before"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("error", "oom"),
        ("nonsense", "bad_event"),
        ("silent", "no_tokens"),
        ("deep", "bad_event"),
        ("infinite", "bad_event"),
        ("rude", " [2Jgone"),
        ("broken", "http_500"),
        ("down", "http_503"),
        ("whole", "no_stream"),
    ],
)
def test_a_server_that_fails_is_counted_by_its_code(
    kind: str, error: str, foreign: ForeignServer, tmp_path: Path
) -> None:
    found = bench(tmp_path, f"{foreign.url}/{kind}")
    assert found.figures["errors"] == {error: 3}
    assert found.figures["refusals"] == {}
    assert "answered no request well" in found.error
    assert f"3 requests, {error}" in found.shown


def test_a_client_that_is_refused_comes_again_when_it_was_asked_to(foreign: ForeignServer, tmp_path: Path) -> None:
    before = time.monotonic()
    found = bench(tmp_path, f"{foreign.url}/busy", requests=3)
    assert found.figures["refusals"] == {"http_429": 3}
    assert time.monotonic() - before >= 2
    assert "slow_down: later" in found.shown


@pytest.mark.parametrize("kind", ["close", "sized", "interim", "stale", "held"])
def test_every_way_to_end_a_body_is_one(kind: str, raw_url: str, tmp_path: Path) -> None:
    found = bench(tmp_path, f"{raw_url}/{kind}")
    assert (found.figures["errors"], found.figures["tokens"]) == ({}, 3 * TOKENS)
    assert found.figures["latencies_s"]["e2e"]["max"] < 5, "nobody waits for a body that has said [DONE]"


@pytest.mark.parametrize(
    ("kind", "error"), [("cut", "cut"), ("hang", "timeout"), ("garbage", "bad_answer"), ("badchunk", "bad_answer")]
)
def test_a_server_that_breaks_off_is_bounded_and_counted(kind: str, error: str, raw_url: str, tmp_path: Path) -> None:
    before = time.monotonic()
    found = bench(tmp_path, f"{raw_url}/{kind}", requests=2, timeout_s=0.5)
    assert found.figures["errors"] == {error: 2}
    assert time.monotonic() - before < 10


def test_a_server_that_hangs_is_bounded_by_the_duration(raw_url: str, tmp_path: Path) -> None:
    found = bench(tmp_path, f"{raw_url}/hang", requests=1000, duration_s=1.0, timeout_s=0.4, warmups=5)
    assert 1 <= found.figures["requests"] <= 4


def test_the_command_asks_another_server_with_its_own_key_and_fields(foreign: ForeignServer, tmp_path: Path) -> None:
    foreign.asked.clear()
    file = tmp_path / "set.txt"
    file.write_text("One\n")
    arguments = [
        "--url",
        f"{foreign.url}/crlf",
        "--against",
        f"{foreign.url}/strict/v1",
        "--no-usage",
        "--requests",
        "2",
    ]
    arguments += ["--prompts", str(file), "--body", '{"ignore_eos": true}', "--model", "mine", "--ignore", "0"]
    keys = {"CARPOOL_API_KEY": "cp-ours", "OPENAI_API_KEY": "sk-theirs"}
    done = carpool("bench", *arguments, "--max-tokens", "5", "--plot", str(tmp_path / "a.svg"), settings=keys)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "RATIO" in done.stdout
    assert {(one.path.split("/")[1], one.authorization, one.body["model"]) for one in foreign.asked} == {
        ("crlf", "Bearer cp-ours", "mine"),
        ("strict", "Bearer sk-theirs", "their-model"),
    }
    for one in foreign.asked:
        assert (one.body["prompt"], one.body["ignore_eos"], one.body["max_tokens"]) == ("One", True, 5)
    seeds = [one.body["seed"] for one in foreign.asked]
    assert sorted(seeds) == sorted(2 * list(set(seeds)))


def test_a_base_with_another_version_is_found_out(foreign: ForeignServer, tmp_path: Path) -> None:
    found = bench(tmp_path, f"{foreign.url}/versionless", endpoint="chat")
    assert found.figures["succeeded"] == 3
    assert foreign.asked[-1].path == "/versionless/chat/completions"


def test_a_server_over_tls_is_asked_where_its_certificate_is_trusted() -> None:
    with foreign_server(CERTIFICATE) as server:
        options = ["bench", "--url", f"{server.url}/crlf", "--endpoint", "chat", "--requests", "3"]
        trusted = carpool(*options, settings={"SSL_CERT_FILE": CERTIFICATE})
        assert trusted.returncode == ExitCode.OK, trusted.stderr
        assert "3 of 3 requests answered" in trusted.stdout
        unknown = carpool(*options)
        assert unknown.returncode == ExitCode.NOT_RUNNING
        assert "certificate verify failed" in unknown.stderr


def test_jobs_are_refused_where_there_are_none(foreign: ForeignServer, tmp_path: Path) -> None:
    assert "--endpoint completions or chat" in bench(tmp_path, f"{foreign.url}/crlf", endpoint="jobs").error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--endpoint", "responses"), "--endpoint responses"),
        (("--endpoint", "jobs", "--against", "http://a"), "--endpoint jobs"),
        (("--plot", "a.png"), "a.png"),
        (("--json", "/no/such/folder/a.json"), "/no/such/folder/a.json"),
        (("--body", "[]"), "--body"),
        (("--rounds", "2"), "--rounds 2"),
        (("--burstiness", "0.5"), "--burstiness 0.5"),
        (("--rate", "0"), "--rate 0"),
        (("--duration", "5"), "--duration '5'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = carpool("bench", "--url", "http://127.0.0.1:1", *arguments)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_document_has_every_option() -> None:
    text = (Path(__file__).parent.parent / "docs/bench.md").read_text()
    shown = carpool("bench", "--help", settings={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE)) - {"--help", "--debug", "--usage"}
    assert len(options) > 15
    for option in options:
        assert f"`{option}" in text or f", `{option}" in text, f"{option} is missing"
