{{/* What cannot work together is refused here, with the reason. What one value may be is the schema's business. */}}
{{- define "slipstream.checks" -}}
{{- $v := .Values -}}

{{- $ranks := int64 (get $v.settings "tensor_parallel" | default 1) -}}
{{- $engines := int64 (get $v.settings "data_parallel" | default 1) -}}
{{- $stages := int64 (get $v.settings "pipeline_parallel" | default 1) -}}
{{- $nodes := int64 $v.nodes -}}
{{- if and $v.gpu.enabled (ne (mul $nodes $v.gpu.count) (mul $engines $ranks $stages)) -}}
{{- fail (printf "gpu.count: %d on %d nodes: a worker uses one device for each rank of each engine, and settings.tensor_parallel is %d, settings.pipeline_parallel %d, settings.data_parallel %d" (int64 $v.gpu.count) $nodes $ranks $stages $engines) -}}
{{- end -}}
{{- include "slipstream.nodeChecks" (dict "root" . "ranks" (mul $ranks $stages) "engines" $engines) -}}

{{- $drain := int64 (include "slipstream.drainSeconds" .) -}}
{{- $termination := int64 (include "slipstream.terminationSeconds" .) -}}
{{- if lt $termination (add $drain 5) -}}
{{- fail (printf "drain.terminationGracePeriodSeconds: %d would cut streams: preStop, linger and grace take %d, and 5 more are needed to end" $termination $drain) -}}
{{- end -}}
{{- $nothing := list "0" "0%" -}}
{{- if and (has (toString $v.rollout.maxSurge) $nothing) (has (toString $v.rollout.maxUnavailable) $nothing) -}}
{{- fail "rollout: maxSurge and maxUnavailable are both 0, so no rollout could take a step" -}}
{{- end -}}
{{- if le (int64 (include "slipstream.progressSeconds" .)) (add (int64 (include "slipstream.startupSeconds" .)) (int64 $v.rollout.minReadySeconds)) -}}
{{- fail "rollout.progressDeadlineSeconds: a rollout would count as failed while probes.startup still allows weights to load" -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (eq (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable) (kindIs "invalid" $v.podDisruptionBudget.minAvailable)) -}}
{{- fail "podDisruptionBudget: give one of maxUnavailable and minAvailable, and set the other to null" -}}
{{- end -}}

{{- include "slipstream.modelChecks" . -}}
{{- include "slipstream.accessChecks" . -}}
{{- include "slipstream.scaleChecks" . -}}
{{- include "slipstream.roleChecks" . -}}
{{- include "slipstream.diskChecks" (dict "root" . "ranks" (mul $ranks $stages)) -}}
{{- end -}}

{{/* Takes a dict of root and ranks of one engine. */}}
{{- define "slipstream.diskChecks" -}}
{{- $v := .root.Values -}}
{{- if and $v.diskCache.bytes (gt .ranks 1) -}}
{{- fail "diskCache.bytes: files are not possible with several ranks yet" -}}
{{- end -}}
{{- if and $v.diskCache.existingClaim (not $v.diskCache.bytes) -}}
{{- fail "diskCache.existingClaim: needs diskCache.bytes" -}}
{{- end -}}
{{- $alone := and (eq $v.autoscaling.type "none") (eq (int64 $v.replicas) 1) (has (toString $v.rollout.maxSurge) (list "0" "0%")) -}}
{{- if and $v.diskCache.existingClaim (not $alone) -}}
{{- fail "diskCache.existingClaim: is of one pod, and there may be several by replicas, autoscaling or rollout.maxSurge" -}}
{{- end -}}
{{- end -}}

{{/* Takes a dict of root, ranks of one engine, and engines. */}}
{{- define "slipstream.nodeChecks" -}}
{{- $v := .root.Values -}}
{{- $nodes := int64 $v.nodes -}}
{{- if gt $nodes 1 -}}
{{- if or (eq .ranks 1) (mod .ranks $nodes) -}}
{{- fail (printf "nodes: %d: each node has equally many ranks of settings.tensor_parallel or settings.pipeline_parallel, and there are %d; for more workers use replicas" $nodes .ranks) -}}
{{- end -}}
{{- if gt .engines 1 -}}
{{- fail (printf "nodes: %d: a worker of several nodes has one engine; use replicas instead of settings.data_parallel" $nodes) -}}
{{- end -}}
{{- if not $v.ranks.existingSecret -}}
{{- fail "ranks.existingSecret: nodes of one worker need a secret by which they know each other" -}}
{{- end -}}
{{- if ne $v.role "both" -}}
{{- fail (printf "nodes: %d: role %s is not possible with several ranks yet" $nodes $v.role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.roleChecks" -}}
{{- $v := .Values -}}
{{- if and (ne $v.role "both") (gt (int64 (get $v.settings "data_parallel" | default 1)) 1) -}}
{{- fail (printf "settings.data_parallel: role %s has one engine in each worker yet; use replicas" $v.role) -}}
{{- end -}}
{{- if and (ne $v.role "both") (not $v.transfer.existingSecret) -}}
{{- fail (printf "transfer.existingSecret: role %s needs the secret that workers of both roles share" $v.role) -}}
{{- end -}}
{{- if and (eq $v.role "decode") (not $v.transfer.peers) -}}
{{- fail "transfer.peers: role decode needs the networks of the pods that prefill, as 10.0.0.0/8" -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.modelChecks" -}}
{{- $model := .Values.model -}}
{{- if and (eq $model.source "existingClaim") (not $model.existingClaim) -}}
{{- fail "model.existingClaim: needs the name of the claim" -}}
{{- end -}}
{{- if and $model.existingClaim (ne $model.source "existingClaim") -}}
{{- fail (printf "model.existingClaim is given, but model.source is %s" $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "emptyDir") (not $model.init.enabled) (not $model.name) -}}
{{- fail "model.source: emptyDir begins empty; model.init has to fill it, or model.name" -}}
{{- end -}}
{{- if and $model.name (eq $model.source "bundled") -}}
{{- fail "model.name: is fetched into a volume; model.source has to be claim, existingClaim or emptyDir" -}}
{{- end -}}
{{- if and $model.name (or $model.path $model.init.enabled) -}}
{{- fail "model.name: the server fetches it by itself; model.path and model.init are for directories" -}}
{{- end -}}
{{- if and (eq $model.source "bundled") (or $model.init.enabled $model.path) -}}
{{- fail "model.source: bundled is in the image; model.init and model.path need another source" -}}
{{- end -}}
{{- if and $model.init.enabled (not $model.init.command) -}}
{{- fail "model.init.command: needs what fills MODEL_DIR" -}}
{{- end -}}
{{- if or (hasPrefix "/" $model.path) (has ".." (splitList "/" $model.path)) -}}
{{- fail "model.path: is below the volume" -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.accessChecks" -}}
{{- $v := .Values -}}
{{- if and $v.tls.clientCa.existingSecret (not $v.tls.existingSecret) -}}
{{- fail "tls.clientCa.existingSecret needs tls.existingSecret" -}}
{{- end -}}
{{- if and $v.auth.admins (not $v.auth.existingSecret) (not $v.tls.clientCa.existingSecret) -}}
{{- fail "auth.admins needs auth.existingSecret or tls.clientCa.existingSecret, which say who calls" -}}
{{- end -}}
{{- if ne (empty $v.tls.clientCa.existingSecret) (empty $v.tls.clientCa.names) -}}
{{- fail "tls.clientCa: existingSecret and names go together; names is * for every certificate of the authorities" -}}
{{- end -}}
{{- if and $v.tenants (not $v.auth.existingSecret) (not $v.tls.clientCa.existingSecret) -}}
{{- fail "tenants needs auth.existingSecret or tls.clientCa.existingSecret, which say who calls" -}}
{{- end -}}
{{- if or (hasPrefix "127." $v.listenAddress) (eq "::1" $v.listenAddress) -}}
{{- fail (printf "listenAddress: %s is seen by nobody outside the pod, the kubelet included" $v.listenAddress) -}}
{{- end -}}
{{- $ports := list (int64 $v.ports.grpc) (int64 $v.ports.metrics) (int64 $v.ports.health) -}}
{{- if ne (len (uniq $ports)) 3 -}}
{{- fail (printf "ports: %v must differ" $ports) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.scaleChecks" -}}
{{- $v := .Values -}}
{{- $scale := $v.autoscaling -}}
{{- if gt (int64 $scale.minReplicas) (int64 $scale.maxReplicas) -}}
{{- fail "autoscaling: minReplicas is more than maxReplicas" -}}
{{- end -}}
{{- if and (eq $scale.type "keda") (not $scale.keda.serverAddress) -}}
{{- fail "autoscaling.keda.serverAddress: needs the address of Prometheus" -}}
{{- end -}}
{{- if not $v.metrics.enabled -}}
{{- if $v.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.serviceMonitor needs metrics.enabled: the port is closed" -}}
{{- end -}}
{{- if or (eq $scale.type "hpa") (and (eq $scale.type "keda") (not $scale.keda.query)) -}}
{{- fail (printf "autoscaling.type: %s scales by the metrics of the pods, which needs metrics.enabled" $scale.type) -}}
{{- end -}}
{{- end -}}
{{- $most := ternary $v.replicas $scale.maxReplicas (eq $scale.type "none") | int64 -}}
{{- if and (eq $v.model.source "claim") (has "ReadWriteOncePod" $v.model.claim.accessModes) (or (gt $most 1) (gt (int64 $v.nodes) 1)) -}}
{{- fail "model.claim.accessModes: ReadWriteOncePod is for one pod, and there may be several" -}}
{{- end -}}
{{- $limits := $v.resources.limits | default dict -}}
{{- $requests := $v.resources.requests | default dict -}}
{{- $limit := int64 (include "slipstream.milliCpu" (get $limits "cpu" | default nil)) -}}
{{- if and $limit (gt (int64 (include "slipstream.milliCpu" (get $requests "cpu" | default nil))) $limit) -}}
{{- fail "resources: requests.cpu is more than limits.cpu" -}}
{{- end -}}
{{- if or (hasKey $limits $v.gpu.resource) (hasKey $requests $v.gpu.resource) -}}
{{- fail (printf "resources: %s is added by gpu.enabled" $v.gpu.resource) -}}
{{- end -}}
{{- end -}}
