"""The arithmetic of `carpool bench`: figures from made-up times, timetables, workloads, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from xml.etree import ElementTree

import pytest

from ops.bench.event_parser import EventParser
from ops.bench.http_body import BadAnswerError, Chunked, Head
from ops.bench.http_wire import Address
from ops.bench.serving.call import Outcome
from ops.bench.serving.figures import figures_of, gaps_s, is_good, tpot_s
from ops.bench.serving.plan import Plan, Slo, Span, parse_duration
from ops.bench.serving.plot import cdf_points, render_svg, throughput, ticks
from ops.bench.serving.report import Measurement, ratios, render, to_json
from ops.bench.serving.runner import Round, Side
from ops.bench.serving.target import Target
from ops.bench.serving.workload import Workload, arrivals, read_prompts
from ops.errors import ExitCode, OperationError


def answered(*arrivals: float, started: float = 0.0, **fields: Any) -> Outcome:
    """A request that was answered whole; its last event with tokens is its end."""
    given = {"scheduled": started, "ended": arrivals[-1], "tokens": len(arrivals), "error": "", **fields}
    return Outcome(0, started=started, arrivals=array("d", arrivals), **given)


def failed(error: str, **fields: Any) -> Outcome:
    return Outcome(0, 0.0, 0.0, 1.0, error=error, **fields)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_latencies_are_taken_from_the_events_with_tokens() -> None:
    one = answered(10.5, 10.6, 10.8, started=10.0, ended=10.9)
    figures = figures_of([one], 2.0, Slo(), is_open_loop=False)
    assert gaps_s(one) == pytest.approx([0.1, 0.2])
    assert figures.latencies["ttft"].mean == pytest.approx(0.5)
    assert figures.latencies["e2e"].mean == pytest.approx(0.9)
    assert figures.latencies["tpot"].mean == pytest.approx(0.15)
    assert figures.latencies["itl"].most == pytest.approx(0.2)
    assert "ttft_planned" not in figures.latencies


def test_events_of_several_tokens_have_fewer_gaps_and_the_same_time_per_token() -> None:
    by_one = answered(*(1 + 0.1 * number for number in range(9)))
    by_four = answered(1.0, 1.4, 1.8, tokens=9)
    assert tpot_s(by_four) == pytest.approx(tpot_s(by_one))
    assert gaps_s(by_four) == pytest.approx([0.4, 0.4])
    assert figures_of([by_four], 1.0, Slo(), is_open_loop=False).tokens_per_event == pytest.approx(3)


def test_one_token_has_no_time_per_token() -> None:
    assert tpot_s(answered(1.0)) is None
    assert tpot_s(answered(1.0, tokens=5)) is None
    assert "tpot" not in figures_of([answered(1.0)], 1.0, Slo(), is_open_loop=False).latencies


def test_goodput_counts_what_holds_every_bound_by_second() -> None:
    quick = answered(0.1, 0.15, 0.2)
    late_start = answered(0.3, 0.35, 0.4)
    stutters = answered(0.1, 0.15, 0.4)
    outcomes = [quick, quick, late_start, stutters, failed("http_500"), failed("http_429", retry_after_s=1.0)]
    figures = figures_of(outcomes, 4.0, Slo.parse("ttft=200ms,itl=100ms"), is_open_loop=False)
    assert figures.requests_per_s == pytest.approx(4 / 4)
    assert figures.tokens_per_s == pytest.approx(12 / 4)
    assert figures.good_requests_per_s == pytest.approx(2 / 4)
    assert figures.good_tokens_per_s == pytest.approx(6 / 4)
    assert figures.good_share == pytest.approx(2 / 6)
    assert figures.errors == {"http_500": 1}
    assert figures.refusals == {"http_429": 1}


@pytest.mark.parametrize(
    ("slo", "holds"),
    [
        ("ttft=500ms", True),
        ("ttft=499ms", False),
        ("tpot=250ms", True),
        ("tpot=249ms", False),
        ("e2e=2s", True),
        ("e2e=1.9s", False),
        ("itl=250ms", True),
        ("itl=249ms", False),
        ("ttft=1s,itl=1s,tpot=1s,e2e=1s", False),
    ],
)
def test_each_bound_is_one_on_its_own_time(slo: str, holds: bool) -> None:
    assert is_good(answered(0.5, 0.75, 1.0, 1.25, 1.5, ended=2.0), Slo.parse(slo)) is holds


def test_one_gap_in_twenty_may_be_longer_than_the_bound() -> None:
    steady = list(itertools.accumulate([1.0, *[0.01] * 19]))
    assert is_good(answered(*steady, steady[-1] + 5), Slo.parse("itl=50ms"))
    assert not is_good(answered(*steady, steady[-1] + 5, steady[-1] + 10), Slo.parse("itl=50ms"))


def test_a_request_that_had_to_wait_for_its_turn_is_judged_from_its_planned_time() -> None:
    waited = answered(10.1, 10.2, scheduled=8.0, started=10.0)
    figures = figures_of([waited], 1.0, Slo.parse("ttft=1s"), is_open_loop=True)
    assert figures.latencies["ttft"].mean == pytest.approx(0.1)
    assert figures.latencies["ttft_planned"].mean == pytest.approx(2.1)
    assert figures.latencies["e2e_planned"].mean == pytest.approx(2.2)
    assert figures.latencies["late"].mean == pytest.approx(2.0)
    assert figures.good_requests_per_s == 0


def test_what_was_given_up_counts_neither_way() -> None:
    figures = figures_of([answered(1.0), failed("unfinished")], 1.0, Slo.parse("ttft=2s"), is_open_loop=False)
    assert (figures.requests, figures.unfinished, figures.errors, figures.good_share) == (1, 1, {}, 1.0)


def test_nothing_measured_is_nothing_divided_by() -> None:
    figures = figures_of([], 0.0, Slo.parse("ttft=1s"), is_open_loop=True)
    assert (figures.latencies, figures.tokens_per_s, figures.good_share) == ({}, 0.0, None)


def test_ratios_are_the_first_side_by_the_second() -> None:
    ours = figures_of([answered(0.1, 0.2, 0.3)], 1.0, Slo(), is_open_loop=False)
    theirs = figures_of([answered(0.2, 0.4, 0.6)], 2.0, Slo(), is_open_loop=False)
    assert ratios(ours, theirs) == pytest.approx(
        {"requests_per_s": 2, "tokens_per_s": 2}
        | {f"{name}_p{percent}": 0.5 for name in ("ttft", "itl", "tpot", "e2e") for percent in (50, 90, 95, 99)}
    )


# --- the load ---------------------------------------------------------------------------------------------------------


def gaps_of_timetable(rate: float, burstiness: float, count: int = 20000) -> list[float]:
    times = list(itertools.islice(arrivals(Plan(rate=rate, burstiness=burstiness, seed=3), 0), count))
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]


def test_poisson_arrivals_have_an_exponential_distribution() -> None:
    gaps = gaps_of_timetable(rate=50, burstiness=1)
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the bound that one in a thousand exceeds
    ordered = sorted(gaps)
    distance = max(abs((n + 1) / len(ordered) - (1 - math.exp(-50 * gap))) for n, gap in enumerate(ordered))
    assert distance < 1.95 / math.sqrt(len(ordered))


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_of_arrivals_and_not_their_rate(burstiness: float) -> None:
    gaps = gaps_of_timetable(rate=10, burstiness=burstiness)
    assert fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_seed_fixes_the_timetable_and_each_round_has_its_own() -> None:
    def times(seed: int, round_number: int) -> list[float]:
        return list(itertools.islice(arrivals(Plan(rate=5, seed=seed), round_number), 5))

    assert times(1, 0) == times(1, 0)
    assert times(1, 0) != times(1, 1)
    assert times(1, 0) != times(2, 0)


def test_request_number_n_is_the_same_whoever_asks_for_it() -> None:
    plan = Plan(prompt_tokens=Span(5, 9), max_tokens=Span(3, 4), seed=7)
    one, other = Workload(plan), Workload(plan)
    other.request(1)
    assert [one.request(number) for number in range(50)] == [other.request(number) for number in range(50)]
    requests = [one.request(number) for number in range(200)]
    assert {len(str(request.prompt).split()) for request in requests} == {5, 6, 7, 8, 9}
    assert {request.max_tokens for request in requests} == {3, 4}
    assert len({request.prompt for request in requests}) == 200
    assert one.request(-1).prompt not in {request.prompt for request in requests}


def test_a_data_set_is_taken_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "One"}, {"messages": chat, "max_tokens": 9}, {"body": {"prompt": "Three", "max_tokens": 2}}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    workload = Workload(Plan(max_tokens=Span(5, 5)), read_prompts(file, "chat"))
    found = [workload.request(number) for number in range(4)]
    assert [request.prompt for request in found] == ["One", chat, "Three", "One"]
    assert [request.max_tokens for request in found] == [5, 9, 2, 5]


def test_a_text_is_a_data_set_of_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text('Hello\n\n{"prompt": 1}\n')
    assert [prompt.content for prompt in read_prompts(file, "jobs")] == ["Hello", '{"prompt": 1}']


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is no JSON"),
        ("[]", "line 1 is no object"),
        ('{"prompt": ""}', "neither a prompt nor messages"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens 0"),
        ('{"messages": [{}]}', "completions do not take"),
        ("", "holds no prompt"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused_by_its_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(text)
    with pytest.raises(OperationError, match=words) as caught:
        read_prompts(file, "completions")
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("2m", 120.0)])
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration("--x", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "0s", "-1s", "s", "1e3s", "1h", "99999m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(OperationError, match="is no duration"):
        parse_duration("--x", text)


@pytest.mark.parametrize("text", ["ttft", "ttft=1", "speed=1s", "ttft=1s,ttft=2s"])
def test_what_is_no_slo_is_refused(text: str) -> None:
    with pytest.raises(OperationError) as caught:
        Slo.parse(text)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("text", ["0", "5..2", "a", "1..", "-3"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(OperationError):
        Span.parse("--max-tokens", text)


@pytest.mark.parametrize(
    "fields", [{"clients": 0}, {"rate": math.nan}, {"rate": 0.0}, {"requests": 0}, {"requests": 2, "rounds": 3}]
)
def test_a_load_without_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OperationError):
        Plan(**fields)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    raw = (
        "\ufeffid: 1\r\ndata: a\r\ndata:b\r\n\r\n: c\r\rid: 2\rdata\rdata: é\r\r\ndata: x\n\nid: 3\ndata: lost".encode()
    )
    for size in range(1, len(raw) + 1):
        parser = EventParser()
        events = [event for at in range(0, len(raw), size) for event in parser.feed(raw[at : at + size])]
        assert events == [b"a\nb", "\né".encode(), b"x"]
        assert parser.last_id == "2", "an event that is not whole moves no cursor"
        assert parser.finish() == [b"lost"]


def test_a_chunked_body_is_the_same_however_the_bytes_are_cut() -> None:
    raw = b"6\r\ndata: \r\n3;name=value\r\n{}\n\r\n0\r\nX: y\r\n\r\nHTTP"
    for size in range(1, len(raw) - 3):
        body = Chunked()
        pieces = [body.feed(raw[at : min(at + size, len(raw) - 4)]) for at in range(0, len(raw) - 4, size)]
        assert b"".join(pieces) == b"data: {}\n"
        assert body.has_ended
    body = Chunked()
    assert (body.feed(raw), body.rest) == (b"data: {}\n", b"HTTP")


@pytest.mark.parametrize("raw", [b"zz\r\n", b"2\r\nabcd", b"-1\r\n", b"0" * 5000])
def test_a_body_that_is_not_chunked_is_no_answer(raw: bytes) -> None:
    with pytest.raises(BadAnswerError):
        Chunked().feed(raw)


def test_a_head_that_is_no_http_is_no_answer() -> None:
    assert Head.parse(b"HTTP/1.1 200 OK\r\nA: b").headers == {"a": "b"}
    for raw in (b"HTTP/2 200", b"HTTP/1.1 OK", b"HTTP/1.1 200 OK\r\nno colon", b""):
        with pytest.raises(BadAnswerError):
            Head.parse(raw)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost", Address("localhost", 80, False, "")),
        ("https://a.example/openai/v1/", Address("a.example", 443, True, "/openai/v1")),
        ("http://[::1]:8000", Address("::1", 8000, False, "")),
    ],
)
def test_a_url_is_read(url: str, address: Address) -> None:
    assert Address.of(url) == address


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://a?x=1", "http://u:s3@a"])
def test_a_url_of_no_api_is_refused_and_no_password_repeated(url: str) -> None:
    with pytest.raises(OperationError) as caught:
        Address.of(url)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "s3" not in str(caught.value)


# --- what is shown ----------------------------------------------------------------------------------------------------


def measurement(*sides: list[Outcome], **plan: Any) -> Measurement:
    names = ("http://one:1", "http://<two>&:2")
    found = []
    for name, outcomes in zip(names, sides, strict=False):
        side = Side(Target(name, "completions"), Workload(Plan()))
        side.rounds.append(Round(0.0, max((one.ended for one in outcomes), default=1.0), outcomes))
        found.append(side)
    return Measurement(Plan(**plan), found, [0.001] * 99 + [0.02], False, 0.5, "of 128 words")


def test_the_plot_is_well_formed_and_has_a_line_for_each_side() -> None:
    quick, slow = answered(0.1, 0.2, 0.2, 0.3), answered(0.2, 0.4, 0.5, 9.0)
    root = ElementTree.fromstring(render_svg(measurement([quick, failed("cut")], [slow])))
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 6, "three panels, two sides"
    for line in lines:
        numbers = [float(number) for point in line.attrib["points"].split() for number in point.split(",")]
        assert all(math.isfinite(number) and 0 <= number <= 1000 for number in numbers)
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "http://<two>&:2" in " ".join(filter(None, texts))
    assert {"% of all", "tokens/s", "seconds of measured time"} <= set(texts)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{space}style") or "")


def test_nothing_measured_is_drawn_as_nothing() -> None:
    root = ElementTree.fromstring(render_svg(measurement([])))
    assert root.findall("{http://www.w3.org/2000/svg}polyline") == []


def test_a_last_bin_is_measured_by_the_time_that_it_covers() -> None:
    steady = answered(*(0.1 * number for number in range(1, 126)))  # 10 tokens/s for 12.5 s
    side = measurement([steady]).sides[0]
    rates = [rate for _, rate in throughput([side]).lines[0]]
    assert len(rates) == 12
    assert rates == pytest.approx([10] * 12, abs=1.01)


def test_a_distribution_goes_up_in_steps_to_all_of_it() -> None:
    assert cdf_points([3, 1]) == [(1, 0), (1, 50), (3, 50), (3, 100)]
    many = cdf_points([float(number) for number in range(100_000)])
    assert len(many) <= 800
    assert many[-1] == (99_999, 100)


@pytest.mark.parametrize("most", [0.003, 1.0, 7.0, 99.0, 12345.0])
def test_an_axis_has_round_numbers(most: float) -> None:
    found = ticks(most)
    assert 3 <= len(found) <= 8
    assert found[0] == 0
    assert found[-1] <= most
    assert str(f"{found[1]:e}")[0] in "125"


def test_the_tables_say_what_failed_and_that_the_client_was_late() -> None:
    shown = render(
        measurement([answered(0.1, 0.2, is_counted=True), failed("http_500", detail="oh no")], [answered(0.2, 0.4)])
    )
    assert "one:1: 1 request, http_500: oh no" in shown
    assert "Warning: this client was" not in shown
    assert "counted as one an event" in shown
    slow = measurement([answered(0.1, 0.2)])
    slow = Measurement(slow.plan, slow.sides, [0.02] * 100, True, 0.5, "x")
    assert "this client was 20.0 ms late" in render(slow)
    assert "Stopped by Ctrl-C" in render(slow)


def test_the_json_file_has_what_its_document_says() -> None:
    text = (Path(__file__).parent.parent / "docs/bench.md").read_text()
    report = to_json(measurement([answered(0.1, 0.2)], [answered(0.2, 0.4)], slo=Slo.parse("ttft=1s"), rate=1.0))
    side = report["sides"][0]
    names = {*report, *side, *side["figures"], *side["figures"]["latencies_s"], *side["rounds"][0]}
    names |= {*side["rounds"][0]["requests"][0], *report["client_lag_s"]}
    for name in names:
        assert f"`{name}`" in text or f"`sides[].{name}`" in text, name
    assert json.loads(json.dumps(report)) == report
