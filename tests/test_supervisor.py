"""What dies is started again, what cannot work is given up with its cause, what is stopped leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from ops.child import Child, ChildGaveUp, ChildSpec, RestartPolicy
from ops.display import Display
from ops.embedded_redis import EmbeddedRedis
from ops.errors import PreconditionError
from ops.instance import DataDir, FileLock, ProcessEntry, RunFile, write_private
from ops.logs import KEEP, ChildLog
from ops.process import ProcessIdentity, describe_exit
from ops.redis_guardian import read_server
from ops.up import await_leftovers, carpool_command
from tasks.lifeline import LIFELINE_VARIABLE, watch_lifeline
from tasks.settings import Settings

pytestmark = pytest.mark.timeout(60)


def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Wait for another process to have done something that it cannot tell us."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


async def until_async(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(until, condition, what)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_file(drain_s: float) -> RunFile:
    return RunFile(
        "http://127.0.0.1:8000",
        "redis://:secret@127.0.0.1:1/0",
        True,
        "m",
        "simulated",
        drain_s,
        "2026-01-01T00:00:00Z",
    )


class Recorded:
    """A child that runs a small program, and the states it went through."""

    def __init__(self, folder: Path, program: str, *, stop_s: float = 10, policy: RestartPolicy | None = None) -> None:
        self.entries: list[ProcessEntry] = []
        script = folder / "program.py"
        script.write_text(textwrap.dedent(program))
        spec = ChildSpec("worker", "worker-1", (sys.executable, "-u", str(script)), os.environ, stop_s)
        self.child = Child(spec, ChildLog(folder / "worker-1.log"), self.entries.append, policy or RestartPolicy())

    @property
    def states(self) -> list[str]:
        return [entry.state for entry in self.entries]

    def log_has(self, text: str) -> bool:
        return any(text in line for line in self.child.log.tail(100))


# --- restart policy --------------------------------------------------------------------------------------------------


def test_waits_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_s=0.5, longest_s=3, most_exits=10)
    assert [policy.after_death(1, None) for _ in range(5)] == [0.5, 1, 2, 3, 3]


def test_a_process_that_was_healthy_begins_at_the_first_wait_again() -> None:
    policy = RestartPolicy(first_s=0.5, healthy_s=10)
    policy.after_death(1, None)
    policy.after_death(1, 9.9)
    assert policy.after_death(1, 10.1) == 0.5


def test_a_process_that_is_killed_from_outside_gets_more_tries_than_one_that_ends_by_itself() -> None:
    ending, killed = RestartPolicy(), RestartPolicy()
    assert [ending.after_death(1, None) is None for _ in range(5)] == [False] * 4 + [True]
    assert [killed.after_death(-9, None) is None for _ in range(20)] == [False] * 19 + [True]


def test_kills_from_outside_do_not_use_up_the_tries_of_exits() -> None:
    policy = RestartPolicy()
    for _ in range(10):
        assert policy.after_death(-9, 1.0) is not None
    assert [policy.after_death(1, None) is None for _ in range(5)] == [False] * 4 + [True]


def test_what_was_killed_while_it_served_is_started_again_soon() -> None:
    policy = RestartPolicy()
    assert [policy.after_death(-9, 5.0) for _ in range(6)] == [0.25, 0.5, 1, 2, 2, 2]
    assert policy.after_death(-9, None) == 10


@pytest.mark.parametrize("returncode", [2, 3])
def test_an_exit_code_that_says_hopeless_gets_no_second_try(returncode: int) -> None:
    assert RestartPolicy().after_death(returncode, None) is None
    assert RestartPolicy().after_death(returncode, 5.0) is not None  # it did work: that code means something else


def test_a_process_that_finds_redis_away_is_never_given_up() -> None:
    policy = RestartPolicy()
    assert {policy.after_death(75, None) for _ in range(100)} == {1.0}


def test_an_exit_is_described_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-250) == "killed by signal 250"


# --- a child ---------------------------------------------------------------------------------------------------------


async def test_what_is_killed_is_started_again_and_says_why(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "import time; print('up'); time.sleep(60)")
    life = asyncio.create_task(recorded.child.run())
    await until_async(lambda: recorded.log_has("up"), "the program runs")
    first = recorded.child.entry.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until_async(lambda: recorded.states.count("starting") == 2, "it is started again")
    assert ("restarting", "killed by SIGKILL") in [(entry.state, entry.cause) for entry in recorded.entries]
    assert recorded.child.entry.pid != first
    await recorded.child.stop()
    await life
    assert recorded.states[-1] == "stopped"


async def test_what_dies_again_and_again_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "raise SystemExit('no such weights: /models/x')", policy=RestartPolicy(first_s=0.01))
    with pytest.raises(ChildGaveUp) as caught:
        await recorded.child.run()
    assert caught.value.cause == "worker-1 ended 5 times in a row (last: exit code 1)"
    assert caught.value.details[-1] == "no such weights: /models/x"
    assert recorded.states.count("starting") == 5
    assert recorded.states[-1] == "failed"


async def test_a_drain_lets_the_process_finish(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path,
        """
        import signal, sys, threading
        signal.signal(signal.SIGTERM, lambda *_: (print("drained"), sys.exit(0)))
        print("up")
        threading.Event().wait(60)
        """,
    )
    life = asyncio.create_task(recorded.child.run())
    await until_async(lambda: recorded.log_has("up"), "the program runs")
    await recorded.child.stop()
    await life
    assert recorded.log_has("drained")
    assert recorded.child.entry.cause == "exit code 0"


async def test_a_drain_that_takes_too_long_is_cut(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up")
        time.sleep(60)
        """,
        stop_s=0.3,
    )
    life = asyncio.create_task(recorded.child.run())
    await until_async(lambda: recorded.log_has("up"), "the program runs")
    await recorded.child.stop()
    await life
    assert recorded.child.entry.cause == "killed by SIGKILL"
    assert recorded.log_has('"event": "did_not_drain"')


async def test_a_dead_process_leaves_no_child_of_its_own_behind(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path,
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("grandchild", child.pid)
        time.sleep(60)
        """,
    )
    life = asyncio.create_task(recorded.child.run())
    await until_async(lambda: recorded.log_has("grandchild"), "the program has a child")
    grandchild = int(recorded.child.log.tail(1)[0].split()[1])
    assert recorded.child.entry.pid is not None
    os.kill(recorded.child.entry.pid, signal.SIGKILL)
    await until_async(lambda: gone(grandchild), "its child is ended too")
    await recorded.child.stop()
    await life


async def test_readiness_is_forgotten_when_the_process_dies(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "import time; print('up'); time.sleep(60)")
    life = asyncio.create_task(recorded.child.run())
    await until_async(lambda: recorded.log_has("up"), "the program runs")
    recorded.child.mark_ready()
    await asyncio.wait_for(recorded.child.until_ready(), 1)
    assert recorded.child.entry.state == "running"
    assert recorded.child.entry.pid is not None
    os.kill(recorded.child.entry.pid, signal.SIGKILL)
    await asyncio.wait_for(recorded.child.unready(), 10)
    assert not recorded.child.ready
    await recorded.child.stop()
    await life


# --- logs and files --------------------------------------------------------------------------------------------------


def test_a_log_is_rotated_at_start_and_by_size_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "api.log")
    for run in range(KEEP + 2):
        log.start()
        log.append(f"run {run}")
    older = [f"api.log.{n}" for n in range(1, KEEP + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.log", *older]
    assert (tmp_path / "api.log.1").read_text() == f"run {KEEP}\n"

    descriptor = log.open()
    try:
        os.write(descriptor, b"x" * 1000 + b"\n")
        assert log.rotate_if_large(max_bytes=500)
        os.write(descriptor, b"after\n")
    finally:
        os.close(descriptor)
    assert log.path.read_text() == "after\n"
    assert (tmp_path / "api.log.1").read_text().endswith("x\n")
    assert not log.rotate_if_large(max_bytes=500)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "api.log")
    assert log.tail() == ()
    for n in range(30):
        log.append(f"line {n}\n")
    assert log.tail(2) == ("line 28", "line 29")


def test_the_run_file_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = run_file(drain_s=30)
    run = run.with_process(ProcessEntry("api", "api", "starting", 1, 2.5))
    run = run.with_process(ProcessEntry("worker", "worker-1", "starting"))
    run = run.with_process(ProcessEntry("api", "api", "running", 1, 2.5))
    run.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunFile.read(path) == run
    assert [(entry.name, entry.state) for entry in run.processes] == [("api", "running"), ("worker-1", "starting")]
    assert RunFile.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("content", ["{", '{"v": 99}'])
def test_a_run_file_that_cannot_be_understood_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    write_private(path, content)
    with pytest.raises(PreconditionError, match=r"run\.json"):
        RunFile.read(path)


def test_a_lock_has_one_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.acquire()
    assert not second.acquire()
    assert second.holder() == str(os.getpid())
    first.release()
    assert second.acquire()
    second.release()


def test_an_identity_does_not_take_another_process_for_its_own() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own.alive
    assert not ProcessIdentity(own.pid, own.created - 100).alive


def test_a_new_start_ends_what_an_earlier_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.up.MARGIN_S", 0.1)
    data = DataDir(tmp_path / "data")
    data.create()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        identity = ProcessIdentity.of(left.pid)
        entry = ProcessEntry("worker", "worker-1", "running", identity.pid, identity.created)
        run_file(drain_s=0.1).with_process(entry).write(data.run_file)
        with (tmp_path / "out").open("w") as out:
            await_leftovers(data, Display(out, fancy=False))
        assert gone(left.pid)
        assert "waiting for worker-1" in (tmp_path / "out").read_text()
    finally:
        left.kill()
        left.wait()


# --- the lifeline ----------------------------------------------------------------------------------------------------


def test_a_child_without_a_lifeline_watches_nothing() -> None:
    assert watch_lifeline(environ={}) is None


def test_a_lifeline_that_is_no_descriptor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"CARPOOL_LIFELINE_FD='x'"):
        watch_lifeline(environ={LIFELINE_VARIABLE: "x"})


def test_the_end_of_the_supervisor_is_heard_once_and_not_passed_on() -> None:
    reader, writer = os.pipe()
    heard: list[str] = []
    environment = {LIFELINE_VARIABLE: str(reader)}
    thread = watch_lifeline(lambda: heard.append("dead"), environ=environment)
    assert thread is not None
    assert environment == {}
    assert not os.get_inheritable(reader)
    assert heard == []
    os.close(writer)
    thread.join(10)
    assert heard == ["dead"]


def test_a_child_that_does_not_drain_kills_itself_when_its_supervisor_is_gone() -> None:
    reader, writer = os.pipe()
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "from tasks.lifeline import watch_lifeline; watch_lifeline(kill_after_s=0.2); print('up', flush=True);"
        "time.sleep(60)"
    )
    environment = {**os.environ, LIFELINE_VARIABLE: str(reader)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, pass_fds=(reader,)
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.close(reader)
        os.close(writer)
        assert child.wait(10) == -signal.SIGKILL


# --- the guardian of the embedded server -----------------------------------------------------------------------------


class Guarded:
    """A guardian with its server, and the pipes a supervisor would hold."""

    def __init__(self, folder: Path) -> None:
        self.data = DataDir(folder)
        self.data.create()
        self.redis = EmbeddedRedis.prepare(self.data.redis, Settings())
        self.lifeline, self.lifeline_writer = os.pipe()
        self.tenants, self.tenants_writer = os.pipe()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, drain_s: float = 30) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "CARPOOL_DATA_DIR": str(self.data.root),
            "CARPOOL_DRAIN_S": str(drain_s),
            LIFELINE_VARIABLE: str(self.lifeline),
        }
        process = subprocess.Popen(
            carpool_command("redis", "--tenants-fd", str(self.tenants)),
            env=environment,
            pass_fds=(self.lifeline, self.tenants),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis.url, decode_responses=True, socket_timeout=2)

    def answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def server_pid(self) -> int:
        until(self.answers, "the server answers")
        server = read_server(self.data.redis)
        assert server is not None
        return server.pid

    def supervisor_dies(self) -> None:
        """Close what only the supervisor holds; a tenant may still hold the other pipe."""
        os.close(self.lifeline_writer)
        self.lifeline_writer = -1

    def last_tenant_ends(self) -> None:
        os.close(self.tenants_writer)
        self.tenants_writer = -1

    def close(self) -> None:
        server = read_server(self.data.redis)
        for process in self.processes:
            process.kill()
            process.wait()
        for descriptor in (self.lifeline, self.lifeline_writer, self.tenants, self.tenants_writer):
            if descriptor >= 0:
                os.close(descriptor)
        if server is not None and (left := server.process()) is not None:
            left.kill()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path / "data")
    try:
        yield guarded
    finally:
        guarded.close()


def test_the_embedded_server_asks_for_its_password_and_keeps_what_it_was_given(guarded: Guarded) -> None:
    first = guarded.start()
    guarded.server_pid()
    with redis.Redis(port=guarded.redis.port, socket_timeout=2) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with guarded.client() as client:
        client.set("accepted", "job")
        memory = client.info("memory")
        assert memory["maxmemory_policy"] == "noeviction"
    first.terminate()
    assert first.wait(20) == 0
    again = EmbeddedRedis.prepare(guarded.data.redis, Settings())
    assert again == guarded.redis  # the address of an instance stays
    guarded.start()
    guarded.server_pid()
    with guarded.client() as client:
        assert client.get("accepted") == "job"


def test_the_configuration_is_private(guarded: Guarded) -> None:
    assert guarded.redis.conf.stat().st_mode & 0o777 == 0o600
    assert guarded.data.redis.stat().st_mode & 0o777 == 0o700


def test_the_server_outlives_its_supervisor_until_the_last_tenant_has_ended(guarded: Guarded) -> None:
    guardian = guarded.start()
    server = guarded.server_pid()
    guarded.supervisor_dies()
    with pytest.raises(subprocess.TimeoutExpired):
        guardian.wait(0.5)
    assert guarded.answers()
    guarded.last_tenant_ends()
    assert guardian.wait(20) == 0
    assert gone(server)


def test_a_tenant_that_hangs_does_not_keep_the_server_for_ever(
    guarded: Guarded,
) -> None:
    program = (
        "import sys; from pathlib import Path; import ops.redis_guardian as g; g.MARGIN_S = 0.2;"
        "sys.exit(g.serve(Path(sys.argv[1]), 0.2, int(sys.argv[2])))"
    )
    guardian = subprocess.Popen(
        [sys.executable, "-c", program, str(guarded.data.redis), str(guarded.tenants)],
        env={**os.environ, LIFELINE_VARIABLE: str(guarded.lifeline)},
        pass_fds=(guarded.lifeline, guarded.tenants),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    guarded.processes.append(guardian)
    server = guarded.server_pid()
    guarded.supervisor_dies()
    assert guardian.wait(20) == 0
    assert gone(server)


def test_a_killed_server_ends_its_guardian_so_that_both_are_started_again(guarded: Guarded) -> None:
    guardian = guarded.start()
    os.kill(guarded.server_pid(), signal.SIGKILL)
    assert guardian.wait(20) == -signal.SIGKILL, "the supervisor would take it for an exit, and give up the fifth"


def test_two_guardians_never_run_two_servers_on_one_folder(guarded: Guarded) -> None:
    first = guarded.start()
    server = guarded.server_pid()
    first.kill()
    first.wait()
    guarded.start()
    until(lambda: gone(server), "the orphaned server ends")
    until(guarded.answers, "a new one answers")
    assert guarded.server_pid() != server


def test_a_port_that_someone_else_took_is_exchanged(guarded: Guarded) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", guarded.redis.port))
        other.listen()
        again = EmbeddedRedis.prepare(guarded.data.redis, Settings())
    assert again.port != guarded.redis.port
    assert again.password == guarded.redis.password
