"""`carpool keys`: make, list, change and revoke API keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from redis.exceptions import RedisError

from ops.errors import ExitCode, OperationError
from ops.instance import DataDir, RunFile
from ops.jobs_cli import DataDirOption, JsonOption
from ops.key_jobs import cancel_everything
from ops.text import table
from tasks.api_key_terms import TermError, parse_name, parse_terms, parse_time
from tasks.api_keys import ApiKey, KeyStore, digest_of, new_id, new_secret
from tasks.redis_clients import connect, redacted
from tasks.settings import Settings, load_settings

RedisUrl = Annotated[str | None, typer.Option("--redis-url", help="The server that holds the keys.")]
Wanted = Annotated[str, typer.Argument(help="Id or name of the key.")]

keys_app = typer.Typer(help="Make, list, change and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)


def _settings(redis_url: str | None, data_dir: DataDirOption) -> Settings:
    """With the Redis server that is named, else that of the instance in the data dir."""
    settings = load_settings({"redis_url": redis_url, "data_dir": data_dir})
    if "redis_url" in settings.model_fields_set:
        return settings
    data = DataDir(settings.data_dir.expanduser().absolute())
    run = RunFile.read(data.run_file)
    if run is None:
        raise OperationError(
            f"No instance runs in {data.root}",
            "Start one with: carpool up; or name its Redis with --redis-url",
            ExitCode.NOT_RUNNING,
        )
    return settings.model_copy(update={"redis_url": run.redis_url})


@contextmanager
def _store(settings: Settings) -> Iterator[KeyStore]:
    try:
        with connect(settings) as client:
            yield KeyStore(client)
    except RedisError as error:
        raise OperationError(
            f"Redis at {redacted(settings.redis_url)} does not answer ({error})",
            "See what runs with: carpool status",
            ExitCode.UNAVAILABLE,
        ) from error


def _find(store: KeyStore, wanted: str) -> list[ApiKey]:
    """The key with this id or name, with all its secrets. Raises OperationError where it is none or not one."""
    table = store.table().values()
    found = [key for key in table if key.id == wanted] or [key for key in table if key.name == wanted]
    ids = sorted({key.id for key in found})
    if len(ids) > 1:
        # one that was revoked and another of its name: the good one is meant
        good = sorted({key.id for key in found if key.state(time.time()) == "active"})
        if len(good) != 1:
            raise OperationError(f"{len(ids)} keys have the name {wanted!r}", f"Name one by its id: {', '.join(ids)}")
        found = [key for key in found if key.id == good[0]]
    if not found:
        raise OperationError(f"There is no key {wanted[:64]!r}", "See which there are with: carpool keys list")
    return found


def _show_once(key: ApiKey, secret: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**key.public(time.time()), "key": secret}, indent=2, ensure_ascii=False))
        return
    # the key alone on standard output, so that it can be piped to where it is kept
    typer.echo(f"{key.id} ({key.name}). The key is shown this once:", err=True)
    typer.echo(secret)


@keys_app.command()
def create(
    name: Annotated[str, typer.Option(help="What it is for; shown in the list.")],
    rpm: Annotated[str | None, typer.Option(help="Requests a minute; else as many as it likes.")] = None,
    tpm: Annotated[str | None, typer.Option(help="Tokens a minute, of prompts and answers.")] = None,
    max_concurrent: Annotated[str | None, typer.Option(help="Jobs that have not ended, at once.")] = None,
    models: Annotated[str | None, typer.Option(help="Models that it may use, with commas between; else all.")] = None,
    priority_ceiling: Annotated[
        str | None, typer.Option(help="First priority that it may ask for: high, normal, low, or from 0 to 9.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="12h, 30d or a date (UTC) such as 2027-01-31; else never.")
    ] = None,
    as_json: JsonOption = False,
    redis_url: RedisUrl = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a key and print it: it is shown this once."""
    given = {
        "rpm": rpm,
        "tpm": tpm,
        "max_concurrent": max_concurrent,
        "models": models,
        "priority_ceiling": priority_ceiling,
        "expires": expires,
    }
    now = time.time()
    try:
        terms = parse_terms({term: text for term, text in given.items() if text is not None}, now)
        name = parse_name(name)
    except TermError as error:
        raise OperationError(str(error), "", ExitCode.USAGE) from None
    secret = new_secret()
    key = ApiKey(digest_of(secret), new_id(), name, round(now, 3), **terms)
    with _store(_settings(redis_url, data_dir)) as store:
        store.add(key)
    _show_once(key, secret, as_json)


@keys_app.command("list")
def list_keys(as_json: JsonOption = False, redis_url: RedisUrl = None, data_dir: DataDirOption = None) -> None:
    """List all keys, also those that are good no more; never the keys themselves."""
    with _store(_settings(redis_url, data_dir)) as store:
        found = sorted(store.table().values(), key=lambda key: (key.created_at, key.id))
    now = time.time()
    if as_json:
        typer.echo(json.dumps([key.public(now) for key in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo("No keys: the API serves this machine alone, and asks for none.")
        return
    head = ["ID", "NAME", "STATE", "CREATED (UTC)", "EXPIRES (UTC)", "RPM", "TPM", "JOBS", "PRIORITY", "MODELS", "FROM"]
    rows = [
        [
            key.id,
            key.name,
            key.state(now),
            _time(key.created_at),
            _time(key.expires_at),
            str(key.requests_per_minute or "-"),
            str(key.tokens_per_minute or "-"),
            str(key.max_concurrent or "-"),
            f"{key.priority_ceiling} to 9",
            ",".join(key.models) or "all",
            key.source,
        ]
        for key in found
    ]
    typer.echo(table(head, rows))


@keys_app.command()
def rotate(
    key: Wanted,
    keep: Annotated[
        str | None, typer.Option(help="How long the old secret stays good, as in 1h; else it is revoked at once.")
    ] = None,
    as_json: JsonOption = False,
    redis_url: RedisUrl = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a key another secret: it keeps its id, its limits and its jobs."""
    now = time.time()
    try:
        until = None if keep is None else parse_time(keep, now)
    except TermError as error:
        raise OperationError(str(error).replace("expires", "--keep", 1), "", ExitCode.USAGE) from None
    secret = new_secret()
    with _store(_settings(redis_url, data_dir)) as store:
        found = [one for one in _find(store, key) if one.state(now) == "active"]
        if not found:
            raise OperationError(f"The key {key} is good no more", "Make another one with: carpool keys create")
        if any(one.source == "file" for one in found):
            raise OperationError(
                f"The key {key} is from CARPOOL_API_KEYS_FILE", "Change it there, and start the API anew"
            )
        new = replace(max(found, key=lambda one: one.created_at), digest=digest_of(secret), created_at=round(now, 3))
        store.add(new)
        for one in found:
            if until is None:
                store.revoke(one, "command", now)
            else:
                store.expire(one, until)
    _show_once(new, secret, as_json)


@keys_app.command()
def revoke(
    key: Wanted,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel its jobs and batches too.")] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDirOption = None,
) -> None:
    """Revoke a key: it is good for nothing within two seconds. Its jobs go on, unless you say otherwise."""
    settings = _settings(redis_url, data_dir)
    with _store(settings) as store:
        found = _find(store, key)
        for one in found:
            store.revoke(one, "command", time.time())
        num_cancelled = cancel_everything(settings, found[0].id) if cancel else 0
    typer.echo(f"{found[0].id} ({found[0].name}): revoked" + (f", {num_cancelled} jobs cancelled" if cancel else ""))


@keys_app.command()
def forget(key: Wanted, redis_url: RedisUrl = None, data_dir: DataDirOption = None) -> None:
    """Drop a key from the list that is good no more. When none is left, the API asks for none."""
    with _store(_settings(redis_url, data_dir)) as store:
        found = _find(store, key)
        if any(one.state(time.time()) == "active" for one in found):
            raise OperationError(f"The key {key} is good", f"Revoke it first: carpool keys revoke {key}")
        for one in found:
            store.forget(one)
    typer.echo(f"{found[0].id} ({found[0].name}): forgotten")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
