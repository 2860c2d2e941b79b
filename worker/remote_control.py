"""Celery's `revoke` and `terminate` (Flower's buttons too) become cancels in the ledger, which are durable and true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog
from celery.utils.functional import maybe_list
from celery.worker.control import control_command

from tasks.app import CarpoolCelery
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.settings import Settings

_log = structlog.get_logger("carpool.celery")


def install(celery: CarpoolCelery, settings: Settings) -> None:
    """Replace the two commands in this process's worker. Celery's own would store REVOKED while the job still rides."""
    client = connect(settings)
    ledger = SyncLedger(client, settings)

    def cancel(ids: Iterable[str]) -> dict[str, str]:
        answers = {id: ledger.run(ledger.calls.cancel(id)) for id in ids}
        _log.info("cancelled_by_remote_control", answers=answers)
        return {"ok": ", ".join(f"{id}: {answer}" for id, answer in answers.items())}

    def revoke(state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **_: Any) -> dict[str, str]:
        """Cancel jobs by id."""
        return cancel(str(id) for id in maybe_list(task_id) or [])

    def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, str]:
        """Cancel jobs by id."""
        return cancel(str(id) for id in maybe_list(task_id) or [])

    control_command(name="revoke", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")(revoke)
    control_command(
        name="terminate", variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
    )(terminate)
