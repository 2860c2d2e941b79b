"""The ledger and real generation workers of one test, each worker a process of its own with its own model process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import redis

from ops.process import with_parent_death_signal
from tasks import keys
from tasks.acceptance import job_acceptance
from tasks.app import CarpoolCelery, create_celery
from tasks.entries import Entry, decode
from tasks.invitations import invitation_template
from tasks.job_request import JobRequest
from tasks.keeper import Keeper
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.registry import ModelInfo, WorkerInfo, list_workers, register_model
from tasks.settings import Settings
from worker.simulation import Draws, token_text

BOUND_S = 40.0
ROOT = Path(__file__).parent.parent
_WORKER = """
import sys
from tasks.settings import load_settings
from worker.main import run
sys.exit(run(load_settings(), sys.argv[1]))
"""


def eventually(what: str, holds: Callable[[], Any], bound_s: float = BOUND_S) -> Any:
    """Wait until `holds()` is true, and return it. Only for states that no event announces."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        found = holds()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {bound_s:g} s: {what}")


def simulated_text(prompt: str, seed: int, tokens: int) -> str:
    """What the simulated engine says, computed apart from it."""
    draws = Draws(prompt, seed)
    return "".join(token_text(draws.token_id(position)) for position in range(1, tokens + 1))


class WorkerProcess:
    """One generation worker. `root` is the folder whose packages it runs."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str], root: Path = ROOT) -> None:
        self.name = name
        self.log = folder / f"{name}-{uuid.uuid4().hex[:6]}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-c", _WORKER, name], signal.SIGKILL),
                cwd=root,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def wait(self, bound_s: float = BOUND_S) -> int:
        return self._process.wait(bound_s)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()


class Service:
    """Submits, watches and cancels jobs through the ledger, and owns the workers that a test starts."""

    def __init__(self, redis_url: str, folder: Path, **settings: Any) -> None:
        given = {"engine": "simulated", "simulated_step_ms": 0, "redis_url": redis_url, "drain_s": 5, **settings}
        self.settings = Settings(**given)
        self.folder = folder
        self.client = connect(self.settings)
        self.ledger = SyncLedger(self.client, self.settings)
        self.celery: CarpoolCelery = create_celery(self.settings)
        self.workers: list[WorkerProcess] = []
        self._keeper = Keeper(self.settings, invitation_template(self.celery))

    def __enter__(self) -> Self:
        pool = self.settings.pool
        register_model(self.client, ModelInfo(pool, pool, self.settings.engine, registered_at=time.time()))
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()
        self._keeper.close()
        self.celery.close()
        self.client.close()

    def stop_keeping(self) -> None:
        """From here on the workers alone look at what is due."""
        self._keeper.close()

    def worker(
        self,
        name: str = "worker-1",
        *,
        ready: bool = True,
        ready_s: float = BOUND_S,
        root: Path = ROOT,
        **settings: Any,
    ) -> WorkerProcess:
        """Start a worker of the packages in `root`; with `ready`, return once its model is loaded."""
        environment = self.settings.model_copy(update=settings).renders_as_environment
        for key, value in settings.items():
            environment[f"CARPOOL_{key.upper()}"] = str(value)
        worker = WorkerProcess(name, self.folder, environment, root)
        self.workers.append(worker)
        if ready:
            eventually(f"{name} is ready", lambda: self._is_ready(worker), ready_s)
        return worker

    def _is_ready(self, worker: WorkerProcess) -> bool:
        if worker.has_ended:
            raise AssertionError(f"{worker.name} ended:\n{worker.log.read_text()}")
        return any(info.pid == worker.pid and info.state == "ready" for info in self.list_workers())

    def list_workers(self) -> list[WorkerInfo]:
        return list_workers(self.client)

    def riding(self) -> int:
        """Slots that are taken, by the workers' own word."""
        return sum(worker.slots - worker.free for worker in self.list_workers())

    def submit(self, prompt: str = "Hello, I am", *, id: str | None = None, **fields: Any) -> str:
        """Accept a job; returns its id."""
        id = id or str(uuid.uuid4())
        request = JobRequest(prompt=prompt, **{"seed": 7, "max_tokens": 10, **fields})
        self.ledger.run(self.ledger.calls.accept(job_acceptance(id, self.settings.pool, request, self.settings)))
        self._keeper.wake(self.settings.pool)
        return id

    def cancel(self, id: str) -> str:
        return self.ledger.run(self.ledger.calls.cancel(id))

    def view(self, id: str) -> dict[str, Any]:
        (view,) = self.ledger.run(self.ledger.calls.view([id]))
        assert view is not None, f"no job {id}"
        return view

    def entries(self, id: str) -> list[tuple[str, Entry]]:
        """The whole log, with entry ids."""
        log: Any = self.client.xrange(keys.log(id))
        return [(entry_id, decode(fields["d"])) for entry_id, fields in log]

    def wait_for_entry(self, id: str, wanted: Callable[[Entry], bool], bound_s: float = BOUND_S) -> Entry:
        """Block on the job's log until an entry is as wanted."""
        until = time.monotonic() + bound_s
        cursor = "0-0"
        while (left := until - time.monotonic()) > 0:
            try:
                found: Any = self.client.xread({keys.log(id): cursor}, block=max(1, round(min(left, 1) * 1000)))
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.05)  # the server is away, as this test wants
                continue
            for entry_id, fields in found[0][1] if found else []:
                cursor = entry_id
                entry = decode(fields["d"])
                if wanted(entry):
                    return entry
        logs = "\n".join(worker.log.read_text() for worker in self.workers)
        raise AssertionError(f"job {id}: not within {bound_s:g} s; {self.view(id)}\n{logs}")

    def wait_for_token(self, id: str, n: int) -> None:
        """Until the log holds token `n`."""
        self.wait_for_entry(id, lambda entry: entry.kind == "tokens" and entry.n >= n)

    def wait_for_end(self, id: str, bound_s: float = BOUND_S) -> dict[str, Any]:
        """Until the job has ended; returns its view."""
        self.wait_for_entry(id, lambda entry: entry.kind == "end", bound_s)
        return self.view(id)

    def assert_whole(self, id: str) -> None:
        """Each token once and in order, one end and it is last, and the text is the fold of the log."""
        entries = [entry for _, entry in self.entries(id)]
        assert [entry.kind for entry in entries].count("end") == 1
        assert entries[-1].kind == "end"
        assert entries[0].kind == "marker" or len(entries) == 1
        have = 0
        for entry in entries:
            if entry.kind == "tokens":
                assert entry.first == have + 1, f"token {entry.first} follows token {have}"
            assert entry.n >= have
            have = entry.n
        assert self.view(id)["text"] == "".join("".join(entry.text) for entry in entries)

    def keys_without_ttl(self) -> set[str]:
        """Keys that would stay for ever, but for the broker's own and those that are constant in number."""
        names = {str(name) for name in self.client.keys("*")}
        kept = {keys.MODELS, keys.SCHEMA, keys.UNACKED, keys.UNACKED_INDEX, keys.UNACKED_MUTEX}
        kept |= {keys.API_KEYS, keys.API_KEYS_REVISION}
        return {
            name
            for name in names - kept
            if self.client.ttl(name) == -1 and not name.startswith(("_kombu.", "carpool.")) and name != "carpool"
        }
