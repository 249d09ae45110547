"""deploy/kubernetes as objects: what kustomize makes of an overlay, its pods, and which of them may talk to which."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from shared.settings import ROOT

PLACE = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (PLACE / "overlays").iterdir())

Object = dict[str, Any]


def why_not() -> str:
    """Why nothing can be built here; empty where it can."""
    if shutil.which("kubectl") is None:
        return "no kubectl; .ci/run installs it"
    version = subprocess.run(["kubectl", "version", "--client", "-o", "yaml"], capture_output=True, text=True).stdout
    found = yaml.safe_load(version or "{}").get("kustomizeVersion", "v0").lstrip("v")
    return (
        "" if int(found.split(".")[0]) >= 5 else f"kubectl's kustomize is {found}; 5.0 or newer (kubectl 1.27) reads us"
    )


@cache
def built(overlay: str) -> list[Object]:
    """All objects of an overlay. An error of kustomize fails the test."""
    done = subprocess.run(["kubectl", "kustomize", str(PLACE / "overlays" / overlay)], capture_output=True, text=True)
    assert done.returncode == 0 and "deprecated" not in done.stderr, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [one for one in built(overlay) if one["kind"] == kind]


@dataclass(frozen=True, slots=True)
class Pod:
    """A template of pods. name: what its label says it is."""

    owner: str
    name: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec["containers"], *self.spec.get("initContainers", [])]

    @property
    def container(self) -> Object:
        (one,) = self.spec["containers"]
        return dict(one)

    def port(self, named: str | int) -> int:
        """A container's port by its name or number."""
        ports = self.container["ports"]
        return next(port["containerPort"] for port in ports if named in (port["name"], port["containerPort"]))

    def probes(self) -> dict[str, Object]:
        return {kind: self.container[kind] for kind in PROBES if kind in self.container}


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def pods(overlay: str) -> list[Pod]:
    found = []
    for one in built(overlay):
        where = f"{one['kind']} {one['metadata']['name']}"
        for template in templates(one):
            labels = template["metadata"]["labels"]
            found.append(Pod(where, labels["app.kubernetes.io/name"], labels, template["spec"]))
    return found


def templates(one: Object) -> Iterator[Object]:
    """The pod templates of an object."""
    if one["kind"] in ("Deployment", "StatefulSet"):
        yield one["spec"]["template"]
    elif one["kind"] == "LeaderWorkerSet":
        group = one["spec"]["leaderWorkerTemplate"]
        yield group["leaderTemplate"]
        yield group["workerTemplate"]


def environment(overlay: str, container: Object) -> dict[str, str]:
    """What a container finds in its environment; what only the cluster knows is made up."""
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(overlay, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    made_up = {"status.podIP": "10.0.0.7", "metadata.name": "worker-6c9f7-x2v", "limits.cpu": "2"}
    for one in container.get("env", []):
        value = one.get("value", "")
        for field in ("fieldRef", "resourceFieldRef"):
            if field in one.get("valueFrom", {}):
                source = one["valueFrom"][field]
                value = made_up[source.get("fieldPath") or source.get("resource")]
        for name, before in found.items():
            value = value.replace(f"$({name})", before)
        found[one["name"]] = value
    return found


def selects(selector: Object | None, labels: dict[str, str]) -> bool:
    """A label selector of Kubernetes; an empty one selects all. Only In is used of the operators."""
    selector = selector or {}
    wanted = selector.get("matchLabels", {}).items()
    assert all(each["operator"] == "In" for each in selector.get("matchExpressions", []))
    among = [(each["key"], each["values"]) for each in selector.get("matchExpressions", [])]
    return all(labels.get(key) == value for key, value in wanted) and all(
        labels.get(key) in some for key, some in among
    )


OUTSIDE = Pod("", "outside", {}, {})
MONITORING = Pod("", "monitoring", {}, {})
NAMES = Pod("", "kube-system", {}, {})


def may_talk(overlay: str, source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies let a connection through, as Kubernetes reads them: both ends must allow it."""
    return _allows(overlay, source, "Egress", target, port, protocol) and _allows(
        overlay, target, "Ingress", source, port, protocol
    )


def _allows(overlay: str, pod: Pod, direction: str, other: Pod, port: int, protocol: str) -> bool:
    """What one end's policies say. A pod that no policy selects allows everything."""
    if pod in (OUTSIDE, MONITORING, NAMES):
        return True
    policies = [
        one["spec"]
        for one in of_kind(overlay, "NetworkPolicy")
        if direction in one["spec"]["policyTypes"] and selects(one["spec"]["podSelector"], pod.labels)
    ]
    if not policies:
        return True
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    peers = "to" if direction == "Egress" else "from"
    return any(_rule_allows(rule, rule.get(peers), other, port, protocol) for rule in rules)


def _rule_allows(rule: Object, peers: list[Object] | None, other: Pod, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and not any(
        each.get("protocol", "TCP") == protocol and each["port"] <= port <= each.get("endPort", each["port"])
        for each in ports
    ):
        return False
    return peers is None or any(_is_peer(peer, other) for peer in peers)


def _is_peer(peer: Object, other: Pod) -> bool:
    """Without a namespaceSelector a peer is a pod of the same namespace."""
    if "namespaceSelector" in peer:
        return other.labels == {} and selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.name})
    return bool(other.labels) and selects(peer["podSelector"], other.labels)
