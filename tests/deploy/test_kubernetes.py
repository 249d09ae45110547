"""deploy/kubernetes: each overlay builds and validates, and names only what images, settings and routes have.

Nothing here talks to a cluster. `make k8s-check` runs this file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy import healthcheck, redis_users
from services.gateway.auth import OPEN_PATHS
from services.gateway.metrics import Metrics as GatewayMetrics
from services.scheduler.metrics import Metrics as SchedulerMetrics
from services.worker.metrics import Metrics as WorkerMetrics
from shared.command_line.options import fields_of
from shared.settings import (
    ROOT,
    CommonSettings,
    EnginesSettings,
    GatewaySettings,
    LauncherSettings,
    PlacerSettings,
    SchedulerSettings,
    WorkerSettings,
)
from tests.deploy import kubernetes_files
from tests.deploy.kubernetes_files import (
    MONITORING,
    NAMES,
    OUTSIDE,
    OVERLAYS,
    PLACE,
    Object,
    Pod,
    built,
    environment,
    may_talk,
    of_kind,
    pods,
    selects,
)
from tests.deploy.test_observability import exported

pytestmark = pytest.mark.skipif(bool(kubernetes_files.why_not()), reason=kubernetes_files.why_not())
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings, "ops": CommonSettings,
    "engines": WorkerSettings,
}  # fmt: skip
OF_ENGINES = (WorkerSettings, SchedulerSettings, PlacerSettings, LauncherSettings, EnginesSettings)
OLDEST, NEWEST = "1.29", "1.37"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def ours(overlay: str) -> Iterator[tuple[Pod, Object]]:
    """Pods in our own images."""
    for pod in pods(overlay):
        for container in pod.containers:
            if container["image"].startswith("orcinus"):
                yield pod, container


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_knows_every_field(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    different: dict[str, Object] = {}
    for overlay in OVERLAYS:
        for one in built(overlay):
            if f"{one['apiVersion']} {one['kind']}" in CUSTOM["kinds"]:
                wholes = [{**POD_TEMPLATE, "template": template} for template in kubernetes_files.templates(one)]
            else:
                wholes = [one]
            different |= {json.dumps(whole): whole for whole in wholes}
    for whole in different.values():
        kubernetes_validate.validate(whole, version, strict=True)
    assert {one["kind"] for one in different.values()} >= {"Deployment", "StatefulSet", "PodTemplate", "NetworkPolicy"}


POD_TEMPLATE = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
CUSTOM: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "deploy" / "custom_resources.yaml").read_text())


@each_overlay
def test_custom_resources_have_known_fields_only(overlay: str) -> None:
    for one in built(overlay):
        schema = CUSTOM["kinds"].get(f"{one['apiVersion']} {one['kind']}")
        if schema:
            jsonschema.Draft202012Validator({**schema, "$defs": CUSTOM["$defs"]}).validate(one)


def test_each_custom_resource_is_in_an_overlay() -> None:
    used = {f"{one['apiVersion']} {one['kind']}" for overlay in OVERLAYS for one in built(overlay)}
    assert set(CUSTOM["kinds"]) <= used


@each_overlay
def test_images_are_targets_of_the_dockerfile_with_versions(overlay: str) -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for pod in pods(overlay):
        for container in pod.containers:
            name, _, tag = container["image"].partition(":")
            if name.startswith("orcinus-"):
                assert name.removeprefix("orcinus-") in targets and tag == version
            else:
                assert re.match(r"\d+\.\d+\.\d+", tag), container["image"]
    assert f":{version}" in PAGE


@each_overlay
def test_every_variable_is_a_setting_of_its_service(
    overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for pod, container in ours(overlay):
        settings = SETTINGS[pod.name]
        found = environment(overlay, container)
        named = {name.removeprefix("ORCINUS_").lower() for name in found if name.startswith("ORCINUS_")}
        known = fields_of(*{"engines": OF_ENGINES, "ops": (GatewaySettings,)}.get(pod.name, (settings,)))
        assert named <= known.keys(), pod.owner
        with monkeypatch.context() as patch:
            for name, value in found.items():
                patch.setenv(name, mounted_file(overlay, pod, value, tmp_path))
            read = settings()
        assert read.redis_url == "redis://redis:6379/0"
        assert read.redis_username == ("" if pod.name == "engines" else pod.name)
        assert read.served_model_name == found["ORCINUS_SERVED_MODEL_NAME"]
        if isinstance(read, GatewaySettings):
            assert (read.host, read.port) == ("0.0.0.0", pod.port("http"))
            assert str(read.api_key_file) in [f"{each['mountPath']}/keys" for each in container["volumeMounts"]]
        if isinstance(read, SchedulerSettings):
            assert (read.metrics_host, read.scheduler_metrics_port) == ("0.0.0.0", pod.port("metrics"))
        if isinstance(read, WorkerSettings):
            assert read.worker_id == "worker-6c9f7-x2v" and read.advertise == "10.0.0.7:50051"
            if pod.probes():  # the rank that leads
                assert read.listen == f"0.0.0.0:{pod.port('grpc')}"
                assert not read.worker_metrics_port or read.worker_metrics_port == pod.port("metrics")


def mounted_file(overlay: str, pod: Pod, path: str, directory: Path) -> str:
    """Return where a file of a ConfigMap lies here that a pod has at a path; another value as it is."""
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(overlay, "ConfigMap")}
    volumes = {one["name"]: one["configMap"]["name"] for one in pod.spec["volumes"] if "configMap" in one}
    for mount in pod.container["volumeMounts"]:
        if mount["mountPath"] == path and mount["name"] in volumes:
            file = directory / mount["subPath"]
            file.write_text(maps[volumes[mount["name"]]][mount["subPath"]])
            return str(file)
    return path


def test_engines_end_before_those_with_another_file_start() -> None:
    (found,) = [one for one in of_kind("models", "Deployment") if one["metadata"]["name"] == "engines"]
    assert found["spec"]["strategy"] == {"type": "Recreate"}, "a second placer refuses other models than the first's"


def test_all_that_reads_the_stack_has_one_file_beside_the_models() -> None:
    here = {pod.name: pod for pod in pods("models") if pod.name != "redis"}
    assert here.keys() == {"engines", "gateway", "ops"}
    names = set()
    for pod in here.values():
        mounts = {each["mountPath"]: each for each in pod.container["volumeMounts"]}
        path = environment("models", pod.container)["ORCINUS_MODELS"]
        assert mounts[path]["readOnly"] is mounts["/models"]["readOnly"] is True
        names |= {each["configMap"]["name"] for each in pod.spec["volumes"] if "configMap" in each}
    (name,) = names
    (found,) = [one for one in of_kind("models", "ConfigMap") if one["metadata"]["name"] == name]
    file = yaml.safe_load(found["data"]["models.yaml"])
    assert 1 <= file["awake"] < len(file["models"])
    assert all(one["source"].startswith("./models/") for one in file["models"].values())
    first = environment("models", here["gateway"].container)["ORCINUS_SERVED_MODEL_NAME"]
    assert first == next(iter(file["models"]))


@each_overlay
def test_probes_have_addresses_that_need_no_key(overlay: str) -> None:
    text = (ROOT / "services" / "gateway" / "openai" / "info.py").read_text()
    seen = set()
    for pod in pods(overlay):
        for kind, probe in pod.probes().items():
            if "httpGet" in probe:
                path = probe["httpGet"]["path"]
                assert f'"{path}"' in text and path in OPEN_PATHS
                assert pod.port(probe["httpGet"]["port"])
                seen.add((pod.name, kind, path))
            elif "exec" in probe and "healthcheck" in probe["exec"]["command"]:
                script, _, service = probe["exec"]["command"]
                assert (ROOT / script.removeprefix("/app/")).exists() and service == pod.name
                assert service in healthcheck.CHECKS
            elif "grpc" in probe or "tcpSocket" in probe:
                assert pod.port((probe.get("grpc") or probe["tcpSocket"])["port"])
    assert seen == {
        ("gateway", "startupProbe", "/health/live"),
        ("gateway", "readinessProbe", "/health/ready"),
        ("gateway", "livenessProbe", "/health/live"),
    }


@each_overlay
def test_liveness_of_a_service_depends_on_no_other_service(overlay: str) -> None:
    engines = ("engines",) if overlay == "models" else ("scheduler", "worker")
    for name in ("gateway", "redis", *engines):
        probes = [pod.probes() for pod in pods(overlay) if pod.name == name and pod.probes()]
        assert len(probes) == 1, name
        assert "readinessProbe" in probes[0]
        # healthcheck and /health/ready also fail when Redis does.
        probe = str(probes[0]["livenessProbe"])
        assert "healthcheck" not in probe and "ready" not in probe
        assert "exec" not in probe or "find /tmp/run/states.json -mmin" in probe


@each_overlay
def test_pod_has_limits_and_no_root_capability_or_token(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(overlay):
        spec, context = pod.spec, pod.spec["securityContext"]
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        assert all(volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if "emptyDir" in volume)
        assert context["runAsNonRoot"] is True and context["runAsUser"] == (999 if pod.name == "redis" else 10001)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["memory"]


@each_overlay
def test_each_service_has_its_secrets_as_documented(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    for pod in pods(overlay):
        secrets = {each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each}
        wanted = {
            "redis": {"redis-users", "redis-ops"}, "gateway": {"redis-gateway", "api-key"},
            "engines": {"redis-scheduler", "redis-worker", "redis-placer"},
        }  # fmt: skip
        of_ranks = {"rank-token"} if (overlay, pod.name) == ("multi-gpu", "worker") else set()
        assert secrets == wanted.get(pod.name, {f"redis-{pod.name}"}) | of_ranks, pod.owner
        for each in pod.spec["volumes"]:
            assert "secret" not in each or each["secret"]["defaultMode"] == 0o440
        mounted = {each["name"] for each in pod.container["volumeMounts"]}
        assert mounted - {"data"} == {each["name"] for each in pod.spec["volumes"]}
    for role in redis_users.ROLES:
        assert re.search(rf"for role in [a-z ]*\b{role}\b", PAGE)
    assert "redis-$role --from-file=password=" in PAGE and "redis-users --from-file=users.acl=" in PAGE
    assert "api-key --from-literal=keys=" in PAGE


@each_overlay
def test_network_policies_allow_only_needed_connections(overlay: str) -> None:
    here = pods(overlay)
    sources = [*here, OUTSIDE, MONITORING]
    ports = sorted({port["containerPort"] for pod in here for port in pod.container.get("ports", [])} | {29500})
    found = {
        (source.name, target.name, port)
        for source in sources
        for target in [*here, OUTSIDE]
        for port in ports
        if source.labels or target.labels
        if may_talk(overlay, source, target, port)
    }
    wanted = {(each.name, "gateway", 8000) for each in (OUTSIDE, MONITORING)}
    engines = ("engines",) if overlay == "models" else ("scheduler", "worker")
    wanted |= {(name, "redis", 6379) for name in ("gateway", "ops", *engines)}
    wanted |= {(engines[0], engines[-1], 50051)}
    if of_kind(overlay, "PodMonitor"):
        wanted |= {("monitoring", name, port) for name in ("scheduler", "worker") for port in (9101, 9102)}
    if of_kind(overlay, "LeaderWorkerSet"):
        wanted |= {("worker", "worker", port) for port in ports}
    assert found == wanted
    for pod in here:
        assert may_talk(overlay, pod, NAMES, 53, "UDP"), pod.name


@each_overlay
def test_selectors_select_pods_and_ports_exist(overlay: str) -> None:
    here = pods(overlay)
    for one in of_kind(overlay, "Service"):
        chosen = [pod for pod in here if selects({"matchLabels": one["spec"]["selector"]}, pod.labels)]
        assert {pod.name for pod in chosen} == {one["metadata"]["name"]}
        assert all(chosen[0].port(port["targetPort"]) for port in one["spec"]["ports"])
        assert one["spec"].get("type", "ClusterIP") == "ClusterIP"
    paths = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector", "PodMonitor": "selector"}
    for kind, path in paths.items():
        for one in of_kind(overlay, kind):
            chosen = [pod for pod in here if selects(one["spec"][path], pod.labels)]
            assert chosen, (kind, one["metadata"]["name"])
            for endpoint in one["spec"].get("podMetricsEndpoints", []):
                assert chosen[0].port(endpoint["port"])
    for one in of_kind(overlay, "InferencePool"):
        chosen = [pod for pod in here if selects(one["spec"]["selector"], pod.labels)]
        assert chosen and all(chosen[0].port(port["number"]) for port in one["spec"]["targetPorts"])
    for one in [*of_kind(overlay, "Deployment"), *of_kind(overlay, "StatefulSet")]:
        assert selects(one["spec"]["selector"], one["spec"]["template"]["metadata"]["labels"])


@each_overlay
def test_names_refer_to_objects_in_one_namespace(overlay: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in built(overlay)}
    assert {one["metadata"].get("namespace") for one in built(overlay) if one["kind"] != "Namespace"} == {"orcinus"}
    for one in [*of_kind(overlay, "ScaledObject"), *of_kind(overlay, "HorizontalPodAutoscaler")]:
        target = one["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in there
        (scaled,) = [each for each in of_kind(overlay, target["kind"]) if each["metadata"]["name"] == target["name"]]
        assert "replicas" not in scaled["spec"], "applying the overlay again would undo the scaler's decision"
    for one in of_kind(overlay, "HTTPRoute"):
        for rule in one["spec"]["rules"]:
            assert all((each["kind"], each["name"]) in there for each in rule["backendRefs"])
    for pod in pods(overlay):
        claims = [each["persistentVolumeClaim"] for each in pod.spec["volumes"] if "persistentVolumeClaim" in each]
        assert all(("PersistentVolumeClaim", claim["claimName"]) in there for claim in claims)
        written = {claim["claimName"] for claim in claims if not claim.get("readOnly")}
        assert written <= ({"files"} if pod.name == "gateway" else set())


@each_overlay
def test_gateways_share_a_claim_for_files(overlay: str) -> None:
    (gateway,) = [pod for pod in pods(overlay) if pod.name == "gateway"]
    variables = {each["name"]: each.get("value") for each in gateway.container["env"]}
    mounts = {each["name"]: each for each in gateway.container["volumeMounts"]}
    if overlay == "cpu-trial":  # the storage of a trial cluster may have one writer alone
        assert "ORCINUS_FILES_DIR" not in variables and "files" not in mounts
        return
    assert mounts["files"] == {"name": "files", "mountPath": variables["ORCINUS_FILES_DIR"]}
    (claim,) = [one for one in of_kind(overlay, "PersistentVolumeClaim") if one["metadata"]["name"] == "files"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and claim["spec"]["resources"]["requests"]["storage"]


def test_group_of_pods_has_a_process_for_each_rank() -> None:
    (group,) = of_kind("multi-gpu", "LeaderWorkerSet")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    for pod in (pod for pod in pods("multi-gpu") if pod.name == "worker"):
        (each,) = re.findall(r"--nproc-per-node=(\d+)", " ".join(pod.container["args"]))
        found = environment("multi-gpu", pod.container)
        assert size * int(each) == int(found["ORCINUS_TP"]) * int(found["ORCINUS_PP"])
        assert int(each) == pod.container["resources"]["limits"]["nvidia.com/gpu"]
        assert found["ORCINUS_RANK_LISTEN"] == "10.0.0.7:0"
        (mount,) = [each for each in pod.container["volumeMounts"] if each["name"] == "rank-token"]
        assert f"{mount['mountPath']}/token" in (ROOT / "deploy" / "entrypoint.sh").read_text()


@each_overlay
def test_grace_period_covers_the_drain_of_a_gateway(overlay: str) -> None:
    (gateway,) = [pod for pod in pods(overlay) if pod.name == "gateway"]
    pause = int(gateway.container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert gateway.spec["terminationGracePeriodSeconds"] >= pause + GatewaySettings.model_fields["drain_s"].default + 10


def test_scalers_query_exported_metrics() -> None:
    registries = [metrics().registry for metrics in (GatewayMetrics, SchedulerMetrics, WorkerMetrics)]
    known = set().union(*map(exported, registries))
    triggers = [each for one in of_kind("autoscaling", "ScaledObject") for each in one["spec"]["triggers"]]
    named = {name for each in triggers for name in re.findall(r"\borcinus_\w+", each["metadata"]["query"])}
    assert len(named) == 3 and named <= known


def test_pod_that_loads_the_model_is_confined() -> None:
    loader = yaml.safe_load((PLACE / "loader.yaml").read_text())
    pytest.importorskip("kubernetes_validate").validate(loader, NEWEST, strict=True)
    (ops,) = [pod for pod in pods("gpu") if pod.name == "ops"]
    (container,) = loader["spec"]["containers"]
    assert loader["metadata"]["namespace"] == "orcinus"
    assert container["image"] == ops.container["image"]
    assert container["securityContext"] == ops.container["securityContext"]
    for same in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert loader["spec"][same] == ops.spec[same]
    for overlay in ("gpu", "models"):
        claims = {claim["metadata"]["name"] for claim in of_kind(overlay, "PersistentVolumeClaim")}
        assert claims == {"model", "files"}
    assert loader["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "model"


@each_overlay
def test_page_names_each_overlay(overlay: str) -> None:
    assert f"`{overlay}`" in PAGE


@pytest.mark.parametrize(("wrong", "kind"), [("paralellism", "Deployment"), ("imagPullPolicy", "Deployment")])
def test_misspelt_field_is_an_error(wrong: str, kind: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    one = of_kind("cpu-trial", kind)[0]
    container = {**one["spec"]["template"]["spec"]["containers"][0], wrong: "Always"}
    spec = {**one["spec"]["template"]["spec"], "containers": [container]}
    broken = {**one, "spec": {**one["spec"], "template": {**one["spec"]["template"], "spec": spec}}}
    with pytest.raises(kubernetes_validate.ValidationError, match=wrong):
        kubernetes_validate.validate(broken, NEWEST, strict=True)
