"""`carpool jobs`: list, show and cancel the jobs of an instance."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.client import ApiClient, find_url
from ops.display import is_fancy
from ops.instance import DataDir
from ops.text import table
from ops.timeline import timeline
from tasks.settings import load_settings

UrlOption = Annotated[str | None, typer.Option("--url", help="Address of the API; else the instance of the data dir.")]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Data dir of the instance.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

jobs_app = typer.Typer(help="List, show and cancel jobs.", invoke_without_command=True, rich_markup_mode=None)


def connect_api(url: str | None, data_dir: Path | None) -> ApiClient:
    """A client of the named API, or of the instance that runs in the data dir."""
    settings = load_settings({"data_dir": data_dir})
    found = find_url(DataDir(settings.data_dir.expanduser().absolute()), url)
    return ApiClient(found, settings.api_key.get_secret_value())


@jobs_app.callback()
def list_jobs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List jobs, newest first."""
    if context.invoked_subcommand is not None:
        return
    with connect_api(url, data_dir) as client:
        answer = client.get("/jobs", limit=limit)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    jobs: list[dict[str, Any]] = answer["data"]
    if not jobs:
        typer.echo("No jobs.")
        return
    rows = [
        [job["id"], job["status"], job["model"], _time(job["created_at"]), job["finish_reason"] or "-"] for job in jobs
    ]
    typer.echo(table(["ID", "STATUS", "MODEL", "CREATED (UTC)", "FINISH REASON"], rows))


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


@jobs_app.command("show")
def show_job(
    job_id: Annotated[str, typer.Argument(help="The job's id.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show a job's life as a timeline; with --json everything about it."""
    with connect_api(url, data_dir) as client:
        job = client.get(f"/jobs/{job_id}", include="events")
    typer.echo(json.dumps(job, indent=2, ensure_ascii=False) if as_json else timeline(job, colors=is_fancy(sys.stdout)))


@jobs_app.command("cancel")
def cancel_job(
    job_id: Annotated[str, typer.Argument(help="The job's id.")], url: UrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Cancel a job; its slot is free within two decoding steps."""
    with connect_api(url, data_dir) as client:
        answer = client.post(f"/jobs/{job_id}/cancel")
    typer.echo(f"{job_id}: {'cancel requested' if answer.get('cancel_requested') else answer.get('status')}")
