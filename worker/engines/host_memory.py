"""How much memory this process may still take: what the machine has free, and what a container is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def free_host_bytes() -> int:
    """Bytes that can be taken without swapping and without meeting the limit of a control group (of a container)."""
    free = int(psutil.virtual_memory().available)
    return min([free, *_left_in_cgroups(_OWN_CGROUPS, _CGROUPS)])


def _left_in_cgroups(own: Path, root: Path) -> Iterator[int]:
    """What each control group with a limit, from ours up to the root, still allows.

    Args:
        own: /proc/self/cgroup.
        root: where control groups are mounted.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = {root, root / "unified"}
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = {root / "memory", root / controllers}
        else:
            continue
        for mount in mounts:
            yield from _left(mount, path, *names)


def _left(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    # In a container the path is often that of the host, and its own group is mounted as the root.
    folder = mount / path.lstrip("/")
    while True:
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
            cache = _stat(folder / "memory.stat", cache_name)
        except (OSError, ValueError):
            pass  # this group has no limit of its own, or is not visible here
        else:
            if limit != "max":
                yield max(0, int(limit) - max(0, usage - cache))
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _stat(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
