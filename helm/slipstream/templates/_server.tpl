{{/* The server's command line: flags only, so that `kubectl describe pod` shows all there is. */}}
{{- define "slipstream.args" -}}
{{- $v := .Values -}}
- serve
- {{ printf "--host=%s" $v.listenAddress | quote }}
- --port={{ int64 $v.ports.grpc }}
- {{ printf "--metrics-host=%s" (ternary $v.listenAddress "127.0.0.1" $v.metrics.enabled) | quote }}
- --metrics-port={{ int64 $v.ports.metrics }}
{{ include "slipstream.rankArgs" . }}
{{- with $v.model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --drain-linger={{ int64 $v.drain.lingerSeconds }}
- --drain-grace={{ int64 $v.drain.graceSeconds }}
{{- if $v.auth.existingSecret }}
- --auth-token-file=/etc/slipstream/auth/{{ $v.auth.key }}
{{- end }}
{{- with $v.auth.admins }}
- {{ printf "--admins=%s" . | quote }}
{{- end }}
{{- if $v.tenants }}
- --tenants-file=/etc/slipstream/tenants/tenants.yaml
{{- end }}
{{- if $v.tls.existingSecret }}
- --tls-cert=/etc/slipstream/tls/{{ $v.tls.certKey }}
- --tls-key=/etc/slipstream/tls/{{ $v.tls.privateKeyKey }}
- --health-port={{ int64 $v.ports.health }}
{{- if $v.tls.clientCa.existingSecret }}
- --tls-client-ca=/etc/slipstream/client-ca/{{ $v.tls.clientCa.key }}
- {{ printf "--tls-client-names=%s" $v.tls.clientCa.names | quote }}
{{- end }}
{{- end }}
{{- if $v.diskCache.bytes }}
# Not the volume itself, which belongs to all users of a pod.
- --disk-cache=/disk/prefixes
- --disk-cache-bytes={{ int64 $v.diskCache.bytes }}
{{- end }}
{{- include "slipstream.roleArgs" . }}
{{- include "slipstream.settings" . }}
{{- end -}}

{{/* What all pods of a worker have: each computes. */}}
{{- define "slipstream.rankArgs" -}}
{{- $v := .Values -}}
- --device={{ ternary "cuda" "cpu" $v.gpu.enabled }}
{{- if ne $v.model.source "bundled" }}
- {{ printf "--model=%s" (include "slipstream.modelPath" .) | quote }}
{{- end }}
{{- if gt (int64 $v.nodes) 1 }}
- --nnodes={{ int64 $v.nodes }}
# Set in each pod by the controller of LeaderWorkerSets.
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port={{ int64 $v.ranks.port }}
- --rank-secret-file=/etc/slipstream/ranks/{{ $v.ranks.key }}
- --join-timeout={{ include "slipstream.startupSeconds" . }}
{{- end }}
{{- end -}}

{{- define "slipstream.roleArgs" -}}
{{- $v := .Values -}}
{{- if ne $v.role "both" }}
- --role={{ $v.role }}
- --transfer-secret-file=/etc/slipstream/transfer/{{ $v.transfer.key }}
{{- if eq $v.role "prefill" }}
- {{ printf "--transfer-host=%s" $v.listenAddress | quote }}
- --transfer-port={{ int64 $v.transfer.port }}
{{- else }}
- {{ printf "--transfer-peers=%s" $v.transfer.peers | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* `settings` as flags: lists repeat theirs, switches have a `--no-` twin, null is left out. */}}
{{- define "slipstream.settings" -}}
{{- $settings := merge (dict) .Values.settings (include "slipstream.cpuThreads" . | fromYaml) -}}
{{- $_ := set $settings "metrics_names" (include "slipstream.metricsNames" .) -}}
{{- range $name := keys $settings | sortAlpha -}}
{{- $value := get $settings $name -}}
{{- $flag := $name | replace "_" "-" -}}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else if kindIs "slice" $value -}}
{{- range $value }}
- {{ printf "--%s=%s" $flag . | quote }}
{{- end -}}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ $flag }}={{ $value | toJson }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Names by which the metrics port is asked in the cluster, pods' own below that of their Service, and those of `settings`.
Scrapers that find pods by the API come by address, which needs no name.
*/}}
{{- define "slipstream.metricsNames" -}}
{{- $short := printf ".%s.%s" (include "slipstream.podsService" .) .Release.Namespace -}}
{{- $names := list $short (printf "%s.svc" $short) (printf "%s.svc.cluster.local" $short) -}}
{{- with get .Values.settings "metrics_names" }}{{ $names = append $names . }}{{ end -}}
{{- join "," $names -}}
{{- end -}}

{{/*
Threads of math, one core less than there is for the event loop. The server counts a limit by itself; said here, it is seen in
`kubectl describe`. A worker on the CPU without a limit has the node; beside a GPU there is little math, so the request decides.
*/}}
{{- define "slipstream.cpuThreads" -}}
{{- $limit := get (.Values.resources.limits | default dict) "cpu" -}}
{{- $request := get (.Values.resources.requests | default dict) "cpu" -}}
{{- $cores := ternary ($limit | default $request) $limit .Values.gpu.enabled -}}
{{- if $cores -}}
cpu_threads: {{ max 1 (sub (div (int64 (include "slipstream.milliCpu" $cores)) 1000) 1) }}
{{- end -}}
{{- end -}}

{{- define "slipstream.modelPath" -}}
{{- if .Values.model.name -}}
{{- .Values.model.name -}}
{{- else -}}
{{- printf "/models/%s" .Values.model.path | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* Everything that libraries want to write goes to mounted directories: the root is read-only. */}}
{{- define "slipstream.env" -}}
- name: SLIPSTREAM_CACHE_DIR
  value: /cache
- name: XDG_CACHE_HOME
  value: /cache/xdg
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /cache/inductor
- name: HF_HOME
  value: {{ ternary "/models/huggingface" "/cache/huggingface" (not (empty .Values.model.name)) }}
- name: HF_HUB_OFFLINE
  value: {{ ternary "0" "1" (not (empty .Values.model.name)) | quote }}
- name: HOME
  value: /tmp
# Libraries that ask for the user's name look here before they look for a line in /etc/passwd.
- name: USER
  value: slipstream
{{- if eq .Values.role "prefill" }}
# Where pods that decode reach this one: no Service, since each has keys of its own prompts.
- name: SLIPSTREAM_TRANSFER_ADVERTISE
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- if include "slipstream.nixl" . }}
- name: UCX_TCP_PORT_RANGE
  value: {{ .Values.transfer.nixlPorts | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether keys go by NIXL, which opens connections of its own, either way. */}}
{{- define "slipstream.nixl" -}}
{{- if and (ne .Values.role "both") (eq (toString .Values.settings.transfer_engine) "nixl") }}true{{ end -}}
{{- end -}}

{{/* The pods of the other role, for a network policy. */}}
{{- define "slipstream.transferPeers" -}}
{{- if eq .Values.role "prefill" -}}
{{- toYaml .Values.networkPolicy.transferFrom }}
{{- else -}}
{{- range splitList "," .Values.transfer.peers }}
- ipBlock:
    cidr: {{ trim . | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* A rule without peers would be for every pod. */}}
{{- define "slipstream.nixlPeers" -}}
{{- if and (include "slipstream.nixl" .) (or (eq .Values.role "decode") .Values.networkPolicy.transferFrom) -}}
{{- $ends := splitList "-" .Values.transfer.nixlPorts -}}
ports:
  - port: {{ int64 (first $ends) }}
    endPort: {{ int64 (last $ends) }}
    protocol: TCP
{{- end -}}
{{- end -}}

{{/* What all pods of a worker have. */}}
{{- define "slipstream.rankMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
- name: shm
  mountPath: /dev/shm
{{- if ne .Values.model.source "bundled" }}
- name: model
  mountPath: /models
  readOnly: {{ empty .Values.model.name }}
{{- end }}
{{- if gt (int64 .Values.nodes) 1 }}
- name: ranks
  mountPath: /etc/slipstream/ranks
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "slipstream.mounts" -}}
{{- include "slipstream.rankMounts" . }}
{{- if .Values.diskCache.bytes }}
- name: disk
  mountPath: /disk
{{- end }}
{{- if .Values.auth.existingSecret }}
- name: auth
  mountPath: /etc/slipstream/auth
  readOnly: true
{{- end }}
{{- if .Values.tenants }}
- name: tenants
  mountPath: /etc/slipstream/tenants
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/slipstream/tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientCa.existingSecret }}
- name: client-ca
  mountPath: /etc/slipstream/client-ca
  readOnly: true
{{- end }}
{{- if ne .Values.role "both" }}
- name: transfer
  mountPath: /etc/slipstream/transfer
  readOnly: true
{{- end }}
{{- end -}}

{{/* A health check by the kubelet; it needs a number, and cannot speak TLS. */}}
{{- define "slipstream.probePort" -}}
{{- ternary .Values.ports.health .Values.ports.grpc (ne .Values.tls.existingSecret "") | int64 -}}
{{- end -}}
