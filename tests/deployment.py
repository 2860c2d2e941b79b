"""The deployment files as their own tools read them, and the programs of the environment that tests run in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def compose() -> dict[str, Any]:
    """The file as Compose itself understands it, with all profiles; it needs no container engine for that."""
    command = [program("docker-compose"), "--file", str(ROOT / "docker-compose.yml"), "--profile", "*"]
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},  # nothing of ours: it has to be whole without any variable
    )
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def seconds(duration: str) -> float:
    """Of a duration as Compose writes it: `1m30s`."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", duration))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile."""

    stage: str
    name: str
    value: str


def dockerfile() -> list[Instruction]:
    """Its instructions, continued lines joined, each with the stage that it stands in."""
    text = (ROOT / "ops/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    stage, found = "", []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, value = line.partition(" ")
        if name == "FROM":
            stage = value.split(" AS ")[1]
        found.append(Instruction(stage, name, value.strip()))
    return found
