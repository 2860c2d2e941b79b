"""Which device each worker of `carpool up` gets: one GPU each, and nobody else's."""

from __future__ import annotations

from collections.abc import Sequence

from ops.errors import PreconditionError
from tasks.settings import Settings
from worker.gpus import Gpu, GpuError, check_number, counted, gpu_number, list_gpus, needs_gpu, visible_gpus

_SHARE = "let workers share GPUs with --share-gpus (CARPOOL_SHARE_GPUS=1)"


def find_gpus(settings: Settings) -> list[Gpu]:
    """The GPUs that workers may have; asked for only where one may want them. Raises PreconditionError."""
    if not needs_gpu(settings):
        return []
    try:
        return visible_gpus(list_gpus())
    except GpuError as error:
        raise PreconditionError(error.cause, error.fix) from error


def plan_devices(settings: Settings, gpus: Sequence[Gpu]) -> list[str]:
    """The device of each worker, in order.

    `auto` and `cuda` spread the workers over the GPUs, the first on cuda:0; `cuda:N` is that one GPU. Without a GPU, on
    the CPU and for the simulated engine all have what the settings say.

    Raises:
        PreconditionError: a GPU would get two models without anyone having said so, or is not there.
    """
    device, workers = settings.device, settings.workers
    number = gpu_number(device)
    if not needs_gpu(settings) or number is None:
        return [device] * workers
    if device in ("auto", "cuda"):
        return _spread(settings, gpus)
    try:
        if gpus:
            check_number(device, number, gpus)
    except GpuError as error:
        raise PreconditionError(error.cause, error.fix) from error
    if workers > 1 and not settings.share_gpus:
        raise PreconditionError(
            f"--workers {workers} with --device {device} would load {workers} models on one GPU",
            f"Take --device auto for one GPU each, or {_SHARE}",
        )
    return [device] * workers


def _spread(settings: Settings, gpus: Sequence[Gpu]) -> list[str]:
    device, workers = settings.device, settings.workers
    if not gpus:
        if device == "cuda" and workers > 1 and not settings.share_gpus:
            raise PreconditionError(
                f"--workers {workers} with --device cuda need a GPU each, and nvidia-smi -L lists none",
                "Take --device cpu, or check the driver and CUDA_VISIBLE_DEVICES",
            )
        return [device] * workers
    if workers <= 1:
        return [device] * workers  # cuda:0, unless torch is a build for the CPU
    if workers > len(gpus) and not settings.share_gpus:
        raise PreconditionError(
            f"--workers {workers} need a GPU each, and this machine has {counted(gpus)}",
            f"Take --workers {len(gpus)}, or {_SHARE}",
        )
    return [f"cuda:{n % len(gpus)}" for n in range(workers)]
