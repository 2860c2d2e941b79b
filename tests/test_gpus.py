"""One worker per GPU: which GPUs there are, who gets which, and the lock between workers that were started apart."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from ops.device_plan import find_gpus, plan_devices
from ops.errors import ExitCode, PreconditionError
from ops.instance import DataDir
from ops.up import make_plan
from tasks.settings import Settings
from tests.fake_nvidia import UUIDS, fake_nvidia_smi, listing
from tests.instance import Instance, carpool
from tests.service import Service, eventually
from tests.tiny_models import save_tiny_model
from worker.gpus import Gpu, GpuError, GpuLock, count_as_listed, list_gpus, lock_gpu, parse_listing, visible_gpus

FOUR = parse_listing(listing(UUIDS))


def names(gpus: list[Gpu]) -> list[str]:
    return [gpu.uuid for gpu in gpus]


# --- which GPUs there are ---------------------------------------------------------------------------------------------


def test_gpus_are_listed_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 3))
    assert list_gpus() == [Gpu("NVIDIA H200", uuid) for uuid in UUIDS[:3]]
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 3, exit_code=9))
    assert list_gpus() == [], "its driver is not loaded"


def test_without_nvidia_smi_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus(tmp_path / "none") == []
    for place, uuid in (("0000:d8:00.0", UUIDS[1]), ("0000:3b:00.0", UUIDS[0])):
        folder = tmp_path / "gpus" / place
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA H200\nIRQ:   42\nGPU UUID: \t {uuid}\n")
    assert list_gpus(tmp_path / "gpus") == [Gpu("NVIDIA H200", uuid) for uuid in UUIDS[:2]]


def test_slices_of_a_gpu_are_not_gpus_and_can_be_named() -> None:
    text = listing(UUIDS[:1]) + "  MIG 3g.20gb     Device  0: (UUID: MIG-5c89852c-d268)\n" + "GPU 1: Old\n"
    gpus = parse_listing(text)
    assert gpus == [Gpu("NVIDIA H200", UUIDS[0], ("MIG-5c89852c-d268",)), Gpu("Old", "GPU-1")]
    assert names(visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-5c89"})) == ["MIG-5c89852c-d268"]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 1 , 0 ", [1, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("", []),
        ("1,-1,2", [1]),
        ("1,1", []),
        ("GPU-bbbb0000-2222,0", [1, 0]),
        ("GPU-bbbb", [1]),
        ("GPU-cccc", []),
        ("GPU-cccc4", [3]),
        ("nonsense", []),
    ],
)
def test_visible_are_those_that_cuda_would_see_in_its_order(visible: str | None, found: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert names(visible_gpus(FOUR, environ)) == [UUIDS[n] for n in found]


def test_cuda_counts_as_nvidia_smi_does_unless_the_user_says_otherwise() -> None:
    environ: dict[str, str] = {}
    count_as_listed(environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    own = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    count_as_listed(own)
    assert own == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


# --- who gets which ---------------------------------------------------------------------------------------------------


def settings_of(workers: int, device: str, *, share: bool = False, engine: str = "transformers") -> Settings:
    return Settings.model_validate({"workers": workers, "device": device, "share_gpus": share, "engine": engine})


@pytest.mark.parametrize(
    ("workers", "device", "gpus", "share", "plan"),
    [
        (2, "auto", 2, False, ["cuda:0", "cuda:1"]),
        (2, "auto", 4, False, ["cuda:0", "cuda:1"]),
        (2, "cuda", 2, False, ["cuda:0", "cuda:1"]),
        (3, "auto", 2, True, ["cuda:0", "cuda:1", "cuda:0"]),
        (2, "cuda:1", 2, True, ["cuda:1", "cuda:1"]),
        (1, "cuda:1", 2, False, ["cuda:1"]),
        (1, "auto", 2, False, ["auto"]),
        (3, "auto", 0, False, ["auto"] * 3),
        (3, "cpu", 2, False, ["cpu"] * 3),
        (1, "cuda:1", 0, False, ["cuda:1"]),
        (0, "auto", 2, False, []),
    ],
)
def test_workers_are_spread_over_the_gpus(workers: int, device: str, gpus: int, share: bool, plan: list[str]) -> None:
    assert plan_devices(settings_of(workers, device, share=share), FOUR[:gpus]) == plan


@pytest.mark.parametrize(
    ("workers", "device", "gpus", "cause", "fix"),
    [
        (3, "auto", 2, "--workers 3 need a GPU each, and this machine has 2 visible GPUs", "--workers 2"),
        (2, "auto", 1, "--workers 2 need a GPU each, and this machine has 1 visible GPU", "--share-gpus"),
        (3, "cuda", 2, "--workers 3 need a GPU each", "CARPOOL_SHARE_GPUS=1"),
        (2, "cuda", 0, "--workers 2 with --device cuda need a GPU each, and nvidia-smi -L lists none", "--device cpu"),
        (2, "cuda:1", 2, "--workers 2 with --device cuda:1 would load 2 models on one GPU", "--device auto"),
        (2, "cuda:0", 0, "--workers 2 with --device cuda:0 would load 2 models on one GPU", "--share-gpus"),
        (1, "cuda:2", 2, "--device cuda:2 names GPU 2, and this machine has 2 visible GPUs", "cuda:0 to cuda:1"),
    ],
)
def test_two_models_on_one_gpu_are_refused_with_the_numbers(
    workers: int, device: str, gpus: int, cause: str, fix: str
) -> None:
    with pytest.raises(PreconditionError) as refused:
        plan_devices(settings_of(workers, device), FOUR[:gpus])
    assert cause in refused.value.cause
    assert fix in refused.value.fix


def test_the_simulated_engine_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 1))
    settings = settings_of(3, "cuda:0", engine="simulated")
    assert find_gpus(settings) == []
    assert plan_devices(settings, find_gpus(settings)) == ["cuda:0"] * 3
    assert lock_gpu(settings, "w", FOUR) is None


def test_each_worker_of_up_is_told_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    settings = settings_of(2, "auto").model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    data = DataDir(tmp_path / "data")
    data.create()
    with ExitStack() as stack:
        plan = make_plan(settings, data, stack, plan_devices(settings, find_gpus(settings)))
    workers = [spec for spec in plan.others if spec.role == "worker"]
    assert [spec.environment["CARPOOL_DEVICE"] for spec in workers] == ["cuda:0", "cuda:1"]
    assert {spec.environment["CUDA_VISIBLE_DEVICES"] for spec in workers} == {"2,0"}
    api = next(spec for spec in plan.others if spec.role == "api")
    assert api.environment["CARPOOL_DEFAULT_MODEL"] == settings.pool


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--workers", "3"), "--workers 3 need a GPU each, and this machine has 2 visible GPUs"),
        (("--workers", "2", "--device", "cuda:1"), "would load 2 models on one GPU"),
        (("--device", "cuda:2"), "names GPU 2, and this machine has 2 visible GPUs"),
    ],
)
def test_up_refuses_before_anything_starts(tmp_path: Path, options: tuple[str, ...], cause: str) -> None:
    settings = {"PATH": fake_nvidia_smi(tmp_path / "bin", 2)}
    model = save_tiny_model(tmp_path / "model")
    arguments = ("--model", str(model), "--port", "0", "--data-dir", str(tmp_path / "data"))
    done = carpool("up", *arguments, *options, settings=settings)
    assert done.returncode == ExitCode.PRECONDITION
    assert done.stderr.splitlines()[-1].startswith("Error: --")
    assert cause in done.stderr
    assert not (tmp_path / "data" / "run.json").exists()


def test_up_with_the_simulated_engine_has_workers_without_gpus(tmp_path: Path) -> None:
    settings = {"PATH": fake_nvidia_smi(tmp_path / "bin", 1)}
    with Instance(tmp_path, "--workers", "2", settings=settings) as instance:
        instance.ready()
        workers = [process for process in instance.status() if process["role"] == "worker"]
        assert [(worker["state"], worker["device"]) for worker in workers] == [("ready", "cpu")] * 2


# --- the lock ---------------------------------------------------------------------------------------------------------

_HOLD = """
import sys
from pathlib import Path
from worker.gpus import Gpu, GpuLock
with GpuLock(Path(sys.argv[1]), Gpu("NVIDIA H200", sys.argv[2]), 0, "first", share=sys.argv[3] == "share"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holders() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hold(stack: ExitStack, folder: Path, uuid: str, how: str = "alone") -> subprocess.Popen[str]:
    """Another process that holds the GPU until it is killed."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(folder), uuid, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def take(folder: Path, uuid: str, *, share: bool = False, number: int = 0) -> None:
    """Take the lock and let it go, or be refused."""
    with GpuLock(folder, Gpu("NVIDIA H200", uuid), number, "second", share=share):
        pass


def test_a_second_engine_on_a_gpu_is_refused_until_the_first_process_is_dead(
    tmp_path: Path, holders: ExitStack
) -> None:
    first = hold(holders, tmp_path, UUIDS[0])
    with pytest.raises(GpuError) as refused:
        take(tmp_path, UUIDS[0])
    expected = f"cuda:0 (NVIDIA H200) already has the model of first (process {first.pid})"
    assert refused.value.cause == expected
    assert "--device" in refused.value.fix
    assert "--share-gpus" in refused.value.fix
    take(tmp_path, UUIDS[1])
    first.send_signal(signal.SIGKILL)
    first.wait()
    take(tmp_path, UUIDS[0])
    take(tmp_path, UUIDS[0])


def test_the_same_gpu_under_another_number_is_the_same(tmp_path: Path, holders: ExitStack) -> None:
    hold(holders, tmp_path, UUIDS[2])
    with pytest.raises(GpuError, match=r"^cuda:5 "):
        take(tmp_path, UUIDS[2], number=5)


@pytest.mark.parametrize("how", ["alone", "share"])
def test_who_is_told_to_share_may_and_who_is_not_is_refused_whoever_was_first(
    tmp_path: Path, holders: ExitStack, how: str
) -> None:
    first = hold(holders, tmp_path, UUIDS[0], how)
    take(tmp_path, UUIDS[0], share=True)
    second = hold(holders, tmp_path, UUIDS[0], "share")
    first.kill()
    first.wait()
    with pytest.raises(GpuError):
        take(tmp_path, UUIDS[0])
    second.kill()
    second.wait()
    take(tmp_path, UUIDS[0])


def test_a_folder_that_cannot_be_written_is_named_with_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GpuError, match="CARPOOL_CACHE_DIR"):
        take(tmp_path / "file", UUIDS[0])


def test_the_lock_is_of_the_gpu_that_the_device_names(tmp_path: Path) -> None:
    def locked(device: str, gpus: list[Gpu]) -> Any:
        settings = settings_of(1, device).model_copy(update={"cache_dir": tmp_path})
        return lock_gpu(settings, "w", gpus)

    assert locked("cpu", FOUR) is None
    assert locked("cuda:1", []) is None, "none can be listed: the engine will say what it sees"
    with pytest.raises(GpuError, match="this machine has 2 visible GPUs"):
        locked("cuda:2", FOUR[:2])
    for device, uuid in (("auto", UUIDS[0]), ("cuda", UUIDS[0]), ("cuda:1", UUIDS[1])):
        with locked(device, FOUR):
            (file,) = (tmp_path / "gpus").glob("GPU-*.lock")
            assert file.stem == uuid
        file.unlink()


def test_a_worker_holds_its_gpu_over_restarts_of_its_child_and_others_are_refused_by_name(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's build for the CPU: `auto` is then the CPU, and the lock is taken for the GPU that is listed."""
    path = fake_nvidia_smi(tmp_path / "bin", 2)
    monkeypatch.setenv("PATH", path)
    model = save_tiny_model(tmp_path / "model")
    engine = {"engine": "transformers", "model": str(model), "dtype": "float32", "cache_dir": str(tmp_path / "cache")}
    environment = {f"CARPOOL_{name.upper()}": value for name, value in engine.items()}

    def second(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        settings = {**environment, "PATH": path, "CARPOOL_REDIS_URL": redis_url, **variables}
        return carpool("worker", "--name", "second", *options, settings=settings)

    with Service(redis_url, tmp_path, **engine) as service:
        first = service.worker("first")
        # CUDA_VISIBLE_DEVICES makes the second GPU cuda:0 and the first one cuda:1
        for options, visible, device in (((), "0,1", "cuda:0"), (("--device", "cuda:1"), "1,0", "cuda:1")):
            done = second(*options, CUDA_VISIBLE_DEVICES=visible)
            assert done.returncode == ExitCode.PRECONDITION, done.stderr
            cause = f"{device} (NVIDIA H200) already has the model of first (process {first.pid})"
            assert cause in done.stderr
        (info,) = service.list_workers()
        assert info.child_pid is not None
        psutil.Process(info.child_pid).kill()
        assert second().returncode == ExitCode.PRECONDITION
        eventually("it has another child", lambda: _child(service) not in (None, info.child_pid))
        assert second().returncode == ExitCode.PRECONDITION
        service.worker("told so", share_gpus=True).end()
        first.signal(signal.SIGKILL)
        first.wait()
        service.worker("third")


def _child(service: Service) -> int | None:
    return next((info.child_pid for info in service.list_workers() if info.state == "ready"), None)


def test_a_device_that_is_none_is_refused_when_the_settings_are_read() -> None:
    with pytest.raises(ValidationError, match="auto, cpu, cuda or cuda:N"):
        Settings(device="gpu:0")
