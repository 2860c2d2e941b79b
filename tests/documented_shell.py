"""Runs the commands of a document as a reader would, in terminals, and compares what comes with what is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import IO, Self

import psutil

_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DONE = "--- block done "


@dataclass(frozen=True)
class Block:
    """Commands of a document.

    Attributes:
        terminal: what stands behind "bash" in the fence: the terminal that they keep busy, "" for the reader's own.
        shown: the output that the document shows, None where it shows none; `…` stands for anything.
        line: where the block begins in the document.
    """

    commands: str
    terminal: str
    shown: str | None
    line: int


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of bash, each with the block of text that follows it with nothing but white space or prose between."""
    fences = list(_FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] == "bash":
            shown = following[3] if following is not None and following[1] == "text" else None
            yield Block(fence[3], fence[2].strip(), shown, text.count("\n", 0, fence.start()) + 1)


def matches(shown: str, output: str) -> bool:
    """Whether an output is the one that is shown; runs of blanks count as one."""

    def plain(lines: str) -> str:
        return "\n".join(" ".join(line.split()) for line in lines.strip().splitlines())

    pattern = "".join(".*?" if part == "…" else re.escape(part) for part in re.split("(…)", plain(shown)))
    return re.fullmatch(pattern, plain(output), re.DOTALL) is not None


class Shell:
    """The reader's terminal: one bash that runs block after block."""

    def __init__(self, folder: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._number = 0
        self._lines: Queue[str | None] = Queue()
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)

    def run(self, commands: str, bound_s: float) -> tuple[int, str]:
        """How many commands of the block failed, and what it wrote."""
        self._number += 1
        script = self._folder / f"block-{self._number}.sh"
        script.write_text(commands)
        assert self._process.stdin is not None
        # its own standard input is where we write: no command may read it
        self._process.stdin.write(
            f"failed=0; trap 'failed=$((failed + 1))' ERR; source {script} </dev/null; trap - ERR; echo; "
            f"echo '{_DONE}'$failed\n"
        )
        self._process.stdin.flush()
        until = time.monotonic() + bound_s
        output: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise AssertionError(f"not within {bound_s:g} s:\n{commands}\n{''.join(output)}") from None
            assert line is not None, f"the shell has ended:\n{commands}\n{''.join(output)}"
            if line.startswith(_DONE):
                return int(line.removeprefix(_DONE)), "".join(output)
            output.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        started = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        for process in started:
            if process.is_running():
                process.kill()


class Busy:
    """Another terminal, which commands keep busy until they end."""

    def __init__(self, commands: str, output: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                ["bash", "--norc", "-c", commands],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, what: str, bound_s: float) -> None:
        """Until it has shown this."""
        until = time.monotonic() + bound_s
        while what not in self.output:
            assert self.process.poll() is None, f"it has ended:\n{self.output}"
            assert time.monotonic() < until, f"not within {bound_s:g} s: {what}\n{self.output}"
            time.sleep(0.05)  # nobody tells us of a line in a file

    def close(self) -> None:
        """End it in order, as Ctrl-C twice would where that is needed."""
        for _ in range(2):
            if self.process.poll() is not None:
                return
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        self.process.wait()
