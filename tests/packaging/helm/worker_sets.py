"""LeaderWorkerSets against the fields that its CRD has: leaderworkerset.x-k8s.io/v1, read off lws v0.8's (2026-11-29).

The CRD keeps unknown fields silently and is in no package, so its fields stand here, strictly; pods in it meet
Kubernetes' own schema as templates of its kind PodTemplate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.packaging.helm.chart import Object

KIND = "LeaderWorkerSet"
API = "leaderworkerset.x-k8s.io/v1"

_SHARE = (int, str)
"""A number or a percentage."""
POD = "a pod"
SPEC: dict[str, Any] = {
    "replicas": int,
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "rolloutStrategy": {
        "type": {"RollingUpdate"},
        "rollingUpdateConfiguration": {"maxSurge": _SHARE, "maxUnavailable": _SHARE, "partition": int},
    },
    "networkConfig": {"subdomainPolicy": {"Shared", "UniquePerReplica"}},
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
        "leaderTemplate": POD,
        "workerTemplate": POD,
    },
}
NEEDED = ("leaderWorkerTemplate", "workerTemplate")


def templates(each: Object) -> list[Object]:
    """Its pods, as objects of which Kubernetes has a schema."""
    found = each["spec"]["leaderWorkerTemplate"]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name.lower()}, "template": found[name]}
        for name in ("leaderTemplate", "workerTemplate")
    ]


def findings(each: Object) -> list[str]:
    """What its fields, without the pods, have against it."""
    if each["apiVersion"] != API:
        return [f"{each['apiVersion']} is no {API}"]
    return list(_against(each["spec"], SPEC, "spec"))


def _against(value: Any, form: Any, at: str) -> Iterator[str]:
    if isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{at} is no object"
            return
        yield from (f"{at}.{name} is no field" for name in value.keys() - form.keys())
        yield from (f"{at}.{name} is needed" for name in form if name in NEEDED and name not in value)
        for name in value.keys() & form.keys():
            yield from _against(value[name], form[name], f"{at}.{name}")
    elif isinstance(form, set):
        if value not in form:
            yield f"{at} is {value!r}, not one of {sorted(form)}"
    elif form is not POD and (not isinstance(value, form) or isinstance(value, bool)):
        yield f"{at} is {value!r}"
