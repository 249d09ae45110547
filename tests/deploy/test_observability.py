"""Boards, alerts and scrape targets name only what the services export and write; promtool accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy.observability import boards
from services.gateway.metrics import Metrics as GatewayMetrics
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.metrics import Metrics as SchedulerMetrics
from services.scheduler.telemetry import Stats
from services.worker.metrics import Metrics as WorkerMetrics
from shared.keys import Keys
from shared.settings import ROOT

PLACE = ROOT / "deploy" / "observability"
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def exported(registry: CollectorRegistry) -> set[str]:
    return {family.name + suffix for family in registry.collect() for suffix in SUFFIXES.get(family.type, [""])}


def queries() -> list[str]:
    rules = yaml.safe_load((PLACE / "alerts.yml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    made = boards.boards()["orcinus.json"]
    return found + [target["expr"] for panel in made["panels"] for target in panel["targets"]]


def test_boards_and_alerts_name_exported_metrics_only() -> None:
    registries = [metrics().registry for metrics in (GatewayMetrics, SchedulerMetrics, WorkerMetrics)]
    known = set().union(*map(exported, registries))
    named = {name for query in queries() for name in re.findall(r"\borcinus_\w+", query)}
    assert len(named) > 30
    assert named <= known, named - known


def test_committed_boards_are_generated() -> None:
    for name, made in boards.boards().items():
        committed = json.loads((boards.BOARDS / name).read_text())
        assert committed == made, "run `python -m deploy.observability.boards`"


@pytest.mark.parametrize("name", ["orcinus.json", "orcinus-redis.json"])
def test_panels_of_a_board_have_distinct_ids_and_places(name: str) -> None:
    sources = yaml.safe_load((PLACE / "grafana" / "datasources" / "datasources.yml").read_text())["datasources"]
    known = {(source["type"], source["uid"]) for source in sources}
    panels = boards.boards()[name]["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert {(target["datasource"]["type"], target["datasource"]["uid"]) for target in panel["targets"]} <= known
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_redis_board_reads_keys_and_fields_that_exist() -> None:
    board = boards.boards()["orcinus-redis.json"]
    model, shard = (variable["query"] for variable in board["templating"]["list"])
    keys = Keys(model)
    known = {keys.stats(shard), keys.stats_history(shard), keys.events, keys.queue}
    read = {
        target["keyName"].replace("${model}", model).replace("$shard", shard)
        for panel in board["panels"]
        for target in panel["targets"]
    }
    assert read == known
    written = set(Stats(0).snapshot(Scheduler("orcinus").stats(), 1, 1, 1, "orcinus", 0))
    assert {name for _, _, names in boards.OVER_TIME for name in names} <= written


def test_prometheus_scrapes_the_ports_that_compose_opens() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    jobs = {job["job_name"]: job for job in yaml.safe_load((PLACE / "prometheus.yml").read_text())["scrape_configs"]}
    scheduler, worker = (services[name]["environment"] for name in ("scheduler", "worker"))
    assert jobs["scheduler"]["static_configs"][0]["targets"] == [
        f"scheduler:{scheduler['ORCINUS_SCHEDULER_METRICS_PORT']}"
    ]
    assert jobs["worker"]["dns_sd_configs"][0]["port"] == worker["ORCINUS_WORKER_METRICS_PORT"]
    assert jobs["gateway"]["dns_sd_configs"][0]["port"] == services["gateway"]["environment"]["ORCINUS_PORT"]
    key_file = jobs["gateway"]["authorization"]["credentials_file"]
    assert key_file == services["gateway"]["environment"]["ORCINUS_API_KEY_FILE"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["obs"]
        published = services[name].get("ports", [])
        assert all(port.startswith("127.0.0.1:") for port in published)
        for mount in services[name]["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists(), source


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"],
     ["check", "config", "--syntax-only", "prometheus.yml"]],
    ids=lambda command: command[1],
)  # fmt: skip
def test_promtool_accepts_the_rules_and_runs_their_tests(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=PLACE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_names_and_types_of_the_metrics() -> None:
    from prometheus_client import generate_latest

    for metrics in (GatewayMetrics(), SchedulerMetrics(), WorkerMetrics()):
        text = generate_latest(metrics.registry)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
