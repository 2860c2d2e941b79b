"""What a measurement is shown as: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ops.bench.report import machine, percentile
from ops.bench.serving.figures import PERCENTS, Figures, Spread, figures_of
from ops.bench.serving.plan import Plan
from ops.bench.serving.runner import Round, Side
from ops.text import table

VERSION: Final = 1
#: Beyond this the client's own delay is worth a warning.
LAG_WARNING_S: Final = 0.005
_LATENCIES: Final = {
    "ttft": "first token (TTFT)",
    "itl": "between events (ITL)",
    "tpot": "per token (TPOT)",
    "e2e": "whole answer (E2E)",
    "queue": "queued, as the service says",
    "ttft_planned": "TTFT from the planned time",
    "e2e_planned": "E2E from the planned time",
    "late": "sent later than planned",
}
_SHOWN_ERRORS: Final = 10


@dataclass(frozen=True, slots=True)
class Measurement:
    """All that was measured.

    Attributes:
        lags: seconds that the client's event loop was late.
        was_stopped: by Ctrl-C, before its end.
        load_at_start: the machine's load before.
    """

    plan: Plan
    sides: Sequence[Side]
    lags: Sequence[float]
    was_stopped: bool
    load_at_start: float
    prompts: str

    def figures(self) -> list[Figures]:
        """Of each side."""
        plan = self.plan
        return [
            figures_of(side.outcomes, side.seconds, plan.slo, is_open_loop=plan.rate is not None) for side in self.sides
        ]

    @property
    def lag_p99_s(self) -> float | None:
        return percentile(self.lags, 99) if self.lags else None


def describe_load(measurement: Measurement) -> str:
    """One line: who asks how often, for what."""
    plan = measurement.plan
    if plan.rate is None:
        who = f"{plan.clients} clients" if plan.clients > 1 else "1 client"
    else:
        kind = "Poisson" if plan.burstiness == 1 else f"gamma, burstiness {plan.burstiness:g}"
        who = f"{plan.rate:g} requests/s ({kind})"
    rounds = f", {plan.rounds} rounds in turn" if plan.rounds > 1 else ""
    return f"{who}, prompts {measurement.prompts}, at most {plan.max_tokens} new tokens, seed {plan.seed}{rounds}"


def render(measurement: Measurement) -> str:
    """The tables, and what has to be known beside them."""
    every = measurement.figures()
    lines = [f"Load: {describe_load(measurement)}"]
    for side, figures in zip(measurement.sides, every, strict=True):
        target = side.target
        model = f", model {target.model}" if target.model is not None else ""
        lines.append(
            f"{target.name}: {target.url}, {target.endpoint}{model}: {figures.succeeded} of {figures.requests} "
            f"requests answered in {figures.seconds:.1f} s"
        )
    lines += ["", _latency_table(measurement.sides, every), "", _rate_table(measurement, every)]
    notes = [*_failures(measurement.sides), *warnings_of(measurement, every)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _latency_table(sides: Sequence[Side], every: Sequence[Figures]) -> str:
    is_pair = len(every) > 1
    titles = ["MILLISECONDS", *(["SIDE"] if is_pair else []), *(f"P{percent}" for percent in PERCENTS)]
    rows: list[list[str]] = []
    for key, name in _LATENCIES.items():
        spreads = [figures.latencies.get(key) for figures in every]
        for side, spread in zip(sides, spreads, strict=True):
            if spread is not None:
                label = [name, side.target.name] if is_pair else [name]
                values = [*spread.percentiles.values(), spread.mean, spread.most]
                rows.append([*label, *(_shown(1000 * value) for value in values), str(spread.count)])
        if is_pair and spreads[0] is not None and spreads[1] is not None and key != "late":
            pairs = zip(_values(spreads[0]), _values(spreads[1]), strict=True)
            rows.append([name, "ratio", *(_ratio(one, other) for one, other in pairs), ""])
    return table([*titles, "MEAN", "MAX", "SAMPLES"], rows)


def _values(spread: Spread) -> list[float]:
    return [*spread.percentiles.values(), spread.mean, spread.most]


def _rate_table(measurement: Measurement, every: Sequence[Figures]) -> str:
    slo = measurement.plan.slo
    rows: list[tuple[str, list[float | None], str, bool]] = [
        ("requests", [one.requests_per_s for one in every], "requests/s", True),
        ("new tokens", [one.tokens_per_s for one in every], "tokens/s", True),
        ("prompt tokens", [one.prompt_tokens_per_s or None for one in every], "tokens/s", True),
    ]
    if slo.bounds:
        rows += [
            (f"goodput ({slo})", [one.good_requests_per_s for one in every], "requests/s", True),
            ("goodput", [one.good_tokens_per_s for one in every], "tokens/s", True),
            (
                "good requests",
                [None if one.good_share is None else 100 * one.good_share for one in every],
                "% of all",
                False,
            ),
        ]
    rows += [
        ("tokens in an event", [one.tokens_per_event if one.succeeded else None for one in every], "tokens", False),
        ("failed", [float(sum(one.errors.values())) for one in every], "requests", False),
        ("refused, with Retry-After", [float(sum(one.refusals.values())) for one in every], "requests", False),
        ("streams taken up again", [float(one.resumes) for one in every], "times", False),
    ]
    lag = measurement.lag_p99_s
    if lag is not None:
        rows.append(("lag of this client, p99", [1000 * lag], "ms", False))
    is_pair = len(every) > 1
    names = [side.target.name for side in measurement.sides] if is_pair else ["VALUE"]
    cells = []
    for name, values, unit, has_ratio in rows:
        if all(value is None for value in values):
            continue
        shown = ["" if value is None else _shown(value) for value in values]
        shown += [""] * (len(names) - len(shown))
        one, other = values if len(values) > 1 else (None, None)
        ratio = _ratio(one, other) if has_ratio and one is not None and other is not None else ""
        cells.append([name, *shown, *([ratio] if is_pair else []), unit])
    return table(["FIGURE", *names, *(["RATIO"] if is_pair else []), "UNIT"], cells)


def _failures(sides: Sequence[Side]) -> list[str]:
    """A line for each kind of failure, with the words of the first."""
    lines: list[str] = []
    for side in sides:
        seen: dict[str, list[str]] = {}
        for outcome in side.outcomes:
            if not outcome.succeeded and not outcome.is_unfinished:
                seen.setdefault(("refused " if outcome.is_refused else "") + outcome.error, []).append(outcome.detail)
        of_side = f"{side.target.name}: " if len(sides) > 1 else ""
        for code, details in list(seen.items())[:_SHOWN_ERRORS]:
            first = f": {details[0]}" if details[0] else ""
            lines.append(f"{of_side}{len(details)} {'request' if len(details) == 1 else 'requests'}, {code}{first}")
    return lines


def warnings_of(measurement: Measurement, every: Sequence[Figures]) -> list[str]:
    """What makes the figures less than they look like."""
    lines: list[str] = []
    lag = measurement.lag_p99_s
    if lag is not None and lag > LAG_WARNING_S:
        lines.append(
            f"Warning: this client was {1000 * lag:.1f} ms late at its p99, so every time above may be as much too "
            "long. Run it where it has a core to itself, or ask for less"
        )
    if measurement.was_stopped:
        unfinished = sum(figures.unfinished for figures in every)
        lines.append(f"Stopped by Ctrl-C: {unfinished} requests were under way, and are not in the figures")
    for side, figures in zip(measurement.sides, every, strict=True):
        if figures.counted:
            lines.append(
                f"{side.target.name} did not say how many tokens {figures.counted} answers had; they are counted as "
                "one an event"
            )
        if figures.taken_up_again:
            lines.append(f"{side.target.name}: {figures.taken_up_again} jobs were taken up by more than one worker")
        if measurement.plan.rate is not None and (late := figures.latencies.get("late")) is not None:
            behind = late.percentiles[99]
            if behind > LAG_WARNING_S:
                lines.append(
                    f"{side.target.name}: 1 % of the requests were sent {1000 * behind:.0f} ms or more behind their "
                    "time; the rows from the planned time have that in them"
                )
    return lines


def to_json(measurement: Measurement) -> dict[str, Any]:
    """The file of `--json`; docs/bench.md has its form."""
    plan, lags, every = measurement.plan, measurement.lags, measurement.figures()
    load = {
        "clients": plan.clients,
        "rate": plan.rate,
        "burstiness": plan.burstiness,
        "requests": plan.requests,
        "duration_s": plan.duration_s,
        "timeout_s": plan.timeout_s,
        "warmups": plan.warmups,
        "rounds": plan.rounds,
        "prompts": measurement.prompts,
        "max_tokens": [plan.max_tokens.least, plan.max_tokens.most],
        "temperature": plan.temperature,
        "seed": plan.seed,
        "slo_s": dict(plan.slo.bounds),
        "body": dict(plan.body),
    }
    return {
        "v": VERSION,
        "bench": "serving",
        "measured_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": sys.argv[1:],
        "machine": machine(measurement.load_at_start),
        "load": load,
        "was_stopped": measurement.was_stopped,
        "client_lag_s": None if not lags else _spread(Spread.of(lags)),
        "warnings": warnings_of(measurement, every),
        "sides": [_side(side, figures) for side, figures in zip(measurement.sides, every, strict=True)],
        "ratios": ratios(*every) if len(every) > 1 else None,
    }


def ratios(ours: Figures, theirs: Figures) -> dict[str, float]:
    """The first side's figure by the second's, where both have one that is not 0."""
    pairs = {
        "requests_per_s": (ours.requests_per_s, theirs.requests_per_s),
        "tokens_per_s": (ours.tokens_per_s, theirs.tokens_per_s),
        "good_requests_per_s": (ours.good_requests_per_s or 0.0, theirs.good_requests_per_s or 0.0),
        "good_tokens_per_s": (ours.good_tokens_per_s or 0.0, theirs.good_tokens_per_s or 0.0),
    }
    for name in ("ttft", "itl", "tpot", "e2e"):
        one, other = ours.latencies.get(name), theirs.latencies.get(name)
        if one is not None and other is not None:
            pairs |= {
                f"{name}_p{percent}": (one.percentiles[percent], other.percentiles[percent]) for percent in PERCENTS
            }
    return {name: _rounded(one / other) for name, (one, other) in pairs.items() if one and other}


def _side(side: Side, figures: Figures) -> dict[str, Any]:
    target = side.target
    figures_json = asdict(figures)
    figures_json["latencies_s"] = {name: _spread(spread) for name, spread in figures.latencies.items()}
    del figures_json["latencies"]
    for name, value in figures_json.items():
        if isinstance(value, float):
            figures_json[name] = _rounded(value)
    return {
        "name": target.name,
        "url": target.url,
        "endpoint": target.endpoint,
        "model": target.model,
        "figures": figures_json,
        "rounds": [{"seconds": _rounded(one.ended - one.began), "requests": _requests(one)} for one in side.rounds],
    }


def _requests(round: Round) -> list[dict[str, Any]]:
    return [
        {
            "number": outcome.number,
            "planned_s": _rounded(outcome.scheduled - round.began),
            "started_s": _rounded(outcome.started - round.began),
            "ttft_s": _rounded(outcome.arrivals[0] - outcome.started) if outcome.arrivals else None,
            "e2e_s": _rounded(outcome.ended - outcome.started),
            "queue_s": None if outcome.queue_s is None else _rounded(outcome.queue_s),
            "tokens": outcome.tokens,
            "prompt_tokens": outcome.prompt_tokens,
            "events": len(outcome.arrivals),
            "resumes": outcome.resumes,
            "error": outcome.error or None,
            "is_refused": outcome.is_refused,
            "job_id": outcome.job_id or None,
        }
        for outcome in round.outcomes
    ]


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    percentiles: Mapping[str, float] = {f"p{percent}": _rounded(value) for percent, value in spread.percentiles.items()}
    return {
        "count": spread.count,
        "mean": _rounded(spread.mean),
        "min": _rounded(spread.least),
        "max": _rounded(spread.most),
        **percentiles,
    }


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else ""


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"
