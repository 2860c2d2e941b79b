"""`carpool bench`: its options, and what they mean together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ops.client import find_url
from ops.instance import DataDir
from ops.jobs_cli import DataDirOption
from tasks.settings import load_settings


def bench(
    url: Annotated[str | None, typer.Option(help="Server to measure; else the instance of the data dir.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another OpenAI-compatible server, asked the same in turn; sent OPENAI_API_KEY.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="jobs (Carpool's own, the default), completions (with --against) or chat.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model; else the server's default or first.")] = None,
    against_model: Annotated[str | None, typer.Option(help="The same for --against.")] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients, each with one request at a time (4); with --rate the most at once.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second that come whatever happens.")] = None,
    burstiness: Annotated[float, typer.Option(help="Of --rate: 1 is Poisson, less is burstier.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Most requests (100; without a bound with --duration).")] = None,
    duration: Annotated[str | None, typer.Option(help="No request begins after so long (10m).")] = None,
    timeout: Annotated[str, typer.Option(help="The longest that one request may take.")] = "5m",
    ignore: Annotated[int, typer.Option(help="Warm-up requests, which come first and are not counted.")] = 2,
    rounds: Annotated[int | None, typer.Option(help="How often the two sides are measured in turn (4).")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Words of a made-up prompt: 128, or 32..512.")] = "128",
    prompts: Annotated[Path | None, typer.Option(help="Prompts to use: lines of text, or .jsonl.")] = None,
    max_tokens: Annotated[str, typer.Option(help="Most new tokens: 128, or 16..256.")] = "128",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, arrivals and draws.")] = 0,
    body: Annotated[str | None, typer.Option(help="Further fields of every request, as a JSON object.")] = None,
    usage: Annotated[bool, typer.Option(help="Ask streams for their usage (stream_options).")] = True,
    slo: Annotated[str, typer.Option(help="What is good: ttft=200ms,itl=50ms,tpot=40ms,e2e=10s.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them, as .svg.")] = None,
    data_dir: DataDirOption = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Measure a running service as its users see it. Ctrl-C shows what was measured so far."""
    from ops.bench.serving.command import parse_body, run_bench
    from ops.bench.serving.plan import ENDPOINTS, MOST_AT_ONCE, Plan, Slo, Span, parse_duration, usage_error
    from ops.bench.serving.target import Target
    from ops.bench.serving.workload import read_prompts

    wanted = endpoint or ("jobs" if against is None else "completions")
    chosen = next((one for one in ENDPOINTS if one == wanted), None)
    if chosen is None:
        raise usage_error(f"--endpoint {wanted} is unknown", f"Choose one of {', '.join(ENDPOINTS)}")
    if chosen == "jobs" and against is not None:
        raise usage_error("--endpoint jobs is Carpool's own, and --against any server", "Use completions or chat")
    for option, value, needed, other in (
        ("--against-model", against_model, "--against", against),
        ("--rounds", rounds, "--against", against),
        ("--burstiness", burstiness if burstiness != 1 else None, "--rate", rate),
    ):
        if value is not None and other is None:
            raise usage_error(f"{option} {value} is nothing without {needed}", f"Leave it out, or add {needed}")
    if requests is None:
        requests = 100 if duration is None else 1_000_000
    plan = Plan(
        clients=clients if clients is not None else (4 if rate is None else MOST_AT_ONCE),
        rate=rate,
        burstiness=burstiness,
        requests=requests,
        duration_s=parse_duration("--duration", duration or "10m"),
        timeout_s=parse_duration("--timeout", timeout),
        warmups=ignore,
        rounds=rounds if rounds is not None else (min(4, requests) if against is not None else 1),
        prompt_tokens=Span.parse("--prompt-tokens", prompt_tokens),
        max_tokens=Span.parse("--max-tokens", max_tokens),
        temperature=temperature,
        seed=seed,
        slo=Slo.parse(slo),
        body=parse_body(body) if body is not None else {},
    )
    settings = load_settings({"data_dir": data_dir})
    found = find_url(DataDir(settings.data_dir.expanduser().absolute()), url)
    targets = [Target(found, chosen, settings.api_key.get_secret_value(), model, usage)]
    if against is not None:
        targets.append(Target(against.rstrip("/"), chosen, os.environ.get("OPENAI_API_KEY", ""), against_model, usage))
    lines = read_prompts(prompts, chosen) if prompts is not None else []
    name = f"of {prompts}" if prompts is not None else f"of {plan.prompt_tokens} words"
    raise typer.Exit(run_bench(plan, targets, lines, name, json_file, plot, typer.echo))
