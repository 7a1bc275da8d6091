"""What a Kubernetes schema does not see and an API server, a kubelet or this server would refuse or do wrong.

Each rule takes what was rendered and gives its findings, in words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from service.cli.cli import cli
from service.config.server_config import ServerConfig
from service.config.sources import load, settings_of
from service.metrics import names
from service.servicers.health import LIVENESS, READINESS
from tests.packaging.helm.chart import NAMESPACE, Object, Rendered

Rule = Callable[[Rendered], Iterable[str]]

ENV_BESIDE_SETTINGS = {"SLIPSTREAM_CACHE_DIR"}
WRITTEN_BY_LIBRARIES = ("HOME", "SLIPSTREAM_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME")
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(quantity: Any) -> float:
    """A Kubernetes quantity as a number."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert found is not None, quantity
    return float(found[1]) * _UNITS[found[2]]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a selector finds an object with these labels."""
    return selector.items() <= labels.items()


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector does."""
    ruled = all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))
    return ruled and matches(selector.get("matchLabels", {}), labels)


A_POD = "10.0.0.9"
"""What a pod learns of its own address."""


def config_of(rendered: Rendered) -> ServerConfig:
    """The server's settings as it would read them from the rendered command line, and what a pod knows of itself.

    Raises what it would.
    """
    return _config(rendered.server, "0")


def _config(container: Object, index: str) -> ServerConfig:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    # Which the controller of LeaderWorkerSets sets, and the kubelet puts in.
    told = {"$(LWS_WORKER_INDEX)": index, "$(LWS_LEADER_ADDRESS)": "demo-0.demo.models"}
    args = "\n".join(container["args"][1:])
    for name, value in told.items():
        args = args.replace(name, value)
    flags = command.make_context("serve", args.split("\n")).params
    flags.pop("config_file")
    return load(ServerConfig, flags, {each["name"]: A_POD for each in container["env"] if "valueFrom" in each})


def containers(rendered: Rendered) -> Iterator[tuple[Object, Object]]:
    """Every container of the chart's own with its pod."""
    worker = [rendered.worker_template["spec"]] if rendered.worker_template else []
    for pod in (rendered.pod, *worker, rendered.test_pod["spec"]):
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            if container["name"] != "sidecar":
                yield pod, container


def selectors(rendered: Rendered) -> Iterator[str]:
    """Selectors find the server's pods and not the test's."""
    worker = rendered.worker_template
    computes = worker["metadata"]["labels"] if worker else {}
    found = {each["kind"]: each["spec"]["selector"] for each in rendered.all("Deployment")}
    found |= {each["metadata"]["name"]: {"matchLabels": each["spec"]["selector"]} for each in rendered.all("Service")}
    for each in (*rendered.all("PodDisruptionBudget"), *rendered.all("NetworkPolicy")):
        found[each["kind"]] = each["spec"].get("selector") or each["spec"]["podSelector"]
    for spread in rendered.pod.get("topologySpreadConstraints", ()):
        found[spread["topologyKey"]] = spread["labelSelector"]
    for name, selector in found.items():
        if not selects(selector, rendered.template["metadata"]["labels"]):
            yield f"{name} does not select the pods"
        if selects(selector, rendered.test_pod["metadata"]["labels"]):
            yield f"{name} selects the pod of the test"
        # What only computes answers no call, and is let in and evicted like the rest of its worker.
        if worker and selects(selector, computes) != (name in ("PodDisruptionBudget", "NetworkPolicy")):
            yield f"{name} selects pods that only compute, or does not"


def ports(rendered: Rendered) -> Iterator[str]:
    """Ports that are named are there, those that are probed are opened, and speak plain text."""
    config = config_of(rendered)
    opened = {each["name"]: each["containerPort"] for each in rendered.server["ports"]}
    expected = {"grpc": config.port}
    if config.metrics_host != "127.0.0.1":
        expected["metrics"] = config.metrics_port
    if config.health_port is not None:
        expected["health"] = config.health_port
    if config.engine.disagg.role == "prefill":
        expected["transfer"] = config.engine.disagg.transfer_port
    if opened != expected or not all(0 < port < 65536 for port in opened.values()):
        yield f"container ports {opened}, the server opens {expected}"
    for service in rendered.all("Service"):
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in opened or port["port"] != opened[port["targetPort"]]:
                yield f"{service['metadata']['name']}: {port}"
    plain = config.port if config.tls_cert is None else config.health_port
    for name, service in (("startup", READINESS), ("liveness", LIVENESS), ("readiness", READINESS)):
        probe = rendered.server[f"{name}Probe"]["grpc"]
        if probe != {"port": plain, "service": service}:
            yield f"{name} probe asks {probe}"
    for policy in rendered.all("NetworkPolicy"):
        ingress, egress = (policy["spec"].get(way, []) for way in ("ingress", "egress"))
        ranges = [port for rule in (*ingress, *egress) for port in rule.get("ports", ()) if "endPort" in port]
        allowed = sorted(str(port["port"]) for rule in ingress for port in rule.get("ports", ()) if port not in ranges)
        for rule in policy["spec"]["ingress"]:
            if not rule.get("from"):
                yield f"the policy lets everybody in to {rule['ports']}"
        own = [{"podSelector": policy["spec"]["podSelector"]}]
        among = [rule.get(way) == own for way, rules in (("from", ingress), ("to", egress)) for rule in rules]
        if sum(among) != (2 if rendered.worker_template else 0):
            yield "pods of one worker do not reach each other, or those of none do"
        if any("ports" not in rule and rule["from"] != own for rule in ingress):
            yield "the policy opens every port to others"
        if allowed != sorted(expected.keys() - {"health"}) or policy["spec"]["policyTypes"] != ["Ingress", "Egress"]:
            yield f"the policy lets in {allowed}"
        told = [each["value"] for each in rendered.server["env"] if each["name"] == "UCX_TCP_PORT_RANGE"]
        # There and back, for both roles.
        if [f"{each['port']}-{each['endPort']}" for each in ranges] != told * 2:
            yield f"NIXL uses the ports {told}, the policy opens {ranges}"


def flags(rendered: Rendered) -> Iterator[str]:
    """The command lines are those of our CLI, and the server would start with its settings."""
    if rendered.server["args"][0] != "serve":
        yield "it does not serve"
    try:
        config_of(rendered)
    except Exception as error:
        yield f"serve: {error}"
    yield from _alike(rendered)
    for container in rendered.test_pod["spec"]["containers"]:
        if "command" in container:
            continue
        command = cli.get_command(click.Context(cli), container["args"][0])
        try:
            assert command is not None, "no such command"
            command.make_context("test", list(container["args"][1:]))
        except Exception as error:
            yield f"test: {error}"


def _alike(rendered: Rendered) -> Iterator[str]:
    """What only computes does so with the settings of its server."""
    if rendered.worker_template is None:
        return
    (worker,) = rendered.worker_template["spec"]["containers"]
    first, second = config_of(rendered).engine, _config(worker, "1").engine
    if dataclasses.replace(second, nodes=first.nodes, model=first.model) != first:
        yield "ranks of one engine have other settings"
    nodes, size = first.nodes, rendered.owner["spec"]["leaderWorkerTemplate"]["size"]
    if second.nodes != dataclasses.replace(nodes, node_rank=1) or (nodes.nnodes, nodes.node_rank) != (size, 0):
        yield f"{size} pods are {nodes} and {second.nodes}"
    if {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & worker.keys():
        yield "what serves nothing has ports, or is probed"
    if secrets := {"auth", "tls", "client-ca", "tenants"} & {each["name"] for each in worker["volumeMounts"]}:
        yield f"what serves nothing has {secrets}"


def environment(rendered: Rendered) -> Iterator[str]:
    """Variables of ours exist, and what libraries write goes where it can be written."""
    known = {each.env for each in settings_of(ServerConfig).values()} | ENV_BESIDE_SETTINGS
    env = {each["name"]: each.get("value", "") for each in rendered.server["env"]}
    yield from (f"{name} is no setting" for name in env if name.startswith("SLIPSTREAM_") and name not in known)
    writable = [each["mountPath"] for each in rendered.server["volumeMounts"] if not each.get("readOnly")]
    for name in WRITTEN_BY_LIBRARIES:
        if not any(f"{env.get(name, '')}/".startswith(f"{path}/") for path in writable):
            yield f"{name}={env.get(name)} cannot be written"
    if rendered.pod.get("enableServiceLinks", True):
        yield "a Service may set variables that look like settings"


def mounts(rendered: Rendered) -> Iterator[str]:
    """Mounts name volumes, volumes are mounted, files of the command line lie on them, secrets can change."""
    for pod, container in containers(rendered):
        volumes = {each["name"] for each in pod["volumes"]}
        mounted = container["volumeMounts"]
        for mount in mounted:
            if mount["name"] not in volumes:
                yield f"{container['name']}: no volume {mount['name']}"
            if "subPath" in mount:
                yield f"{container['name']}: {mount['name']} would never change"
        paths = [mount["mountPath"] for mount in mounted]
        if len(set(paths)) < len(paths):
            yield f"{container['name']}: mounts twice at one path"
        named = re.findall(r"=(/(?:etc/slipstream|models|disk)[^\s=]*)", "\n".join(container.get("args", ())))
        yield from (
            f"{container['name']}: {path} is not mounted"
            for path in named
            if not any(f"{path}/".startswith(f"{each}/") for each in paths)
        )
    used = dict[int, set[str]]()
    for pod, container in containers(rendered):
        used.setdefault(id(pod["volumes"]), set()).update(mount["name"] for mount in container["volumeMounts"])
    for pod, _ in containers(rendered):
        names = {each["name"] for each in pod["volumes"]}
        yield from (f"volume {name} is not used" for name in sorted(names - used[id(pod["volumes"])]))


def times(rendered: Rendered) -> Iterator[str]:
    """A pod gets the time that its streams are promised, a rollout the time that weights take."""
    config, spec = config_of(rendered), rendered.owner["spec"]
    hook = rendered.server.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    promised = int(hook[1]) + config.drain_linger + config.drain_grace
    if rendered.pod["terminationGracePeriodSeconds"] < promised + 5:
        yield f"{rendered.pod['terminationGracePeriodSeconds']} seconds to end, {promised} promised"
    if rendered.worker_template:
        # What computes is needed for as long as what serves.
        if rendered.worker_template["spec"]["terminationGracePeriodSeconds"] < promised + 5:
            yield "pods that compute end before their server"
        return
    probe = rendered.server["startupProbe"]
    if spec["progressDeadlineSeconds"] <= probe["periodSeconds"] * probe["failureThreshold"] + spec["minReadySeconds"]:
        yield "a rollout fails before a pod does"
    rolling = spec["strategy"]["rollingUpdate"]
    if spec["strategy"]["type"] != "RollingUpdate" or {str(each).rstrip("%") for each in rolling.values()} == {"0"}:
        yield f"no rollout goes on with {spec['strategy']}"


def resources(rendered: Rendered) -> Iterator[str]:
    """Requests are within limits, and each rank has a whole device."""
    config = config_of(rendered)
    ranks = config.engine.model.ranks * config.data_parallel // config.engine.nodes.nnodes
    for _, container in containers(rendered):
        found = container.get("resources") or {}
        limits = found.get("limits") or {}
        for name, asked in (found.get("requests") or {}).items():
            if name in limits and amount(asked) > amount(limits[name]):
                yield f"{container['name']} asks for more {name} than its limit"
        yield from (f"{name}: {limits[name]}" for name in limits if "/" in name and limits[name] != ranks)


def restricted(rendered: Rendered) -> Iterator[str]:
    """The pods meet the Pod Security Standard "restricted", with a read-only root on top."""
    for pod, container in containers(rendered):
        security = pod["securityContext"] | container["securityContext"]
        wanted = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        if not wanted.items() <= security.items() or min(security["runAsUser"], security["runAsGroup"]) < 10000:
            yield f"{container['name']}: {security}"
    for pod in {id(pod["volumes"]): pod for pod, _ in containers(rendered)}.values():
        if {"hostNetwork", "hostPID", "hostIPC"} & pod.keys() or pod["automountServiceAccountToken"]:
            yield "reaches into the node or the API"
        kinds = {key for each in pod["volumes"] for key in each} - {"name"}
        if not kinds <= {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}:
            yield f"volumes of kinds {kinds}"


def identity(rendered: Rendered) -> Iterator[str]:
    """Names are legal and told apart; everything is in the release's namespace."""
    seen = set()
    for each in rendered.objects:
        name = each["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            yield f"{each['kind']} {name!r} is no name"
        if (each["kind"], name) in seen:
            yield f"{each['kind']} {name} is there twice"
        seen.add((each["kind"], name))
        ours = "app.kubernetes.io/name" in each["metadata"].get("labels", {})
        if ours and each["metadata"].get("namespace") != NAMESPACE:
            yield f"{each['kind']} {name} is nowhere"
    account = rendered.pod["serviceAccountName"]
    made = [each["metadata"]["name"] for each in rendered.all("ServiceAccount")]
    if made and made != [account]:
        yield f"runs as {account}, makes {made}"


def scaling(rendered: Rendered) -> Iterator[str]:
    """What scales owns `replicas`, aims at what the pods are of, and asks for a metric that there is."""
    deployment = rendered.owner
    scalers = rendered.all("HorizontalPodAutoscaler") + rendered.all("ScaledObject")
    if ("replicas" in deployment["spec"]) == bool(scalers):
        yield "replicas has two owners, or none"
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        aimed = {"name": deployment["metadata"]["name"]} | {key: deployment[key] for key in ("apiVersion", "kind")}
        if target != aimed:
            yield f"scales {target}"
        for metric in re.findall(r"slipstream_\w+", str(each["spec"].get("metrics", each["spec"].get("triggers")))):
            if metric not in {known.exported for known in names.ALL}:
                yield f"{metric} is not exported"


def scraping(rendered: Rendered) -> Iterator[str]:
    """A ServiceMonitor finds each pod once."""
    for monitor in rendered.all("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [each for each in rendered.all("Service") if matches(wanted, each["metadata"]["labels"])]
        for endpoint in monitor["spec"]["endpoints"]:
            found = [port for each in services for port in each["spec"]["ports"] if port["name"] == endpoint["port"]]
            if len(found) != 1:
                yield f"{len(found)} Services have the port {endpoint['port']}"


RULES: tuple[Rule, ...] = (
    *(selectors, ports, flags, environment, mounts, times, resources, restricted, identity, scaling, scraping),
)
"""All of them."""
