"""The command `carpool`. Each command reads its options and hands over; what it needs is imported when it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.bench_cli import bench
from ops.errors import ExitCode, OperationError
from ops.jobs_cli import DataDirOption, JsonOption, UrlOption, connect_api, jobs_app
from ops.keys_cli import keys_app
from ops.log_lines import log_error
from ops.text import print_error, table
from tasks.codes import CarpoolError
from tasks.logs import configure_logging, logs_are_json
from tasks.process_name import PROCESS_NAME_VARIABLE, process_name
from tasks.redis_clients import ServerRefused
from tasks.settings import Settings, SettingsError, load_settings

app = typer.Typer(
    name="carpool",
    help="An LLM generation backend on Celery and Redis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(jobs_app, name="jobs")
app.add_typer(keys_app, name="keys")
app.command()(bench)

Engine = Annotated[str | None, typer.Option(help="transformers, vllm or simulated.")]
Model = Annotated[str | None, typer.Option(help="Bundled model, hub name, local folder or GGUF file.")]
ServedModelName = Annotated[str | None, typer.Option(help="Alias under which the model is served.")]
ModelAlias = Annotated[
    list[str] | None, typer.Option(help="ALIAS=MODEL: another name of a served model; may be given several times.")
]
EngineArg = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE: an argument of vLLM's engine; may be given several times.")
]
MaxBatchSize = Annotated[int | None, typer.Option(help="Slots: sequences that ride in one batch.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; cuda:0 is the first visible GPU.")]
ShareGpus = Annotated[bool | None, typer.Option("--share-gpus", help="Let workers load their models onto one GPU.")]
Host = Annotated[str | None, typer.Option(help="Address the API listens on.")]
Port = Annotated[int | None, typer.Option(help="Port the API listens on; 0 takes a free one.")]
RedisUrl = Annotated[str | None, typer.Option(help="A Redis or Valkey server to use; else one is started.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log more, and show tracebacks.")]


def _settings(debug: bool = False, **options: Any) -> Settings:
    return load_settings({**options, "log_level": "debug" if debug else None})


def _aliases(pairs: list[str] | None) -> str | None:
    """The setting for `--model-alias`; without any the environment's stands."""
    return ",".join(pairs) if pairs else None


def _engine_args(pairs: list[str] | None) -> str | None:
    """The setting for `--engine-arg`; without any the environment's stands."""
    return shlex.join(pairs) if pairs else None


def _is_supervised() -> bool:
    return PROCESS_NAME_VARIABLE in os.environ


@app.command()
def up(
    workers: Annotated[int | None, typer.Option(help="Generation workers to start.")] = None,
    engine: Engine = None,
    engine_arg: EngineArg = None,
    model: Model = None,
    served_model_name: ServedModelName = None,
    model_alias: ModelAlias = None,
    max_batch_size: MaxBatchSize = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDirOption = None,
    dtype: Dtype = None,
    device: Device = None,
    share_gpus: ShareGpus = None,
    flower: Annotated[bool | None, typer.Option("--flower", help="Start Flower too.")] = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run everything on this machine: Redis, the API, the workers. Ctrl-C drains and stops."""
    from ops.display import Display
    from ops.up import run_up

    settings = _settings(
        debug,
        workers=workers,
        engine=engine,
        engine_args=_engine_args(engine_arg),
        model=model,
        served_model_name=served_model_name,
        model_aliases=_aliases(model_alias),
        max_batch_size=max_batch_size,
        host=host,
        port=port,
        data_dir=data_dir,
        dtype=dtype,
        device=device,
        share_gpus=share_gpus,
        flower=flower,
        redis_url=redis_url,
    )
    raise typer.Exit(run_up(settings, Display()))


@app.command()
def api(
    host: Host = None,
    port: Port = None,
    model_alias: ModelAlias = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run the API server alone, on the Redis of CARPOOL_REDIS_URL."""
    from api.server import serve
    from ops import preflight

    settings = _settings(debug, host=host, port=port, model_aliases=_aliases(model_alias), redis_url=redis_url)
    configure_logging(settings, "api")
    if not _is_supervised():  # else the supervisor has looked
        preflight.check_host(settings)
        preflight.check_keys_file(settings)
        preflight.claim_port(settings.host, settings.port)
    serve(settings)


@app.command()
def worker(
    name: Annotated[str | None, typer.Option(help="The worker's name; else worker-<host name>.")] = None,
    engine: Engine = None,
    engine_arg: EngineArg = None,
    model: Model = None,
    served_model_name: ServedModelName = None,
    max_batch_size: MaxBatchSize = None,
    dtype: Dtype = None,
    device: Device = None,
    share_gpus: ShareGpus = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run one generation worker alone, on the Redis of CARPOOL_REDIS_URL."""
    settings = _settings(
        debug,
        engine=engine,
        engine_args=_engine_args(engine_arg),
        model=model,
        served_model_name=served_model_name,
        max_batch_size=max_batch_size,
        dtype=dtype,
        device=device,
        share_gpus=share_gpus,
        redis_url=redis_url,
    )
    name = name or process_name("worker")
    from ops import preflight
    from ops.checks import check_model
    from worker.main import run

    configure_logging(settings, "worker", name)
    if not _is_supervised():
        preflight.check_engine(settings)
        check_model(settings)
        preflight.check_redis(settings)
    raise typer.Exit(run(settings, name))


@app.command()
def webhooks(
    name: Annotated[str | None, typer.Option(help="The worker's name; else webhooks-<host name>.")] = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run one worker that delivers webhooks alone, on the Redis of CARPOOL_REDIS_URL."""
    from ops import preflight
    from worker.webhooks.main import required_secrets, run

    settings = _settings(debug, redis_url=redis_url)
    name = name or process_name("webhooks")
    configure_logging(settings, "webhooks", name)
    required_secrets(settings)
    if not _is_supervised():
        preflight.check_redis(settings)
    raise typer.Exit(run(settings, name))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='What to complete; "-" reads it from standard input.')],
    max_tokens: Annotated[int | None, typer.Option(help="Most new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="For a draw that can be repeated.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; may be given up to four times.")] = None,
    model: Annotated[str | None, typer.Option(help="Alias of the model.")] = None,
    url: UrlOption = None,
    data_dir: DataDirOption = None,
    debug: Debug = False,
) -> None:
    """Stream a completion to the terminal. Ctrl-C cancels it."""
    from ops.generate import generate as stream_completion

    options = {
        "prompt": sys.stdin.read() if prompt == "-" else prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "model": model,
    }
    body = {field: value for field, value in options.items() if value is not None}
    with connect_api(url, data_dir) as client:
        raise typer.Exit(stream_completion(client, body, _write))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@app.command()
def status(as_json: JsonOption = False, data_dir: DataDirOption = None, redis_url: RedisUrl = None) -> None:
    """Show each process of the instance: role, pid, state."""
    from ops.instance import DataDir, RunFile
    from ops.status import collect, exit_code, read_heartbeats, read_webhook_workers

    settings = _settings(data_dir=data_dir, redis_url=redis_url)
    data = DataDir(settings.data_dir.expanduser().absolute())
    run = RunFile.read(data.run_file)
    if run is None and "redis_url" not in settings.model_fields_set:
        typer.echo(
            "[]"
            if as_json
            else f"No instance runs in {data.root}. Start one with: carpool up; or name one with --data-dir"
        )
        raise typer.Exit(ExitCode.NOT_RUNNING)
    if run is not None:
        settings = settings.model_copy(update={"redis_url": run.redis_url})
    found = collect(data, run, read_heartbeats(settings), read_webhook_workers(settings))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(process) for process in found], indent=2))
    else:
        rows = []
        for process in found:
            percent = f" {process.progress * 100:.0f} %" if process.progress is not None else ""
            pid = "-" if process.pid is None else str(process.pid)
            detail = "; ".join(filter(None, (process.serves, f"{process.detail}{percent}")))
            rows.append([process.role, process.name, pid, process.state, detail])
        typer.echo(table(["ROLE", "NAME", "PID", "STATE", "DETAIL"], rows))
    raise typer.Exit(exit_code(found))


@app.command()
def doctor(
    as_json: JsonOption = False,
    workers: Annotated[int | None, typer.Option(help="Generation workers to start.")] = None,
    engine: Engine = None,
    model: Model = None,
    max_batch_size: MaxBatchSize = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDirOption = None,
    dtype: Dtype = None,
    device: Device = None,
    flower: Annotated[bool | None, typer.Option("--flower", help="Flower is to be started too.")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Look at everything that an instance with these options needs; exit code 1 where something is broken."""
    from ops.doctor import as_json as to_json
    from ops.doctor import as_line, examine

    settings = _settings(
        workers=workers,
        engine=engine,
        model=model,
        max_batch_size=max_batch_size,
        host=host,
        port=port,
        data_dir=data_dir,
        dtype=dtype,
        device=device,
        flower=flower,
        redis_url=redis_url,
    )
    found = []
    for finding in examine(settings):
        found.append(finding)
        if not as_json:
            typer.echo(as_line(finding))
    if as_json:
        typer.echo(to_json(found))
    raise typer.Exit(ExitCode.FAILED if any(finding.state == "broken" for finding in found) else ExitCode.OK)


@app.command()
def stop(data_dir: DataDirOption = None) -> None:
    """Ask the instance of the data dir to drain, and wait until it has ended."""
    from ops.instance import DataDir
    from ops.stop import stop_instance

    settings = _settings(data_dir=data_dir)
    stop_instance(DataDir(settings.data_dir.expanduser().absolute()))
    typer.echo("Stopped.")


@app.command()
def simulate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    seed: Annotated[int, typer.Option(help="The job's seed.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens.")] = 20,
) -> None:
    """Print what the simulated engine answers; docs/simulated-engine.md gives the function."""
    from worker.simulation import completion

    typer.echo(completion(prompt, seed, tokens))


@app.command(hidden=True)
def redis(
    data_dir: DataDirOption = None,
    tenants_fd: Annotated[int | None, typer.Option(help="Descriptor whose end says that nobody needs it.")] = None,
) -> None:
    """Own the embedded Redis server of a data dir (started by `up`)."""
    from ops.instance import DataDir
    from ops.redis_guardian import serve

    settings = _settings(data_dir=data_dir)
    raise typer.Exit(serve(DataDir(settings.data_dir).redis, settings.drain_s, tenants_fd))


@app.command()
def flower(
    host: Annotated[str, typer.Option(help="Address it listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port it listens on.")] = 5555,
    redis_url: RedisUrl = None,
) -> None:
    """Run Flower alone, on the Redis of CARPOOL_REDIS_URL, with the password of CARPOOL_FLOWER_PASSWORD_FILE."""
    from ops.flower import run_flower

    run_flower(_settings(redis_url=redis_url), host, port)


@app.command()
def health(
    role: Annotated[str, typer.Argument(help="api, worker, webhooks or flower.")],
    name: Annotated[str | None, typer.Option(help="Of a worker, as it was given; else the usual one.")] = None,
    port: Annotated[int, typer.Option(help="Port of Flower.")] = 5555,
    ready: Annotated[bool, typer.Option("--ready", help="It has to be able to run jobs, too.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Only whether a restart would help: Redis may be away.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Tell whether this one part lives, for health checks and probes: exit code 0 where it does."""
    from ops.health import HEALTH_ROLES, check_health

    if role not in HEALTH_ROLES:
        raise typer.BadParameter(f"{role!r} is none of {', '.join(HEALTH_ROLES)}")
    if ready and live:
        raise typer.BadParameter("--ready and --live ask for different things. Give one of them")
    settings = _settings(redis_url=redis_url)
    typer.echo(check_health(settings, role, name or process_name(role), port, ready=ready, without_redis=live))


@app.command("make-secrets")
def make_secrets(
    folder: Annotated[Path, typer.Argument(help="Folder that gets one folder for each part.")],
    redis_host: Annotated[str, typer.Option(help="Where the parts reach Redis, HOST or HOST:PORT.")] = "redis:6379",
) -> None:
    """Write the passwords of a deployment that are not there yet, each into a file; none is shown."""
    from ops.deployment_secrets import make_secrets as make

    for path in make(folder, redis_host):
        typer.echo(f"{path}: written")


def main() -> None:
    """Entry point: one line for what the user can mend, a traceback only with --debug."""
    try:
        app()
    except (OperationError, SettingsError, CarpoolError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        code = error.exit_code if isinstance(error, OperationError) else _exit_code(error)
        if logs_are_json() and (_is_supervised() or os.environ.get("CARPOOL_LOG_FORMAT") == "json"):
            log_error(error, code)  # nobody has typed the command
        elif isinstance(error, OperationError):
            print_error(error.cause, error.fix, error.details)
        else:
            print_error(str(error))
        sys.exit(code)


def _exit_code(error: SettingsError | CarpoolError) -> ExitCode:
    if isinstance(error, SettingsError):
        return ExitCode.USAGE
    if isinstance(error, ServerRefused):
        return ExitCode.PRECONDITION
    # no_worker: the model cannot be served, so another try would not mend it.
    codes = {"no_worker": ExitCode.PRECONDITION, "redis_unavailable": ExitCode.UNAVAILABLE}
    return codes.get(error.code.name, ExitCode.FAILED)


if __name__ == "__main__":
    main()
