"""A stand-in for nvidia-smi: machines that run tests have no GPU, and to find one takes no more than its list."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

UUIDS = ("GPU-aaaa0000-1111", "GPU-bbbb0000-2222", "GPU-cccc0000-3333", "GPU-cccc4444-5555")


def listing(uuids: Sequence[str]) -> str:
    """What `nvidia-smi -L` prints for GPUs of these UUIDs."""
    return "".join(f"GPU {n}: NVIDIA H200 (UUID: {uuid})\n" for n, uuid in enumerate(uuids))


def fake_nvidia_smi(folder: Path, number: int, *, exit_code: int = 0) -> str:
    """A PATH whose nvidia-smi lists so many GPUs."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = -L ] || exit 64\ncat <<END\n{listing(UUIDS[:number])}END\nexit {exit_code}\n'
    )
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
