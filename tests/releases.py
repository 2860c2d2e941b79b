"""Copies of Carpool's packages in folders of their own, run as releases beside this one: what a rolling upgrade has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx2

from ops.process import with_parent_death_signal
from tasks import entries
from tasks.settings import Settings
from tests.redis_server import free_port
from tests.service import ROOT, eventually
from worker import messages

PACKAGES = ("api", "tasks", "worker", "ops")
NEXT = entries.VERSION + 1

#: What the next release writes, and only in its own version: a field in the record, in every entry and in a message of
#: the child, there in the middle, so that the messages of two releases cannot be mistaken for each other. At once it
#: has one more parameter, and more to say of models and workers.
_PATCHES = {
    "tasks/entries.py": (
        (f"\nVERSION = {entries.VERSION}\n", f"\nVERSION = {NEXT}\n"),
    ),
    "tasks/lua/acceptance.lua": (
        (
            "    redis.call('SET', text_key(id), '')\n",
            f"    if tonumber(version) >= {NEXT} then redis.call('HSET', record_key(id), 'origin', 'next') end\n"
            "    redis.call('SET', text_key(id), '')\n",
        ),
    ),
    "tasks/lua/claim.lua": (
        (
            "redis.call('XADD', log_key(id), epoch .. '-' .. j.k, 'd', marker)\n",
            f"if tonumber(j.v) >= {NEXT} then marker = string.gsub(marker, '}}$', ',\"warmth\":0.5}}') end\n"
            "redis.call('XADD', log_key(id), epoch .. '-' .. j.k, 'd', marker)\n",
        ),
    ),
    "worker/messages.py": (
        (f"VERSION: Final = {messages.VERSION}\n", f"VERSION: Final = {messages.VERSION + 1}\n"),
        (
            '    id: str\n    ids: tuple[int, ...] = ()\n    texts: tuple[str, ...] = ()\n',
            '    id: str\n    chances: tuple[float, ...] = ()\n'
            '    ids: tuple[int, ...] = ()\n    texts: tuple[str, ...] = ()\n',
        ),
    ),
    "tasks/job_request.py": (
        (
            "    max_tokens: StrictInt | None = Field(\n",
            "    warmth: float | None = None\n    max_tokens: StrictInt | None = Field(\n",
        ),
    ),
    "tasks/registry.py": (
        ('    fingerprint: str = ""\n', '    fingerprint: str = ""\n    family: str = "next"\n'),
        ("    slots: int\n    free: int\n", '    slots: int\n    free: int\n    rack: str = "next"\n'),
    ),
    "worker/sequence.py": (
        ("Delta(self.id, tuple(taken)", "Delta(self.id, (0.5,) * len(taken), tuple(taken)"),
    ),
}  # fmt: skip

#: What it has at the end of a file.
_ADDED = {
    "tasks/entries.py": """

_encode_tokens = encode_tokens


def encode_tokens(*arguments, version=VERSION, **more):
    data = _encode_tokens(*arguments, version=version, **more)
    return data if version < VERSION else data[:-1] + ',"warmth":0.5}'
""",
}


def copy_this_release(folder: Path) -> Path:
    """This release's packages in `folder`."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def upgrade(folder: Path) -> None:
    """Make a copy of this release the next one. Raises ValueError where this release is not as the patches expect."""
    for name, changes in _PATCHES.items():
        source = (folder / name).read_text()
        for old, new in changes:
            if source.count(old) != 1:
                raise ValueError(f"{name} has {old!r} {source.count(old)} times, not once")
            source = source.replace(old, new)
        (folder / name).write_text(source + _ADDED.get(name, ""))


class ApiProcess:
    """The API of the release in `root`, on a free port."""

    def __init__(self, root: Path, folder: Path, settings: Settings) -> None:
        self.port = free_port()
        self._log = folder / f"api-{self.port}.log"
        environment = settings.model_copy(update={"port": self.port}).renders_as_environment
        serve = "from api.server import serve; from tasks.settings import load_settings; serve(load_settings())"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-c", serve], signal.SIGKILL),
                cwd=root,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def client(self) -> httpx2.Client:
        """A client of this API; close it."""
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        with self.client() as client:
            eventually("the API answers", lambda: self._answers(client))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self, client: httpx2.Client) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the API ended:\n{self._log.read_text()}")
        try:
            return client.get("/health/accepting").status_code == 200
        except httpx2.TransportError:
            return False
