"""Dashboard, alerts and container files: they load, and every name in them is one that exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from delayadapters.metrics.names import every_name

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "monitoring"
REFERENCE = ROOT / "docs" / "reference" / "metrics.md"
NAME = re.compile(r"\bdelayadapters_[a-z0-9_]+")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def queries_of_dashboard() -> list[str]:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def rules() -> list[dict]:
    loaded = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def balanced(query: str) -> bool:
    return all(query.count(a) == query.count(b) for a, b in ("()", "[]", "{}")) and query.count('"') % 2 == 0


# ---------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "queries", [queries_of_dashboard(), [rule["expr"] for rule in rules()]], ids=["dashboard", "alerts"]
)
def test_every_query_names_metrics_that_are_exported(queries):
    assert queries
    for query in queries:
        found = set(NAME.findall(query))
        assert found, f"asks for nothing of ours: {query}"
        assert found <= every_name(), query
        assert balanced(query), query


@pytest.mark.parametrize(
    "queries",
    [
        queries_of_dashboard(),
        [rule["expr"] for rule in rules()],
        [line for line in REFERENCE.read_text().splitlines() if " by (" in line],
    ],
    ids=["dashboard", "alerts", "reference"],
)
def test_queues_of_one_name_on_two_servers_are_not_merged(queries):
    """What is merged is what several processes say of one queue; each server's are scraped under a job of its own."""
    assert queries
    for query in queries:
        for labels in re.findall(r"\bmax by \(([^)]*)\)", query):
            assert labels.split(", ")[:2] == ["job", "queue"], query
        assert re.search(r"\bby \(job, queue", query), query
        if "$queue" in query:
            assert query.count('job=~"$job"') == query.count('queue=~"$queue"'), query


def test_somebody_is_woken_when_nobody_serves_metrics():
    """Every other rule is silent when the series are gone."""
    (rule,) = (rule for rule in rules() if " unless " in rule["expr"])
    before, now = rule["expr"].split(" unless ")
    assert before.replace("max_over_time(delayadapters_up[1d])", "delayadapters_up") == now
    assert rule["labels"]["severity"] == "critical"


def test_the_dashboard_shows_every_metric():
    """Of a histogram, one of its series will do."""
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(" ".join(queries_of_dashboard()))}
    assert shown == {re.sub(r"_(bucket|sum|count)$", "", name) for name in every_name()}


def test_the_reference_names_every_metric_and_no_other():
    text = REFERENCE.read_text()
    found = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(text)}
    settings = {"delayadapters_metrics_port", "delayadapters_metrics_host"}
    assert found - settings == {re.sub(r"_(bucket|sum|count)$", "", name) for name in every_name()}


def test_what_the_how_to_asks_for_is_exported():
    found = set(NAME.findall((ROOT / "docs" / "how-to" / "monitoring.md").read_text()))
    assert found - {"delayadapters_metrics_port", "delayadapters_metrics_host"} <= every_name()


# -------------------------------------------------------------------------------------------------------- dashboard


def test_the_dashboard_is_one_that_grafana_can_show():
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    assert {"title", "uid", "panels", "templating", "schemaVersion"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["title"]
        assert panel["description"]
    variables = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", " ".join(queries_of_dashboard()))) <= variables | {"__rate_interval"}


def test_the_alerts_are_rules_of_prometheus():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= {"job", "queue"}, "it keeps no other"
    text = " ".join(rule["expr"] for rule in rules())
    for alarm in ("oldest_overdue_seconds", "died_total", "loops_alive", "up)", "requeued_total"):
        assert f"delayadapters_{alarm}" in text


# ------------------------------------------------------------------------------------------------------- containers


def files_of(service: dict) -> list[str]:
    return [volume.split(":")[0] for volume in service.get("volumes", ()) if volume.startswith("./")]


def test_the_services_are_there_and_what_they_need_is_too():
    services = COMPOSE["services"]
    assert set(services) == {"redis", "worker", "run", "metrics", "prometheus", "grafana"}
    for name, service in services.items():
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("depends_on", ())) <= set(services)
        for file in files_of(service):
            assert (ROOT / file).exists(), f"{name}: {file}"
        named = {volume.split(":")[0] for volume in service.get("volumes", ()) if not volume.startswith("./")}
        assert named <= set(COMPOSE["volumes"]), name
        if "image" in service:
            assert re.fullmatch(r"[a-z]+(/[a-z]+)?:v?\d[\d.]*", service["image"]), "a version, and no registry host"
        else:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network: {port}"


def test_the_redis_of_the_compose_file_keeps_its_jobs():
    command = " ".join(COMPOSE["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "redis-data:/data" in COMPOSE["services"]["redis"]["volumes"]


def test_prometheus_asks_where_they_answer():
    run = COMPOSE["services"]["run"]
    words = run["command"]
    port = words[words.index("--metrics-port") + 1]
    assert words[words.index("--metrics-host") + 1] == "0.0.0.0", "another container asks"
    assert f":{port}/readyz" in " ".join(run["healthcheck"]["test"])
    apart = COMPOSE["services"]["metrics"]["command"]
    assert apart[apart.index("--host") + 1] == "0.0.0.0", "another container asks"
    assert apart[apart.index("--port") + 1] == port
    assert set(COMPOSE["services"]["metrics"]["environment"]) == {"DELAYADAPTERS_URL", "DELAYADAPTERS_NAME"}
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["prometheus"]["volumes"])
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"run:{port}", f"metrics:{port}"]}], "one job: the same queue"
    assert mounted["./deploy/prometheus.yml"] == "/etc/prometheus/prometheus.yml"
    assert config["rule_files"] == [mounted["./docs/monitoring/prometheus-alerts.yml"]]


def test_grafana_finds_prometheus_and_the_dashboard():
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "delayadapters.yml").read_text())["providers"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounted["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    board = mounted["./docs/monitoring/grafana-dashboard.json"]
    assert board.startswith(provider["options"]["path"] + "/")


def test_the_image_is_built_from_what_is_there():
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    assert re.fullmatch(r"FROM python:3\.\d+-slim", next(line for line in lines if line.startswith("FROM")))
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
    for service in ("worker", "run"):
        words = COMPOSE["services"][service]["command"]
        assert words[:3] == ["celery", "-A", "proj"]
    assert "REDIS_URL" in COMPOSE["services"]["run"]["environment"]
    assert "REDIS_URL" in (ROOT / "examples" / "celery_worker" / "proj" / "celery.py").read_text()
