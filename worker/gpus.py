"""The GPUs of this machine, found without torch, and the lock that keeps a second engine off one of them.

`cuda:N` is the N-th GPU that CUDA_VISIBLE_DEVICES leaves visible, from 0; a lock is named by the GPU's own UUID, so
that different views of one machine do not hide a clash. CUDA counts GPUs as nvidia-smi does with
CUDA_DEVICE_ORDER=PCI_BUS_ID, which `count_as_listed` sets.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from tasks.settings import Settings

#: A driver that has to wake up first takes seconds; one that takes longer is broken.
_LIST_S: Final = 30.0
#: Where the kernel's driver tells of its GPUs, a folder for each, named by its place on the bus.
_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_GPU: Final = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: ([\w-]+)\))?$")
_MIG: Final = re.compile(r"^\s+MIG .*\(UUID: (MIG-[\w/-]+)\)$")
_DEVICE: Final = re.compile(r"cuda(?::(\d+))?")


class GpuError(Exception):
    """A GPU that cannot be had.

    Attributes:
        cause: what is wrong, with its values.
        fix: one thing to do.
    """

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause}. {fix}")
        self.cause = cause
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a slice of one (MIG). `uuid` is its place in the list where the driver tells none."""

    name: str
    uuid: str
    slices: tuple[str, ...] = ()


def list_gpus(driver: Path = _DRIVER) -> list[Gpu]:
    """All GPUs of this machine in nvidia-smi's order; none where there is no driver.

    Raises:
        GpuError: nvidia-smi does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:  # as in a container that got the driver's libraries alone
        return _of_driver(driver)
    try:
        done = subprocess.run(
            [program, "-L"], check=False, capture_output=True, text=True, timeout=_LIST_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise GpuError(
            f"{program} -L has not answered for {_LIST_S:g} s", "Mend the driver, or keep to the CPU with --device cpu"
        ) from None
    except OSError:
        return []
    # it fails where its driver is not loaded: then CUDA finds none either
    return parse_listing(done.stdout) if done.returncode == 0 else []


def _of_driver(folder: Path) -> list[Gpu]:
    found: list[Gpu] = []
    for file in sorted(folder.glob("*/information")):
        pairs = (line.partition(":") for line in file.read_text().splitlines())
        said = {name.strip(): value.strip() for name, _, value in pairs}
        found.append(Gpu(said.get("Model", "GPU"), said.get("GPU UUID") or f"GPU-{len(found)}"))
    return found


def parse_listing(listing: str) -> list[Gpu]:
    """The GPUs in the output of `nvidia-smi -L`."""
    found: list[Gpu] = []
    for line in listing.splitlines():
        gpu, mig = _GPU.match(line.rstrip()), _MIG.match(line.rstrip())
        if gpu is not None:
            found.append(Gpu(gpu[2], gpu[3] or f"GPU-{gpu[1]}"))
        elif mig is not None and found:
            last = found[-1]
            found[-1] = Gpu(last.name, last.uuid, (*last.slices, mig[1]))
    return found


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: numbers or UUIDs, up to the first that names none."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in map(str.strip, given.split(",")):
        gpu = _named(gpus, name)
        # as CUDA reads it: what comes behind an unknown one is not visible, and one that is named twice hides all
        if gpu is None:
            break
        if gpu in found:
            return []
        found.append(gpu)
    return found


def _named(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if name.startswith("MIG-"):
        for gpu in gpus:
            for uuid in gpu.slices:
                if uuid.startswith(name):
                    return Gpu(f"a slice of {gpu.name}", uuid)
    if name.startswith("GPU-"):
        # a UUID may be cut short, as long as it names one alone
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        return matches[0] if len(matches) == 1 else None
    return None


def count_as_listed(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have CUDA number GPUs in nvidia-smi's order; a user's own order stands."""
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def needs_gpu(settings: Settings) -> bool:
    """Whether the engine may load a model onto a GPU. The simulated one has none to load."""
    return settings.engine != "simulated" and settings.device != "cpu"


def gpu_number(device: str) -> int | None:
    """N of cuda:N, 0 of cuda and auto; None of every other device."""
    if device == "auto":
        return 0
    match = _DEVICE.fullmatch(device)
    return int(match[1] or 0) if match is not None else None


class GpuLock:
    """Says that a worker has, or is about to have, its model on a GPU. Use it as a context; it ends with the process.

    All who have a model on the GPU hold one file with a shared lock. Who has not been told to share takes it
    exclusively first, which shows that nobody is there.

    Args:
        folder: of the lock files; those who are to see each other need the same one.
        number: of the GPU, as in cuda:N.
        holder: told to whoever comes second.
        share: the GPU may have other engines.
    """

    def __init__(self, folder: Path, gpu: Gpu, number: int, holder: str, *, share: bool) -> None:
        self._folder = folder
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu.uuid)}.lock"
        self._what = f"cuda:{number} ({gpu.name})"
        self._holder = holder
        self._share = share
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self._folder / "gate").open("a") as gate:
                # an exclusive lock does not become a shared one at one stroke: others wait until it has
                fcntl.flock(gate, fcntl.LOCK_EX)
                self._file = self._take()
        except OSError as error:
            raise GpuError(
                f"{self._what} cannot be locked in {self._folder}: {error.strerror}",
                "Make the folder writable, or set CARPOOL_CACHE_DIR to one that is",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _take(self) -> IO[str]:
        file = self._path.open("a+")
        try:
            if not self._share:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise GpuError(
                f"{self._what} already has the model of {holder}",
                "Name another device with --device, or let them share it with --share-gpus (CARPOOL_SHARE_GPUS=1)",
            ) from None
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"{self._holder} (process {os.getpid()})")
        file.flush()
        return file


def lock_gpu(settings: Settings, name: str, gpus: Sequence[Gpu]) -> GpuLock | None:
    """The lock of the GPU that the settings name, still to be taken; None where the model goes to no GPU.

    Args:
        name: the worker's.
        gpus: that are visible.

    Raises:
        GpuError: there is no such GPU.
    """
    number = gpu_number(settings.device) if needs_gpu(settings) else None
    # where none is found a driver may still have some that we cannot list: then the engine says what it sees
    if number is None or not gpus:
        return None
    check_number(settings.device, number, gpus)
    return GpuLock(settings.cache_dir / "gpus", gpus[number], number, name, share=settings.share_gpus)


def check_number(device: str, number: int, gpus: Sequence[Gpu]) -> None:
    """Raises GpuError where there are GPUs, and not so many."""
    if number >= len(gpus):
        raise GpuError(
            f"--device {device} names GPU {number}, and this machine has {counted(gpus)}",
            f"Take one from cuda:0 to cuda:{len(gpus) - 1}, or look at CUDA_VISIBLE_DEVICES",
        )


def counted(gpus: Sequence[Gpu]) -> str:
    """Their number in words."""
    return "1 visible GPU" if len(gpus) == 1 else f"{len(gpus)} visible GPUs"
