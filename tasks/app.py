"""The Celery application: `celery -A tasks.app …`. The message of a task is an invitation, the ledger is the truth."""

from __future__ import annotations

from typing import Any

from celery import Celery

from tasks import keys
from tasks.settings import Settings, load_settings


def celery_config(settings: Settings) -> dict[str, Any]:
    """Celery's configuration for an installation."""
    return {
        "broker_url": settings.redis_url,
        "broker_transport": "tasks.broker:CarpoolTransport",
        "result_backend": settings.redis_url,
        "broker_transport_options": {
            "visibility_timeout": settings.visibility_s,
            # apps that share a broker database get the shortest visibility timeout of all: ours are named apart
            "unacked_key": keys.UNACKED,
            "unacked_index_key": keys.UNACKED_INDEX,
            "unacked_mutex_key": keys.UNACKED_MUTEX,
            # redis-py's own default of 5 s would cut kombu's blocking reads
            "socket_timeout": max(30.0, settings.redis_timeout_s),
            "socket_connect_timeout": settings.redis_timeout_s,
            "socket_keepalive": True,
        },
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_default_queue": keys.NATIVE_QUEUE,
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "result_expires": settings.retention_s,
        "task_acks_late": True,
        "task_track_started": True,
        "worker_pool": "solo",
        "worker_concurrency": 1,
        # one unacknowledged message is one slot
        "worker_prefetch_multiplier": settings.max_batch_size,
        "worker_enable_prefetch_count_reduction": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


class CarpoolCelery(Celery):
    """A Celery application that knows the LLM engine of its process, where it is a generation worker."""

    llm_engine: Any = None


def plain_celery(settings: Settings | None = None) -> CarpoolCelery:
    """An application that knows no task yet; without settings, for those of the environment, read when first needed."""
    celery = CarpoolCelery("carpool", set_as_current=settings is None)
    if settings is None:
        celery.add_defaults(lambda: celery_config(load_settings()))
    else:
        celery.conf.update(celery_config(settings))
    return celery


def create_celery(settings: Settings | None = None) -> CarpoolCelery:
    """An application with the task of generation workers; the settings are as of `plain_celery`."""
    celery = plain_celery(settings)

    @celery.task(name=keys.TASK_NAME, Strategy="worker.strategy:strategy", typing=False, shared=False)
    def generate(*args: object, **job: object) -> None:
        """Runs inside the LLM engine; a worker that is not Carpool's own ends here."""
        raise RuntimeError("carpool.generate runs in Carpool's worker only. Start one: carpool worker")

    return celery


app = create_celery()
