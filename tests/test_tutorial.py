"""The tutorial does what it says: every block of it is run on a real service, and shows what the page shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.documented_shell import Block, Busy, Shell, blocks_of, matches
from tests.instance import plain_environment
from tests.redis_server import free_port

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK_S = 90.0
READY_S = 240.0


def environment(folder: Path, port: int) -> dict[str, str]:
    """A reader's, but for the port, the data dir, and the environment that the checkout has already."""
    given = plain_environment(
        {
            "CARPOOL_VENV": sys.prefix,
            "CARPOOL_PORT": str(port),
            "CARPOOL_DATA_DIR": str(folder / "data"),
            "CARPOOL_DEVICE": "cpu",
            "TMPDIR": str(folder),
        }
    )
    return {**given, "PATH": f"{Path(sys.executable).parent}:{given['PATH']}"}


def at_free_ports(text: str, api: int, receiver: int) -> str:
    return text.replace(":8000", f":{api}").replace("9000", str(receiver))


@pytest.mark.timeout(600)
def test_every_block_of_the_tutorial_does_what_it_shows(tmp_path: Path) -> None:
    api, receiver = free_port(), free_port()
    blocks = list(blocks_of(at_free_ports(TUTORIAL.read_text(), api, receiver)))
    given = environment(tmp_path, api)
    busy: list[Busy] = []
    try:
        with Shell(tmp_path, ROOT, {name: value for name, value in given.items() if name != "CARPOOL_VENV"}) as shell:
            for block in blocks:
                if block.terminal:
                    busy.append(Busy(block.commands, tmp_path / f"terminal-{block.line}", ROOT, given))
                    busy[-1].wait_for("Carpool is ready", READY_S)
                else:
                    given |= pasted(run(shell, block))
    finally:
        for one in busy:
            one.close()
    assert [one.process.returncode for one in busy] == [0] * len(busy)


def run(shell: Shell, block: Block) -> str:
    num_failed, output = shell.run(block.commands, BLOCK_S)
    where = f"{TUTORIAL.name}, line {block.line}"
    assert num_failed == 0, f"{where}: {num_failed} commands failed\n{block.commands}\n{output}"
    if block.shown is not None:
        assert matches(block.shown, output), f"{where} shows\n{block.shown}\nbut it is\n{output}"
    return output


def pasted(output: str) -> dict[str, str]:
    """What a reader pastes into the other terminal: settings that a block has shown."""
    lines = re.findall(r"^export (.*)$", output, re.MULTILINE)
    return dict(setting.split("=", 1) for line in lines for setting in line.split())


def test_the_tutorial_has_all_that_it_promises() -> None:
    blocks = list(blocks_of(TUTORIAL.read_text()))
    commands = "\n".join(block.commands for block in blocks)
    for what in (
        "kill -9 $(pid worker)",
        "kill -9 $(pid api)",
        "Idempotency-Key",
        "Last-Event-ID",
        "?wait=30",
        "/cancel",
        "/v1/batches",
        "webhook_url",
        "carpool keys create",
        "ops/up\n",
    ):
        assert what in commands
    assert len([block for block in blocks if block.shown is not None]) >= 15


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        ("a … c", "a b c\n", True),
        ("a …", "b c", False),
        ("a\nb", "a\nc", False),
        ("ready  now", "ready now\n\n", True),
        ("…\nlast", "first\nsecond\nlast", True),
        ("first\n…", "second\nlast", False),
        ("a.c", "abc", False),
    ],
)
def test_an_output_is_compared_with_what_is_shown(shown: str, output: str, same: bool) -> None:
    assert matches(shown, output) is same
