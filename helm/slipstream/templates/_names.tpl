{{- define "slipstream.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that suffixes still fit into the 63 of a Service's name. */}}
{{- define "slipstream.fullname" -}}
{{- $name := include "slipstream.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "slipstream.podsService" -}}
{{- printf "%s-pods" (include "slipstream.fullname" .) -}}
{{- end -}}

{{- define "slipstream.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "slipstream.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* What tells this release's servers from all other pods, the test's included. Never changes: selectors cannot. */}}
{{- define "slipstream.selector" -}}
{{- include "slipstream.componentSelector" (dict "root" . "component" "server") -}}
{{- end -}}

{{/* The pods of a component. Takes a dict of root and component. */}}
{{- define "slipstream.componentSelector" -}}
app.kubernetes.io/name: {{ include "slipstream.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* A label selector of all pods that serve or compute: those of the servers, and where a worker has several nodes the others. */}}
{{- define "slipstream.allPods" -}}
{{- if eq (int64 .Values.nodes) 1 -}}
matchLabels:
  {{- include "slipstream.selector" . | nindent 2 }}
{{- else -}}
matchLabels:
  app.kubernetes.io/name: {{ include "slipstream.name" . | quote }}
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [server, worker]
{{- end -}}
{{- end -}}

{{/* The object that scales the pods, for those that ask it to. */}}
{{- define "slipstream.scaled" -}}
{{- if eq (int64 .Values.nodes) 1 -}}
apiVersion: apps/v1
kind: Deployment
{{- else -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- end }}
name: {{ include "slipstream.fullname" . }}
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selector" . }}
{{ include "slipstream.commonLabels" . }}
{{- end -}}

{{- define "slipstream.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of the pod of `helm test`: no selector of the server matches them. */}}
{{- define "slipstream.testSelector" -}}
app.kubernetes.io/name: {{ include "slipstream.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "slipstream.image" -}}
{{- $variant := ternary "cuda" "cpu" .Values.gpu.enabled -}}
{{- $tag := .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $variant) -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}
