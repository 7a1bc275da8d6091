{{- define "slipstream.container" -}}
- name: server
  image: {{ include "slipstream.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    {{- include "slipstream.args" . | nindent 4 }}
  env:
    {{- include "slipstream.env" . | nindent 4 }}
  ports:
    - name: grpc
      containerPort: {{ int64 .Values.ports.grpc }}
    {{- if .Values.metrics.enabled }}
    - name: metrics
      containerPort: {{ int64 .Values.ports.metrics }}
    {{- end }}
    {{- if eq .Values.role "prefill" }}
    - name: transfer
      containerPort: {{ int64 .Values.transfer.port }}
    {{- end }}
    {{- if .Values.tls.existingSecret }}
    - name: health
      containerPort: {{ int64 .Values.ports.health }}
    {{- end }}
  {{- include "slipstream.probes" . | nindent 2 }}
  {{- if .Values.drain.preStopSeconds }}
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ int64 .Values.drain.preStopSeconds | quote }}]
  {{- end }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    {{- include "slipstream.resources" . | nindent 4 }}
  volumeMounts:
    {{- include "slipstream.mounts" . | nindent 4 }}
{{- end -}}

{{/* Started is what can serve; alive is what has an engine or loads one; ready is what can serve and does not drain. */}}
{{- define "slipstream.probes" -}}
{{- $port := include "slipstream.probePort" . -}}
{{- with .Values.probes -}}
startupProbe:
  grpc:
    port: {{ $port }}
    service: slipstream.v1.InferenceService
  periodSeconds: {{ int64 .startup.periodSeconds }}
  timeoutSeconds: {{ int64 .startup.timeoutSeconds }}
  failureThreshold: {{ include "slipstream.startupFailures" $ }}
livenessProbe:
  grpc:
    port: {{ $port }}
    service: ""
  periodSeconds: {{ int64 .liveness.periodSeconds }}
  timeoutSeconds: {{ int64 .liveness.timeoutSeconds }}
  failureThreshold: {{ int64 .liveness.failureThreshold }}
readinessProbe:
  grpc:
    port: {{ $port }}
    service: slipstream.v1.InferenceService
  periodSeconds: {{ int64 .readiness.periodSeconds }}
  timeoutSeconds: {{ int64 .readiness.timeoutSeconds }}
  failureThreshold: {{ int64 .readiness.failureThreshold }}
{{- end -}}
{{- end -}}

{{/* Resources without those that were set to null, which is how a value of another file is taken back. */}}
{{- define "slipstream.quantities" -}}
{{- $found := dict -}}
{{- range $kind, $quantities := . -}}
{{- if kindIs "map" $quantities -}}
{{- $kept := dict -}}
{{- range $name, $quantity := $quantities -}}
{{- if not (kindIs "invalid" $quantity) -}}
{{- $_ := set $kept $name $quantity -}}
{{- end -}}
{{- end -}}
{{- $_ := set $found $kind $kept -}}
{{- else if $quantities -}}
{{- $_ := set $found $kind $quantities -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* An extended resource has to be a limit; the request follows it. */}}
{{- define "slipstream.resources" -}}
{{- $resources := include "slipstream.quantities" .Values.resources | fromYaml -}}
{{- if .Values.gpu.enabled -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits .Values.gpu.resource (int64 .Values.gpu.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "slipstream.initContainer" -}}
{{- $init := .Values.model.init -}}
- name: fetch-model
  image: {{ $init.image | default (include "slipstream.image" .) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    {{- toYaml $init.command | nindent 4 }}
  {{- with $init.args }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    - name: MODEL_DIR
      value: {{ include "slipstream.modelPath" . | quote }}
    - name: HOME
      value: /tmp
    - name: HF_HOME
      value: /cache/huggingface
    {{- with $init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $init.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    {{- include "slipstream.quantities" $init.resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /models
    - name: tmp
      mountPath: /tmp
    - name: cache
      mountPath: /cache
{{- end -}}

{{/* Takes a dict of root and component. */}}
{{- define "slipstream.placement" -}}
{{- $ := .root -}}
{{- with $.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := ternary $.Values.gpu.tolerations (list) $.Values.gpu.enabled | concat $.Values.tolerations }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $.Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- /* Those that only compute have to be near their server, and not spread. */}}
{{- with ternary $.Values.topologySpreadConstraints (list) (eq .component "server") }}
topologySpreadConstraints:
  {{- $own := include "slipstream.selector" $ | fromYaml }}
  {{- range . }}
  {{- /* Old pods of a rollout do not count: the new ones have to be spread among themselves. */}}
  {{- $default := dict "labelSelector" (dict "matchLabels" $own) "matchLabelKeys" (list "pod-template-hash") }}
  - {{ merge (dict) . $default | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}
