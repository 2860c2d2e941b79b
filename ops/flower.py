"""Flower, run on our own Celery application: no `-A`, which would look for it in the user's working directory first."""

from __future__ import annotations

import atexit
import os
import signal
from http import HTTPStatus
from typing import Any

from flower.api.control import TaskRevoke
from flower.app import Flower
from flower.command import apply_env_options, apply_options, extract_settings, setup_logging, sigterm_handler
from flower.urls import settings as flower_settings
from flower.views.monitor import Metrics
from redis.exceptions import RedisError
from tornado.ioloop import IOLoop
from tornado.options import options
from tornado.web import HTTPError, authenticated

from ops.errors import PreconditionError
from ops.flower_ledger import LedgerSync, LedgerView
from tasks.app import create_celery
from tasks.ledger import SyncLedger
from tasks.lifeline import watch_lifeline
from tasks.logs import configure_logging
from tasks.redis_clients import connect
from tasks.settings import Settings, read_secret_file

#: Flower's own variables: either says who may come in.
_ACCESS_VARIABLES = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH")


class _Metrics(Metrics):  # type: ignore[misc] # Flower has no types
    """Flower's own page of metrics asks nobody for the password."""

    @authenticated
    async def get(self) -> None:
        await super().get()


class _Revoke(TaskRevoke):  # type: ignore[misc] # the same
    """Terminate and Revoke cancel the job in the ledger: durable, and also while no worker is there to hear of it."""

    @authenticated
    async def post(self, taskid: str) -> None:
        if self.application.options.read_only:
            raise HTTPError(HTTPStatus.FORBIDDEN, "Read only mode is enabled")
        try:
            answer = await IOLoop.current().run_in_executor(None, self.application.cancel_job, taskid)
        except RedisError as error:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, "Redis does not answer") from error
        if answer == "gone":  # no job of ours: another task of this broker, perhaps
            await super().post(taskid)
        elif answer in ("requested", "cancelled"):
            self.write({"message": f"Cancelled '{taskid}'"})
        else:
            self.write({"message": f"'{taskid}' has ended before: {answer}"})

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if status_code == HTTPStatus.UNAUTHORIZED:
            # else a browser that came in by a page of a task does not send the password that it knows
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        super().write_error(status_code, **kwargs)


class _Flower(Flower):  # type: ignore[misc] # the same
    def __init__(self, settings: Settings, **arguments: Any) -> None:
        super().__init__(**arguments)
        prefix = f"/{self.options.url_prefix.strip('/')}" if self.options.url_prefix else ""
        # these come before Flower's own
        self.add_handlers(r".*", [(rf"{prefix}/metrics", _Metrics), (rf"{prefix}/api/task/revoke/(.+)", _Revoke)])
        self._settings = settings
        self._sync = LedgerSync(LedgerView(settings), self.events)

    def cancel_job(self, id: str) -> str:
        """As `Calls.cancel`; from any thread. Raises RedisError."""
        with connect(self._settings) as client:
            ledger = SyncLedger(client, self._settings)
            return ledger.run(ledger.calls.cancel(id))

    def start(self) -> None:
        self.io_loop.add_callback(self._sync.start)
        super().start()


def run_flower(settings: Settings, host: str, port: int) -> None:
    """Serve Flower until SIGTERM, to the user `carpool` with the password of `flower_password_file`.

    Flower's own variables count too: FLOWER_BASIC_AUTH in place of the file, FLOWER_PERSISTENT, FLOWER_DB and so on.

    Raises:
        PreconditionError: nobody says who may come in.
        SettingsError: the file of the password cannot be read.
    """
    _require_password(settings)
    watch_lifeline()
    # what the command `celery flower` does, with our application in the place of Flower's
    apply_env_options()
    apply_options("flower", [f"--address={host}", f"--port={port}"])
    extract_settings()
    configure_logging(settings, "flower")
    setup_logging()  # of Tornado, which leaves handlers that are there
    flower = _Flower(settings, capp=create_celery(settings), options=options, **flower_settings)
    atexit.register(flower.stop)
    signal.signal(signal.SIGTERM, sigterm_handler)
    flower.start_http_server()
    try:
        flower.start()
    except (KeyboardInterrupt, SystemExit):
        return


def _require_password(settings: Settings) -> None:
    if any(os.environ.get(name) for name in _ACCESS_VARIABLES):
        return
    if settings.flower_password_file is None:
        raise PreconditionError(
            "Flower would let everybody in, and it can end jobs and workers",
            "Write a password into a file, and set CARPOOL_FLOWER_PASSWORD_FILE to its name",
        )
    password = read_secret_file(settings.flower_password_file, "CARPOOL_FLOWER_PASSWORD_FILE")
    # by the environment: every user of the machine can read a command line
    os.environ["FLOWER_BASIC_AUTH"] = f"carpool:{password}"
