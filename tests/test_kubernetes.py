"""The manifests: valid by schema, true to the settings, and safe as they stand. No cluster has run them here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.deployment_secrets import make_secrets
from tasks.settings import Settings
from tests.deployment import ROOT, dockerfile, program
from tests.missing import give_up
from tests.test_compose import END_S, carpool_command

FOLDER = ROOT / "ops/kubernetes"
SCHEMA = FOLDER / "schemas/scaledobject.json"
#: No resources of Kubernetes' own.
OTHERS = {"kustomization.yaml", "keda.yaml"}
#: Applied by themselves, where there is what they need.
BY_THEMSELVES = {"worker-gpu.yaml", "keda.yaml"}
OUR_USER = 10001


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def everything() -> list[dict[str, Any]]:
    files = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name not in OTHERS)
    return [document for name in files for document in documents(name)]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod of everything that runs."""
    for document in everything():
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document["spec"]["template"]


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods():
        (container,) = pod["spec"]["containers"]
        yield name, container


def ours() -> dict[str, dict[str, Any]]:
    return {name: container for name, container in containers() if container["image"].startswith("carpool-")}


def grace(name: str) -> float:
    return float(dict(pods())[name]["spec"]["terminationGracePeriodSeconds"])


def check(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_each_manifest_fits_its_schema(path: Path) -> None:
    if path.name == "kustomization.yaml":
        return
    if path.name == "keda.yaml":
        done = check(program("check-jsonschema"), "--schemafile", str(SCHEMA), str(path))
    else:
        done = check(program("kubernetes-validate"), "--strict", "--quiet", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("minReplicaCount: 1", "minReplicas: 1"),
        ("type: prometheus", "type: prometeus"),
        ('threshold: "4"', "threshold: 4"),
        ("    name: worker-cpu\n  polling", "    names: worker-cpu\n  polling"),
        ("metricType: Value", "metricType: Utilization"),
    ],
)
def test_the_schema_of_keda_s_resource_refuses_what_keda_would(tmp_path: Path, old: str, new: str) -> None:
    text = (FOLDER / "keda.yaml").read_text()
    assert old in text
    (tmp_path / "keda.yaml").write_text(text.replace(old, new, 1))
    assert check(program("check-jsonschema"), "--schemafile", str(SCHEMA), str(tmp_path / "keda.yaml")).returncode == 1


def test_kubernetes_own_schema_is_strict(tmp_path: Path) -> None:
    text = (FOLDER / "api.yaml").read_text()
    (tmp_path / "api.yaml").write_text(text.replace("readOnlyRootFilesystem: true", "readOnlyRootFileSystem: true"))
    assert check(program("kubernetes-validate"), "--strict", "--quiet", str(tmp_path / "api.yaml")).returncode != 0


def test_the_kustomization_names_every_file_and_every_secret(tmp_path: Path) -> None:
    (kustomization,) = documents("kustomization.yaml")
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"} - BY_THEMSELVES
    assert set(kustomization["resources"]) == files
    made = {f"secrets/{path.relative_to(tmp_path)}" for path in make_secrets(tmp_path, "redis:6379")}
    named = {file for secret in kustomization["secretGenerator"] for file in secret["files"]}
    assert named <= made
    assert kustomization["generatorOptions"]["disableNameSuffixHash"] is True
    images = {image["name"] for image in kustomization["images"]}
    assert images == {container["image"] for container in ours().values()} - {"carpool-worker-gpu"}
    assert "ops/kubernetes/secrets/" in (ROOT / ".gitignore").read_text().split()
    ignored = (ROOT / "ops/Dockerfile.dockerignore").read_text().split()
    assert ignored.index("ops/kubernetes") > ignored.index("!ops"), "secrets would be in the images"


def test_kubectl_makes_of_it_what_was_meant(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        give_up("kubectl is not installed")
    folder = Path(shutil.copytree(FOLDER, tmp_path / "kubernetes"))
    make_secrets(folder / "secrets", "redis:6379")
    done = check(kubectl, "kustomize", str(folder))
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert {one["metadata"].get("namespace") for one in made if one["kind"] != "Namespace"} == {"carpool"}
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in made if one["kind"] == "Secret"}
    assert secrets == {"redis": {"url", "password", "redis.conf"}, "webhooks": {"secret"}, "flower": {"password"}}


def test_nobody_is_root_or_writes_to_the_image() -> None:
    (namespace,) = documents("namespace.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] == (OUR_USER if name in ours() else 999)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False, "a Service `flower` would set FLOWER_PORT"
    for name, container in containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_our_images_run_as_the_user_that_the_manifests_say() -> None:
    assert {one.value for one in dockerfile() if one.name == "USER"} == {f"{OUR_USER}:{OUR_USER}", "0"}


def test_what_is_mounted_is_declared_and_secrets_are_read_only() -> None:
    for name, pod in pods():
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        declared = set(volumes) | ({"data"} if name == "redis" else set())
        assert {mount["name"] for mount in container["volumeMounts"]} == declared
        for mount in container["volumeMounts"]:
            if "secret" in volumes.get(mount["name"], {}):
                assert mount["readOnly"] is True
                assert volumes[mount["name"]]["secret"]["defaultMode"] == 0o440


def test_every_command_setting_and_file_exists(tmp_path: Path) -> None:
    known = {f"CARPOOL_{field.upper()}" for field in Settings.model_fields}
    made = {f"/secrets/{path.relative_to(tmp_path)}" for path in make_secrets(tmp_path, "redis:6379")}
    for name, container in ours().items():
        carpool_command(container["args"])
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert {variable for variable in variables if variable.startswith("CARPOOL_")} <= known
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for variable, value in variables.items():
            if variable.endswith("_FILE"):
                assert value in made
                assert str(Path(value).parent) in mounts, name
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container[probe].get("exec", {}).get("command")
            if command is not None:
                assert command[0] == "carpool"
                carpool_command(command[1:])


def test_probes_ask_whether_jobs_are_taken_and_restart_nobody_for_redis() -> None:
    api = ours()["api"]
    assert api["readinessProbe"]["httpGet"]["path"] == "/health/accepting"
    assert api["livenessProbe"]["httpGet"]["path"] == "/health/live"
    for name in ("worker-cpu", "worker-gpu", "webhooks"):
        assert "--live" in ours()[name]["livenessProbe"]["exec"]["command"]
    for name in ("worker-cpu", "worker-gpu"):
        assert "--ready" in ours()[name]["readinessProbe"]["exec"]["command"]
    assert "celery" not in "".join(path.read_text().lower() for path in FOLDER.glob("w*.yaml"))


def test_every_pod_gets_more_time_to_end_than_it_takes() -> None:
    settings = Settings()
    for name in ("worker-cpu", "worker-gpu"):
        assert grace(name) >= settings.drain_s + END_S
    assert grace("webhooks") >= settings.webhook_timeout_s + END_S
    assert grace("api") >= ours()["api"]["lifecycle"]["preStop"]["sleep"]["seconds"] + END_S
    assert min(grace(name) for name, _ in pods()) >= END_S


def test_redis_keeps_what_it_is_given() -> None:
    redis = dict(containers())["redis"]
    arguments = " ".join(redis["args"])
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert option in arguments
    limit = int(redis["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    memory = int(redis["args"][redis["args"].index("--maxmemory") + 1].removesuffix("mb"))
    assert memory < limit, "full, it would be killed"
    (state,) = [one for one in documents("redis.yaml") if one["kind"] == "StatefulSet"]
    assert state["spec"]["volumeClaimTemplates"]


def test_only_named_pods_are_let_in() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in documents("networkpolicy.yaml")}
    assert policies["nothing-comes-in"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods()}
    assert all(labels[name]["app.kubernetes.io/part-of"] == "carpool" for name in ours())
    assert "app.kubernetes.io/part-of" not in labels["redis"]
    assert all(one["spec"].get("type", "ClusterIP") == "ClusterIP" for one in everything() if one["kind"] == "Service")


def test_selectors_meet_their_pods() -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods()}
    for document in everything():
        if document["kind"] in ("Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
            selector = document["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert wanted.items() <= labels[document["metadata"]["name"]].items()
    budgets = {one["metadata"]["name"] for one in everything() if one["kind"] == "PodDisruptionBudget"}
    assert budgets == {"api", "worker-cpu", "worker-gpu", "webhooks"}


def test_a_gpu_worker_has_one_gpu() -> None:
    gpu = ours()["worker-gpu"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "CARPOOL_DEVICE", "value": "cuda"} in gpu["env"]


def test_keda_scales_what_is_there_by_the_backlog_of_its_model() -> None:
    (scaled,) = documents("keda.yaml")
    spec = scaled["spec"]
    target = spec["scaleTargetRef"]["name"]
    (deployment,) = [one for one in documents("worker-cpu.yaml") if one["kind"] == "Deployment"]
    assert target == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "the next apply would undo what KEDA has set"
    variables = {one["name"]: one.get("value") for one in ours()[target]["env"]}
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in spec["triggers"]}
    assert "carpool_num_requests_waiting" in queries["backlog"]
    assert "carpool_queue_eta_seconds" in queries["eta"]
    assert all(trigger["type"] == "prometheus" for trigger in spec["triggers"])
    named = {model for query in queries.values() for model in re.findall(r'model="([^"]+)"', query)}
    assert named == {variables["CARPOOL_MODEL"]}
    assert float(spec["triggers"][0]["metadata"]["threshold"]) == Settings().max_batch_size
