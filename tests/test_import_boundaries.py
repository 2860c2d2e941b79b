"""Who may import whom: torch stays in the Model worker's process, the API and the workers know only their contract."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tasks

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "vllm", "accelerate", "safetensors", "gguf", "llguidance")

TORCH_FREE = {
    "the contract": tuple(f"tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)),
    "the API": ("api.app", "api.server"),
    "the LLM engine": ("worker.main", "worker.serve", "worker.llm_engine", "worker.model_executor", "worker.strategy"),
    "the worker of webhooks": ("worker.webhooks.main",),
    "the simulated engine": ("worker.engines.simulated",),
    "the supervisor": ("ops.cli", "ops.up", "ops.supervisor", "ops.status"),
}


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*arguments], check=False, capture_output=True, text=True, timeout=110, cwd=cwd)


@pytest.mark.parametrize("part", TORCH_FREE)
def test_a_part_other_than_the_model_worker_starts_where_torch_cannot_be_imported(part: str) -> None:
    program = (
        f"import sys\nfor name in {HEAVY!r}:\n    sys.modules[name] = None\nimport {', '.join(TORCH_FREE[part])}\n"
    )
    done = run_python(sys.executable, "-P", "-c", program)
    assert done.returncode == 0, done.stderr


def test_the_import_contracts_hold() -> None:
    done = run_python(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contracts_name_every_module_that_imports_torch() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    protecting = [contract for contract in contracts if contract["type"] == "protected"]
    allowed = [
        set(contract["allowed_importers"])
        for contract in protecting
        if contract["protected_modules"] != ["opentelemetry"]
    ]
    assert len(allowed) == 2
    assert allowed[0] == allowed[1]
    for module in allowed[0]:
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{module} is named in a contract and does not exist"


@pytest.mark.parametrize("package", ["api", "tasks", "worker", "ops"])
def test_a_folder_of_the_same_name_in_the_working_directory_does_not_hide_ours(package: str, tmp_path: Path) -> None:
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    carpool = str(Path(sys.executable).with_name("carpool"))
    done = run_python(carpool, "simulate", "Hello", "--tokens", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
