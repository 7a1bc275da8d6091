"""Values that people install with, each with a name, and values that must be refused."""

from __future__ import annotations

from typing import Any

from tests.packaging.helm.chart import cpu_values, merged

Values = dict[str, Any]

CPU = cpu_values()
SECURE: Values = {
    "auth": {"existingSecret": "tokens", "admins": "ops"},
    "tls": {"existingSecret": "cert", "clientCa": {"existingSecret": "clients", "names": "gateway, client"}},
    "networkPolicy": {"grpcFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
    "tests": {"clientCertSecret": "client"},
}
OBSERVED: Values = {
    "metrics": {
        "enabled": True,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {
            "enabled": True,
            "additionalGroups": [{"name": "mine", "rules": [{"alert": "A", "expr": "vector(1)", "for": "5m"}]}],
        },
        "dashboard": {"enabled": True, "annotations": {"folder": "models"}},
    }
}
DOWNLOAD: Values = {
    "enabled": True,
    "image": "python:3.12-slim",
    "command": ["sh", "-c", 'test -d "$MODEL_DIR" || hf download org/model --local-dir "$MODEL_DIR"'],
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
    "resources": {"limits": {"memory": "2Gi"}},
}
KEDA: Values = {"type": "keda", "maxReplicas": 8, "keda": {"serverAddress": "http://prometheus:9090"}}

NODES: Values = {
    "nodes": 2,
    "settings": {"tensor_parallel": 8},
    "gpu": {"count": 4},
    "ranks": {"existingSecret": "ranks"},
}

KEPT_FILES: Values = {"diskCache": {"bytes": 1 << 30, "existingClaim": "prefixes"}}

EVERY_SETTING: Values = {
    "max_running_requests": 128,
    "max_total_tokens": 1073741824,
    "overlap": False,
    "reflection": True,
    "rate_limit": 12.5,
    "frontends": 2,
    "schedule_policy": "lpm",
    "adapter": ["french=/models/french", "german=/models/german"],
    "lora_dir": "/models/adapters",
    "queue_timeout": None,
    "log_level": "debug",
}

ACCEPTED: dict[str, Values] = {
    "defaults": {},
    "cpu": CPU,
    "cpu fraction": {"gpu": {"enabled": False}, "resources": {"limits": {"cpu": "3500m"}, "requests": {"cpu": 0.5}}},
    "cpu without limit": {"gpu": {"enabled": False}, "resources": {"limits": None, "requests": None}},
    "ranks": {"settings": {"tensor_parallel": 4}, "gpu": {"count": 4}},
    "engines": {"settings": {"data_parallel": 2, "tensor_parallel": 2}, "gpu": {"count": 4}},
    "stages": {"settings": {"data_parallel": 2, "pipeline_parallel": 2}, "gpu": {"count": 4}},
    "engines on the cpu": merged(CPU, {"settings": {"data_parallel": 2}}),
    "ranks on the cpu": merged(CPU, {"settings": {"tensor_parallel": 2}}),
    "mig": {"gpu": {"resource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia", "tolerations": []}},
    "claim": {"model": {"source": "claim", "path": "llama", "servedName": "llama"}},
    "claim of a class": {
        "replicas": 3,
        "model": {
            "source": "claim",
            "claim": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "annotations": {"a": "b"}},
            "init": DOWNLOAD,
        },
        "networkPolicy": {"egress": [{"ports": [{"port": 443}, {"port": 53, "protocol": "UDP"}]}]},
    },
    "existing claim": {"model": {"source": "existingClaim", "existingClaim": "weights", "path": "a/b"}},
    "downloaded": {"model": {"source": "emptyDir", "path": "m", "init": DOWNLOAD}},
    "by name": {
        "model": {"source": "emptyDir", "name": "org/model@main"},
        "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
    },
    "by name into a claim": {"model": {"source": "claim", "name": "org/model"}},
    "fetched by the server's image": {"model": {"source": "emptyDir", "init": {"enabled": True, "command": ["true"]}}},
    "secure": SECURE,
    "tenants": SECURE
    | {
        "tenants": {
            "alice": {"requests_per_second": 0.5, "concurrent_requests": 1000000, "concurrent_sequences": 8},
            "bob": {"tokens_per_minute": 600000, "weight": 2.5},
            "*": None,
        }
    },
    "tokens alone": {"auth": {"existingSecret": "tokens", "key": "list.txt"}},
    "tls alone": {"tls": {"existingSecret": "cert"}, "ports": {"health": 8081}},
    "prefill": {
        "role": "prefill",
        "transfer": {"existingSecret": "shared", "key": "word", "port": 9000},
        "networkPolicy": {"transferFrom": [{"podSelector": {"matchLabels": {"role": "decode"}}}]},
    },
    "decode": {
        "role": "decode",
        "transfer": {"existingSecret": "shared", "peers": "10.0.0.0/8, fd00::/8"},
        "networkPolicy": {"egress": [{"to": [{"podSelector": {}}]}]},
    },
    "prefill by NIXL": {
        "role": "prefill",
        "transfer": {"existingSecret": "shared", "nixlPorts": "9000-9007"},
        "settings": {"transfer_engine": "nixl"},
        "networkPolicy": {"transferFrom": [{"podSelector": {"matchLabels": {"role": "decode"}}}]},
    },
    "decode by NIXL": {
        "role": "decode",
        "transfer": {"existingSecret": "shared", "peers": "10.0.0.0/8, fd00::/8"},
        "settings": {"transfer_engine": "nixl"},
    },
    "observed": OBSERVED,
    "hpa": {"autoscaling": {"type": "hpa", "minReplicas": 2}, "metrics": {"enabled": True}},
    "keda": {"autoscaling": KEDA, **OBSERVED},
    "keda with its own query": {
        "autoscaling": merged(KEDA, {"keda": {"query": "vector(1)", "authenticationRef": {"name": "prometheus"}}})
    },
    "nodes": NODES,
    "nodes on the cpu": merged(
        CPU, {"nodes": 3, "ranks": {"existingSecret": "r"}, "settings": {"pipeline_parallel": 3}}
    ),
    "nodes together": merged(
        NODES,
        {
            "replicas": 3,
            "ranks": {"port": 4000, "key": "word", "exclusiveTopology": "topology.kubernetes.io/zone"},
            "model": {"source": "claim", "name": "org/model", "claim": {"accessModes": ["ReadWriteMany"]}},
            "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
            "rollout": {"maxSurge": 1, "maxUnavailable": "50%"},
        },
    ),
    "nodes that scale": merged(NODES, {"autoscaling": {"type": "hpa"}, "metrics": {"enabled": True}}),
    "nodes, all at once": merged(
        SECURE,
        OBSERVED,
        NODES,
        {
            "autoscaling": KEDA,
            "model": {"source": "emptyDir", "path": "m", "init": DOWNLOAD},
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "extraContainers": [{"name": "sidecar", "image": "proxy:1"}],
        },
    ),
    "settings": {"settings": EVERY_SETTING, "model": {"source": "existingClaim", "existingClaim": "weights"}},
    "long drain": {"drain": {"preStopSeconds": 10, "lingerSeconds": 20, "graceSeconds": 3600}},
    "own grace": {"drain": {"terminationGracePeriodSeconds": 140}},
    "percentages": {"rollout": {"maxSurge": "25%", "maxUnavailable": 0}, "replicas": 8},
    "budget by minimum": {"podDisruptionBudget": {"maxUnavailable": None, "minAvailable": "50%"}, "replicas": 4},
    "nothing around it": {
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "topologySpreadConstraints": [],
    },
    "closed network": {
        "networkPolicy": {
            "grpcFrom": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
        },
        "metrics": {"enabled": True},
    },
    "placed": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "serving",
        "imagePullSecrets": [{"name": "registry"}],
        "topologySpreadConstraints": [
            {"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": []}
        ],
    },
    "named": {"fullnameOverride": "a-name-that-is-much-longer-than-fifty-characters-and-goes-on", "nameOverride": "x"},
    "digest": {"image": {"repository": "registry.example:5000/a/b", "digest": "sha256:" + "0" * 64}},
    "extras": {
        "commonLabels": {"team": "chat"},
        "podLabels": {"tier": "gold"},
        "podAnnotations": {"a": "b"},
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "extraContainers": [{"name": "sidecar", "image": "proxy:1"}],
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-a"},
                "data": {"k": "v"},
            },
            "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-b\n",
        ],
    },
    "other ports": {"ports": {"grpc": 8033, "metrics": 8034, "health": 8035}, "service": {"type": "LoadBalancer"}},
    "version 6": {"listenAddress": "::"},
    "names that look like numbers": merged(
        SECURE,
        {
            "auth": {"existingSecret": "1"},
            "tls": {"existingSecret": "2", "clientCa": {"existingSecret": "3"}},
            "tests": {"clientCertSecret": "4"},
            "model": {"source": "existingClaim", "existingClaim": "5", "path": "6", "servedName": "7"},
            "priorityClassName": "8",
            "serviceAccount": {"name": "9"},
            "gpu": {"runtimeClassName": "10"},
            "cache": {"existingClaim": "11"},
            "commonLabels": {"a": "12"},
        },
    ),
    "files": {"diskCache": {"bytes": 1 << 36}, "settings": {"host_cache_bytes": 1 << 33}, "replicas": 2},
    "kept files": KEPT_FILES,
    "kept cache": {"cache": {"existingClaim": "compiled"}},
    "all at once": merged(
        CPU,
        SECURE,
        OBSERVED,
        {
            "autoscaling": KEDA,
            "settings": EVERY_SETTING,
            "model": {"source": "emptyDir", "path": "m", "init": DOWNLOAD},
            "drain": {"preStopSeconds": 5},
        },
    ),
}
"""Name -> values."""

REFUSED: dict[str, tuple[Values, str]] = {
    "a name without a volume": ({"model": {"name": "org/model"}}, "model.source has to be claim"),
    "a name and a directory": (
        {"model": {"source": "claim", "name": "org/model", "path": "m"}},
        "model.path and model.init are for directories",
    ),
    "no name of a hub": ({"model": {"source": "claim", "name": "model"}}, "/model/name"),
    "several nodes of one rank": (
        {"nodes": 2, "gpu": {"enabled": False}},
        "nodes: 2: each node has equally many ranks",
    ),
    "uneven nodes": (merged(NODES, {"nodes": 3, "gpu": {"enabled": False}}), "and there are 8; for more workers"),
    "devices of one node": (merged(NODES, {"gpu": {"count": 8}}), "gpu.count: 8 on 2 nodes"),
    "engines on nodes": (
        merged(NODES, {"gpu": {"count": 8}, "settings": {"data_parallel": 2}}),
        "a worker of several nodes has one engine",
    ),
    "nodes without a secret": (merged(NODES, {"ranks": {"existingSecret": ""}}), "ranks.existingSecret: nodes of one"),
    "nodes of a role": (
        merged(NODES, {"role": "prefill", "transfer": {"existingSecret": "s"}}),
        "role prefill is not possible with several ranks",
    ),
    "one pod's claim for a worker's nodes": (
        merged(NODES, {"model": {"source": "claim", "claim": {"accessModes": ["ReadWriteOncePod"]}}}),
        "is for one pod",
    ),
    "files of several ranks": (merged(NODES, KEPT_FILES), "files are not possible with several ranks"),
    "a claim for no files": ({"diskCache": {"existingClaim": "prefixes"}}, "needs diskCache.bytes"),
    "one claim for files of several pods": (merged(KEPT_FILES, {"replicas": 2}), "is of one pod"),
    "few bytes for files": ({"diskCache": {"bytes": 5}}, "diskCache/bytes"),
    "files in settings": ({"settings": {"disk_cache": "/x"}}, "disk_cache"),
    "ranks in settings": ({"settings": {"nnodes": 2}}, "nnodes"),
    "several devices": ({"gpu": {"count": 2}}, "settings.tensor_parallel is 1"),
    "engines without devices": ({"settings": {"data_parallel": 2}}, "settings.data_parallel 2"),
    "engines of a role": (
        {"role": "decode", "settings": {"data_parallel": 2}, "gpu": {"count": 2}},
        "settings.data_parallel: role decode has one engine",
    ),
    "ranks without devices": ({"settings": {"tensor_parallel": 4}, "gpu": {"count": 2}}, "tensor_parallel is 4"),
    "stages without devices": ({"settings": {"pipeline_parallel": 2}}, "pipeline_parallel 2"),
    "half a device": ({"gpu": {"count": 0.5}}, "/gpu/count"),
    "grace below the drain": ({"drain": {"terminationGracePeriodSeconds": 139}}, "139 would cut streams"),
    "grace below preStop and drain": (
        {"drain": {"preStopSeconds": 30, "terminationGracePeriodSeconds": 169}},
        "preStop, linger and grace take 165",
    ),
    "no step of a rollout": ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "no rollout could take a step"),
    "no step in percent": ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "no rollout could take a step"),
    "impatient rollout": ({"rollout": {"progressDeadlineSeconds": 600}}, "still allows weights to load"),
    "two budgets": ({"podDisruptionBudget": {"minAvailable": 1}}, "give one of maxUnavailable and minAvailable"),
    "no budget": ({"podDisruptionBudget": {"maxUnavailable": None}}, "give one of maxUnavailable and minAvailable"),
    "claim without name": ({"model": {"source": "existingClaim"}}, "needs the name of the claim"),
    "claim beside another source": ({"model": {"existingClaim": "weights"}}, "but model.source is bundled"),
    "nothing fills the volume": ({"model": {"source": "emptyDir"}}, "model.init has to fill it"),
    "init of what is in the image": ({"model": {"init": {"enabled": True, "command": ["true"]}}}, "is in the image"),
    "init that does nothing": ({"model": {"source": "claim", "init": {"enabled": True}}}, "model.init.command"),
    "path out of the volume": ({"model": {"source": "claim", "path": "a/../.."}}, "is below the volume"),
    "absolute path": ({"model": {"source": "claim", "path": "/etc"}}, "is below the volume"),
    "one pod's claim for two": (
        {"replicas": 2, "model": {"source": "claim", "claim": {"accessModes": ["ReadWriteOncePod"]}}},
        "is for one pod",
    ),
    "client CA without TLS": ({"tls": {"clientCa": {"existingSecret": "ca"}}}, "needs tls.existingSecret"),
    "admins without names": ({"auth": {"admins": "ops"}}, "which say who calls"),
    "client CA for anybody": (
        {"tls": {"existingSecret": "cert", "clientCa": {"existingSecret": "ca"}}},
        "names is * for every certificate",
    ),
    "role without a secret": ({"role": "prefill"}, "transfer.existingSecret: role prefill needs the secret"),
    "decode from nowhere": ({"role": "decode", "transfer": {"existingSecret": "s"}}, "transfer.peers: role decode"),
    "peers by name": ({"transfer": {"peers": "prefill.default.svc"}}, "peers"),
    "ports of no number": ({"transfer": {"nixlPorts": "high-higher"}}, "nixlPorts"),
    "role that is none": ({"role": "router"}, "role"),
    "role in settings": ({"settings": {"role": "decode"}}, "role"),
    "names of no authority's": ({"tls": {"clientCa": {"names": "gateway"}}}, "go together"),
    "monitor of a closed port": ({"metrics": {"serviceMonitor": {"enabled": True}}}, "the port is closed"),
    "hpa of closed metrics": ({"autoscaling": {"type": "hpa"}}, "needs metrics.enabled"),
    "keda of closed metrics": ({"autoscaling": KEDA}, "needs metrics.enabled"),
    "tenants without names": ({"tenants": {"*": {"concurrent_requests": 4}}}, "which say who calls"),
    "tenant's limit below the lowest": (
        SECURE | {"tenants": {"alice": {"requests_per_second": 0}}},
        "requests_per_second",
    ),
    "one port twice": ({"ports": {"metrics": 50051}}, "must differ"),
    "fewest above most": ({"autoscaling": {"minReplicas": 5}}, "minReplicas is more than maxReplicas"),
    "keda without prometheus": ({"autoscaling": {"type": "keda"}}, "needs the address of Prometheus"),
    "request above limit": ({"resources": {"limits": {"cpu": "1500m"}}}, "requests.cpu is more than limits.cpu"),
    "device among resources": ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "is added by gpu.enabled"),
    "loopback": ({"listenAddress": "127.0.0.1"}, "is seen by nobody outside the pod"),
    "replicas as text": ({"replicas": "two"}, "/replicas"),
    "replicas below zero": ({"replicas": -1}, "/replicas"),
    "misspelt key": ({"replica": 2}, "replica"),
    "misspelt key inside": ({"drain": {"gracePeriod": 5}}, "gracePeriod"),
    "unknown setting": ({"settings": {"max_runing_requests": 5}}, "max_runing_requests"),
    "setting of the wrong kind": ({"settings": {"page_size": "big"}}, "page_size"),
    "setting out of range": ({"settings": {"page_size": 0}}, "page_size"),
    "setting that is no choice": ({"settings": {"dtype": "int3"}}, "dtype"),
    "setting that another value decides": ({"settings": {"port": 1}}, "port"),
    "adapter without directory": ({"settings": {"adapter": ["french"]}}, "adapter"),
    "recreate": ({"rollout": {"type": "Recreate"}}, "type"),
    "port out of range": ({"ports": {"grpc": 99999}}, "/ports/grpc"),
    "share above all": ({"rollout": {"maxUnavailable": "250%"}}, "maxUnavailable"),
    "size without unit of memory": ({"shm": {"sizeLimit": "1GB"}}, "sizeLimit"),
    "source that is none": ({"model": {"source": "s3"}}, "source"),
    "digest that is none": ({"image": {"digest": "latest"}}, "digest"),
    "no image": ({"image": {"repository": ""}}, "repository"),
    "spread without key": ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologySpreadConstraints"),
    "scale that is none": ({"autoscaling": {"type": "vpa"}}, "type"),
    "to zero without a metric": ({"autoscaling": {"minReplicas": 0}}, "minReplicas"),
}
"""Name -> values and words of the refusal."""
