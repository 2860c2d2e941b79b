"""The page on metrics, the dashboard, the alerts and the autoscaler name what a real service really tells."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.metric_families import ledger_families
from ops import __file__ as ops_file
from tests.api_server import ApiServer
from tests.promql import Selector, groupings, selectors
from tests.scrapes import Scrape, scrape
from tests.service import eventually

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
PROMETHEUS = Path(ops_file).parent / "prometheus"
GRAFANA = Path(ops_file).parent / "grafana"
AUTOSCALER = Path(ops_file).parent / "kubernetes" / "keda.yaml"
#: What Prometheus itself puts on everything that it scrapes.
OF_PROMETHEUS = {"instance", "job"}
COLUMNS, SCREEN_ROWS = 24, 25


@pytest.fixture(scope="module")
def told(simulated_api: ApiServer) -> Scrape:
    """A scrape of a service that has served jobs, and refused one."""
    with simulated_api.client() as client:
        assert client.post("/basic_generate", json={"prompt": "Hello, I am", "max_tokens": 5}).status_code == 200
        assert client.get("/jobs/nothing").status_code == 404

        def with_steps() -> Scrape | None:
            now = scrape(client)
            return now if now.value("carpool_step_seconds_count") else None

        found = eventually("its worker has told its steps", with_steps)
        assert isinstance(found, Scrape)
        return found


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric in the tables of the page."""
    rows = re.findall(r"^\| `(carpool_\w+)` \| (\w+) \| ([\w, ]*) ?\|", PAGE.read_text(), re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows), "each once"
    return {
        name: (kind, {label.strip() for label in labels.split(",") if label.strip()}) for name, kind, labels in rows
    }


def test_the_page_has_every_metric_with_its_type_and_labels(told: Scrape) -> None:
    found = {}
    for family in told.families.values():
        if family.name.startswith("carpool_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels)
    found.setdefault("carpool_queue_tokens_limit", ("gauge", set()))
    assert documented() == found


def test_the_page_has_what_prometheus_client_tells_of_the_process(told: Scrape) -> None:
    page = PAGE.read_text()
    for family in told.families.values():
        if not family.name.startswith("carpool_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert f"`{name}`" in page


def dashboard() -> dict[str, Any]:
    found = json.loads((GRAFANA / "dashboards" / "carpool.json").read_text())
    assert isinstance(found, dict)
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression stands, and itself."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for note in board["annotations"]["list"]:
        yield note["name"], note["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            inside = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert inside, variable["query"]
            yield variable["name"], f"max by ({inside[2]}) ({inside[1]})"
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for trigger in yaml.safe_load(AUTOSCALER.read_text())["spec"]["triggers"]:
        yield f"{AUTOSCALER.name}: {trigger['name']}", trigger["metadata"]["query"]
    for expression in re.findall(r"`([^`\n]*\bcarpool_[^`\n]*\))`", PAGE.read_text()):
        yield "docs/metrics.md", expression


def test_every_expression_asks_for_what_there_is(told: Scrape) -> None:
    there = told.labels()
    there["carpool_queue_tokens_limit"] = set()  # only where it is set
    asked: set[str] = set()
    for place, expression in expressions():
        found = list(selectors(expression))
        assert found, f"{place}: {expression}"
        may_group = set(OF_PROMETHEUS)
        for selector in found:
            if selector.name in ("up", "ALERTS"):
                continue
            assert selector.name in there, f"{place} asks for {selector.name}"
            assert selector.labels <= there[selector.name] | OF_PROMETHEUS, f"{place}: {selector}"
            may_group |= there[selector.name]
            asked.add(selector.name)
        assert groupings(expression) <= may_group, f"{place}: {expression}"
    of_ledger = {family.name for family in ledger_families([], _settings())}
    unseen = {name for name in of_ledger if not any(one.startswith(name) for one in asked)}
    assert unseen == {"carpool_request_prompt_tokens", "carpool_request_generation_tokens"}, "the rest is looked at"


def _settings() -> Any:
    from tasks.settings import Settings

    return Settings()


def test_every_value_of_a_label_that_is_asked_for_is_one_that_can_be(told: Scrape) -> None:
    of_states = told.values_of("state")
    for place, expression in expressions():
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"$]*)"', expression):
            values = {
                "state": of_states,
                "code": told.values_of("code"),
                "cause": told.values_of("cause"),
                "priority": {"high", "normal", "low"},
            }.get(label)
            if values is not None:
                wanted = set(value.split("|")) if "~" in operator else {value}
                assert wanted <= values, f"{place}: {label}{operator}{value}"


def test_what_redis_tells_is_never_summed_over_replicas() -> None:
    """Each replica tells the same: a sum would count it as often as there are replicas."""
    own = {"carpool_stream_clients", "carpool_stream_resumes_total", "carpool_refusals_total", "carpool_redis_up"}
    own |= {"carpool_http_requests_total", "up", "ALERTS"}
    for place, expression in expressions():
        for match in re.finditer(r"\b(\w+)(?: by \([^)]*\))? ?\((?:(?:rate|increase)\()?(carpool_\w+)", expression):
            if match[2] not in own:
                assert match[1] in ("max", "rate", "increase"), f"{place}: {expression}"


def test_the_dashboard_is_one_screen_whose_panels_do_not_overlap() -> None:
    board = dashboard()
    assert (board["uid"], board["title"]) == ("carpool", "Carpool")
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        ids.add(panel["id"])
        assert panel["type"] in ("stat", "timeseries")
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
    assert len(ids) == len(board["panels"])
    assert taken == {(x, y) for x in range(COLUMNS) for y in range(SCREEN_ROWS)}, "one screen, and no holes"
    names = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$(?:\{(\w+)\}|(\w+))", json.dumps(board)))
    assert {one or other for one, other in used} - {"__rate_interval", "__all"} <= names


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "carpool.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"


def test_every_alert_says_what_to_do_and_is_in_the_page() -> None:
    page = PAGE.read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert len(rule["annotations"]["runbook"]) > 40
        assert rule["annotations"]["summary"]
        assert f"| `{rule['alert']}` |" in page
    assert len(re.findall(r"^\| `Carpool\w+` \|", page, re.MULTILINE)) == len(rules())


def test_prometheus_scrapes_every_replica_of_the_api() -> None:
    found = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = found["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("carpool", "/metrics")
    assert job["dns_sd_configs"][0] | {"refresh_interval": ""} == {
        "names": ["api"],
        "type": "A",
        "port": 8000,
        "refresh_interval": "",
    }
    assert found["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize(
    ("expression", "found", "by"),
    [
        ('sum by (model) (rate(a_total{x="y", z=~"n(o|t)"}[5m])) / b > 3', {("a_total", "xz"), ("b", "")}, {"model"}),
        ('up{job="c"} == 0 or absent(up{job="c"})', {("up", "j")}, set()),
        ("a and on (m, n) max(b) offset 5m", {("a", ""), ("b", "")}, {"m", "n"}),
        ('count(ALERTS{alertname=~"C.*"}) or vector(0)', {("ALERTS", "a")}, set()),
    ],
)
def test_what_reads_expressions_reads_them(expression: str, found: set[tuple[str, str]], by: set[str]) -> None:
    read = {(one.name, "".join(sorted(label[0] for label in one.labels))) for one in selectors(expression)}
    assert read == found
    assert groupings(expression) == by
    assert Selector("a", frozenset()) == Selector("a", frozenset())


def _promtool() -> str:
    found = shutil.which("promtool", path=os.environ.get("PATH"))
    if found is None:
        pytest.skip(
            "promtool is not there (.ci/run fetches it; else: apt-get install prometheus): alerts are not tried"
        )
    return found


def test_promtool_accepts_the_configuration() -> None:
    done = subprocess.run(
        [_promtool(), "check", "config", "prometheus.yml"],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_fire_when_they_should_and_are_silent_when_they_should_not() -> None:
    """Two replicas tell the same, so that what adds them up would be found."""
    done = subprocess.run(
        [_promtool(), "test", "rules", str(Path(__file__).parent / "alerts_test.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
