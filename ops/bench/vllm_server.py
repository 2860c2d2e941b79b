"""Carpool with a vLLM worker against vLLM's own API server: the same model, prompts, lengths, sequences and KV space.

Both are up for the whole run and are asked in turn, by the same clients on the same cores, through `/v1/completions`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import psutil

from ops.bench.clients import StreamLoad, stream_side_by_side
from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.instance import BenchInstance
from ops.bench.prompts import PROMPTS
from ops.bench.report import Figure, Target, at_least, at_most, median_of, ratio_of
from ops.embedded_redis import free_port
from ops.errors import OperationError
from ops.instance import Role
from ops.process import with_parent_death_signal
from tasks.settings import Settings

CLIENTS: Final = (1, 4, 16)
SLOTS: Final = 16
MAX_TOKENS: Final = 50
CONTEXT_LENGTH: Final = 2048
KV_BYTES: Final = 2**30
#: One client alone gets several requests, so that a round is no shorter than the others.
_REQUESTS: Final = {1: 4, 4: 24, 16: 48}
_PATH: Final = "/v1/completions"
_READY_S: Final = 600.0
_PROBE_S: Final = 0.2
_STOP_S: Final = 30.0
_THROUGHPUT: Final = at_least(0.97)
_FIRST_TOKEN: Final = at_most(10)
_BETWEEN_TOKENS: Final = at_most(2)
_MODEL: Final = "bench"
#: How tokens are drawn, and what both sides are asked for.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.7, "top_p": 0.95},
}
_ROLES: Final[tuple[Role, ...]] = ("redis", "api", "worker", "model-worker")


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server`; it ends with the block.

    Args:
        model: a folder or a name on the hub.
        arguments: of the server, by their names there.
    """

    def __init__(self, model: str, arguments: Mapping[str, str]) -> None:
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-vllm-server-")
        self._log = Path(self._folder.name) / "server.log"
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port), "--disable-uvicorn-access-log"]
        for name, value in arguments.items():
            self._command += [f"--{name}", value] if value else [f"--{name}"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal(self._command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
                start_new_session=True,
            )
        try:
            self._await_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def _await_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _READY_S
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(_PROBE_S)  # a process of its own, which has no way to call us
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        raise OperationError("vLLM's server is not ready", "Its last words are above", details=tuple(lines))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        _, alive = psutil.wait_procs(children, timeout=_STOP_S)
        for child in alive:
            child.kill()
        if process.poll() is None:
            process.kill()
            process.wait()
        self._folder.cleanup()


@dataclass(slots=True)
class _Side:
    """One of the two, and what was measured of it, by the number of clients."""

    name: str
    url: str
    processes: Sequence[psutil.Process]
    loads: dict[int, list[StreamLoad]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)

    def measure(self, num_clients: int, bodies: Sequence[Mapping[str, Any]]) -> None:
        before = self._cpu_s()
        load = stream_side_by_side(self.url, num_clients, bodies, _PATH)
        self.cpu_s.setdefault(num_clients, []).append(1000 * (self._cpu_s() - before) / load.num_tokens)
        self.loads.setdefault(num_clients, []).append(load)

    def tokens_per_s(self, num_clients: int) -> list[float]:
        return [load.tokens_per_s for load in self.loads[num_clients]]

    def first_token_ms(self, num_clients: int) -> list[float]:
        """The median of each round."""
        return [
            1000 * median(stream.first_token - stream.started for stream in load.streams)
            for load in self.loads[num_clients]
        ]

    def between_tokens_ms(self, num_clients: int) -> list[float]:
        """The median of each round, of the time that a stream takes a token after its first."""
        return [
            1000
            * median((stream.ended - stream.first_token) / max(1, stream.num_tokens - 1) for stream in load.streams)
            for load in self.loads[num_clients]
        ]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(one.user + one.system for one in times)


def measure(options: Options) -> Findings:
    if options.quick:
        raise OperationError("This bench has no --quick: it needs vLLM and a model", "Leave --quick out")
    arguments = {
        "served-model-name": _MODEL,
        "max-num-seqs": str(SLOTS),
        "max-model-len": str(CONTEXT_LENGTH),
        "kv-cache-memory-bytes": str(KV_BYTES),
    }
    settings = {
        **options.engine_settings,
        "served_model_name": _MODEL,
        "max_batch_size": SLOTS,
        "engine_args": f"max_model_len={CONTEXT_LENGTH} kv_cache_memory_bytes={KV_BYTES}",
    }
    figures: list[Figure] = []
    # vLLM's server leaves a core to its other processes, and so must the worker that is compared with it.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    say("starting Carpool with a vLLM worker")
    with BenchInstance(settings) as instance:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            model, dtype = pool.apply(_model_files, (settings,))
        say("starting vLLM's own server")
        with VllmServer(model, {**arguments, "dtype": dtype}) as server:
            ours = _Side("Carpool", instance.url, _processes_of(instance))
            theirs = _Side("vLLM", server.url, server.processes())
            for kind, body in _KINDS.items():
                _compare(ours, theirs, options.rounds, body)
                figures += _figures(kind, ours, theirs)
                for side in (ours, theirs):
                    side.loads.clear()
                    side.cpu_s.clear()
    setup = {
        "slots": SLOTS,
        "max_tokens": MAX_TOKENS,
        "context_length": CONTEXT_LENGTH,
        "kv_bytes": KV_BYTES,
        "threads": threads,
    }
    return Findings(figures, setup)


def _model_files(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Folder, or name on the hub, and number format of what the worker serves. Run in a process of its own: torch."""
    used = Settings(**settings)
    manager = importlib.import_module("worker.model_manager")
    source = importlib.import_module("worker.engines.model_source").find_model(used.model)
    device = manager.choose_device(used.device)
    dtype = manager.choose_dtype(used.dtype, device)
    pretrained = importlib.import_module("worker.engines.pretrained")
    folder, _ = pretrained.files_of(source, used, device, dtype, lambda phase, fraction: None)
    return str(folder), str(dtype).removeprefix("torch.")


def _processes_of(instance: BenchInstance) -> list[psutil.Process]:
    """All that work for a request; the supervisor does not."""
    found = [identity.process() for role in _ROLES for identity in instance.processes(role)]
    processes = [process for process in found if process is not None]
    return [*processes, *(child for process in processes for child in process.children() if child not in processes)]


def _compare(ours: _Side, theirs: _Side, rounds: int, body: Mapping[str, Any]) -> None:
    for number in range(-1, rounds):
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        for num_clients in CLIENTS:
            sides = (ours, theirs) if number % 2 else (theirs, ours)
            for side in sides:
                side.measure(num_clients, _bodies(_REQUESTS[num_clients], body))
        if number < 0:
            for side in (ours, theirs):
                side.loads.clear()
                side.cpu_s.clear()


def _bodies(count: int, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    common = {"model": _MODEL, "max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    return [{**common, **body, "prompt": PROMPTS[n % len(PROMPTS)], "seed": n} for n in range(count)]


def _figures(kind: str, ours: _Side, theirs: _Side) -> list[Figure]:
    figures: list[Figure] = []
    for count in CLIENTS:
        what = f"{kind}, {count} clients" if count > 1 else f"{kind}, 1 client"
        figures += [
            ratio_of(
                f"tokens/s, {what}: Carpool / vLLM", ours.tokens_per_s(count), theirs.tokens_per_s(count), _THROUGHPUT
            ),
            median_of(f"tokens/s, {what}: Carpool", ours.tokens_per_s(count), "tokens/s"),
            median_of(f"tokens/s, {what}: vLLM", theirs.tokens_per_s(count), "tokens/s"),
            _difference(f"first token, {what}", ours.first_token_ms(count), theirs.first_token_ms(count), _FIRST_TOKEN),
            median_of(f"first token, {what}: vLLM", theirs.first_token_ms(count), "ms"),
            _difference(
                f"between tokens, {what}",
                ours.between_tokens_ms(count),
                theirs.between_tokens_ms(count),
                _BETWEEN_TOKENS,
            ),
            median_of(f"between tokens, {what}: vLLM", theirs.between_tokens_ms(count), "ms"),
            median_of(f"processor s per 1,000 tokens, {what}: Carpool", ours.cpu_s[count], "s"),
            median_of(f"processor s per 1,000 tokens, {what}: vLLM", theirs.cpu_s[count], "s"),
        ]
    return figures


def _difference(name: str, ours: Sequence[float], theirs: Sequence[float], target: Target) -> Figure:
    return median_of(
        f"{name}: Carpool - vLLM", [one - other for one, other in zip(ours, theirs, strict=True)], "ms", target
    )


if __name__ == "__main__":
    run_bench("vllm_server", __doc__, measure, engine="vllm")
