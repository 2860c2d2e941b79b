"""The README's commands do what they say: each is run on a real service, with the ids of the answers before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch_lines import chat_line
from tests.documented_shell import Shell
from tests.instance import Instance, plain_environment, until
from tests.receiver import SECRET
from tests.redis_server import free_port

README = (Path(__file__).parent.parent / "README.md").read_text()
MOST_LINES = 200
_PLACEHOLDERS = re.compile(r"(?:\w+=… ?)+")


def commands() -> Iterator[str]:
    """The commands of the section on endpoints, each on one line and without its remark."""
    section = README[README.index("## Every endpoint, with curl") :]
    block = section[section.index("```bash\n") + len("```bash\n") : section.index("\n```\n")]
    for line in block.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+# .*$", "", line).strip()
        if command and not command.startswith("#"):
            yield command


def body_of(output: str) -> dict[str, Any]:
    """The JSON object of an answer, behind its head where that is shown; empty where there is none."""
    line = next((line for line in output.splitlines() if line.startswith("{")), "{}")
    body: dict[str, Any] = json.loads(line)
    return body


@pytest.mark.timeout(180)
def test_every_command_of_the_readme_is_answered(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(chat_line(1) + "\n")
    with Instance(
        tmp_path, settings={"CARPOOL_WEBHOOK_SECRET": SECRET, "CARPOOL_WEBHOOK_ALLOW_PRIVATE": "1"}
    ) as instance:
        instance.ready()
        address = instance.api_url().removeprefix("http://")
        nobody = f"http://127.0.0.1:{free_port()}"
        answer: dict[str, Any] = {}
        asked = []
        with Shell(tmp_path, tmp_path, plain_environment()) as shell:

            def ask(command: str) -> tuple[int, str]:
                # nobody outside of this machine is told
                at_instance = command.replace("localhost:8000", address).replace("https://example.com", nobody)
                num_failed, output = shell.run(f"{at_instance} -w '\\n%{{http_code}}\\n'", 60)
                assert num_failed == 0, f"{command}\n{output}"
                return int(output.split()[-1]), output

            def batch() -> dict[str, Any]:
                return body_of(ask('curl -s "localhost:8000/v1/batches/$BATCH"')[1])

            for command in commands():
                if _PLACEHOLDERS.fullmatch(command):
                    names = re.findall(r"(\w+)=", command)
                    shell.run(f"{names[0]}={answer['id']}", 10)
                    if "OUTPUT" in names:
                        until(lambda: batch()["status"] == "completed", "the batch is answered")
                        shell.run(f"OUTPUT={batch()['output_file_id']}", 10)
                    continue
                status, output = ask(command)
                asked.append(command)
                if "/generate_vllm" in command:
                    assert (status, body_of(output)["error"]["code"]) == (503, "no_worker")
                    continue
                assert 200 <= status < 300, f"{command}\n{output}"
                answer = body_of(output)
        assert len(asked) >= 30


def test_it_can_be_read_in_five_minutes() -> None:
    assert len(README.splitlines()) <= MOST_LINES
