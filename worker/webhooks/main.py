"""The worker that delivers webhooks: a plain Celery worker with a pool of threads, on a queue of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import structlog
from celery import signals
from celery.worker import state as celery_state

from tasks import keys
from tasks.app import plain_celery
from tasks.invitations import invitation_template
from tasks.keeper import Keeper
from tasks.ledger import SyncLedger
from tasks.lifeline import terminate_self, watch_lifeline
from tasks.logs import configure_logging
from tasks.redis_clients import ServerRefused, check_server, connect
from tasks.settings import Settings, SettingsError
from tasks.tracing import Tracing, start_tracing
from tasks.webhook_calls import WebhookCalls, job_of_event
from tasks.webhook_secrets import webhook_secrets
from tasks.webhook_workers import WebhookWorker
from worker.broker import use_gate
from worker.webhooks.delivery import Deliverer
from worker.webhooks.dispatcher import Dispatcher
from worker.webhooks.sender import Sender

if TYPE_CHECKING:
    from worker.webhooks.spans import WebhookSpans

_log = structlog.get_logger("carpool.webhooks")
#: Beside the bound on the attempts that run: what Celery needs to end.
_AFTER_DRAIN_S: Final = 20.0


def run(settings: Settings, name: str) -> int:
    """Deliver until drained (SIGTERM, SIGINT, the end of the supervisor). Returns the exit code.

    Attempts that run come to their end, `webhook_timeout_s` at most; what is not delivered stays in the outbox.

    Raises:
        SettingsError: there is no secret to sign with, or one that is none.
        CarpoolError: Redis cannot be used.
    """
    configure_logging(settings, "webhooks", name)
    secrets = required_secrets(settings)
    celery = plain_celery(settings)
    celery.set_current()
    celery.set_default()
    calls = WebhookCalls(settings, invitation_template(celery, keys.WEBHOOK_TASK))
    # as many again wait in the broker as threads are busy: nobody waits for a message, and few leave the outbox's order
    most_messages = 2 * settings.webhook_concurrency
    outdated = _Outdated()
    tracing = start_tracing(settings, "webhooks", name)
    with connect(settings) as client:
        check_server(client, settings.redis_url)
        sender = Sender(settings.webhook_timeout_s, allow_private=settings.webhook_allow_private)
        deliverer = Deliverer(
            settings, SyncLedger(client, settings), calls, sender, secrets, most_messages, _spans(tracing)
        )
        dispatcher = Dispatcher(settings, calls, WebhookWorker(name, socket.gethostname(), os.getpid()), most_messages)
        keeper = Keeper(settings, invitation_template(celery), outdated.drain)
        stopping = threading.Event()

        @celery.task(name=keys.WEBHOOK_TASK, bind=True, ignore_result=True, typing=False, shared=False)
        def deliver(task: Any, /, *_: object, **__: object) -> None:
            """The next attempt to deliver one event; its id is the task's."""
            deliverer.deliver(job_of_event(str(task.request.id)))

        def stop(**_: object) -> None:
            stopping.set()
            deliverer.stop()
            dispatcher.stop()

        use_gate(celery.conf, lambda: 0 if stopping.is_set() else settings.webhook_concurrency)
        celery.conf.worker_prefetch_multiplier = 1
        worker = celery.Worker(
            hostname=f"{name}@{socket.gethostname()}",
            pool="threads",
            concurrency=settings.webhook_concurrency,
            queues=[keys.WEBHOOK_QUEUE],
            loglevel="WARNING",
            without_gossip=True,
            without_mingle=True,
            quiet=True,
        )
        signals.worker_shutting_down.connect(stop, weak=False)  # by a signal before it was ready

        def begin(**_: object) -> None:
            _take_signals(stop)
            dispatcher.start()

        signals.worker_ready.connect(begin, weak=False)
        keeper.start()
        watch_lifeline(kill_after_s=settings.webhook_timeout_s + _AFTER_DRAIN_S)
        try:
            worker.start()
        finally:
            stop()
            dispatcher.close()
            keeper.close()
            if tracing is not None:
                tracing.close()
    if outdated.advice:
        raise ServerRefused(outdated.advice)
    return int(worker.exitcode or 0)


def _spans(tracing: Tracing | None) -> WebhookSpans | None:
    if tracing is None:
        return None
    from worker.webhooks.spans import WebhookSpans

    return WebhookSpans(tracing)


def required_secrets(settings: Settings) -> tuple[str, ...]:
    """The secrets to sign with. Raises SettingsError where there is none."""
    secrets = webhook_secrets(settings)
    if not secrets:
        raise SettingsError(
            "CARPOOL_WEBHOOK_SECRET is not set, and webhooks are not sent without a signature. "
            "Make one with: echo whsec_$(openssl rand -base64 32)"
        )
    return secrets


def _take_signals(stop: Callable[[], None]) -> None:
    """Take the signals over from Celery, which would print a line that is none of a log."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and celery_state.should_stop is not None:
            os._exit(128 + number)
        stop()
        setattr(celery_state, "should_stop", os.EX_OK)  # noqa: B010 - its stub says None

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


class _Outdated:
    """All others have gone on to a ledger that this release does not read: drain, and say so."""

    def __init__(self) -> None:
        self.advice = ""

    def drain(self, advice: str) -> None:
        self.advice = advice
        terminate_self()
