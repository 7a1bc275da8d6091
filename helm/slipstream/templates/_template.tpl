{{/* The pods of a component: "server", or "worker" for those that only compute. Takes a dict of root and component. */}}
{{- define "slipstream.podTemplate" -}}
{{- $ := .root -}}
{{- $serves := eq .component "server" -}}
metadata:
  labels:
    {{- include "slipstream.componentSelector" . | nindent 4 }}
    {{- include "slipstream.commonLabels" $ | nindent 4 }}
    {{- with $.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: server
    {{- with $.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "slipstream.serviceAccount" $ | quote }}
  automountServiceAccountToken: false
  # Otherwise a Service called "slipstream" would set variables that look like settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "slipstream.terminationSeconds" $ }}
  {{- with $.Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- if and $.Values.gpu.enabled $.Values.gpu.runtimeClassName }}
  runtimeClassName: {{ $.Values.gpu.runtimeClassName | quote }}
  {{- end }}
  securityContext:
    {{- toYaml $.Values.podSecurityContext | nindent 4 }}
  {{- if $.Values.model.init.enabled }}
  initContainers:
    {{- include "slipstream.initContainer" $ | nindent 4 }}
  {{- end }}
  containers:
    {{- include (ternary "slipstream.container" "slipstream.workerContainer" $serves) $ | nindent 4 }}
    {{- with ternary $.Values.extraContainers (list) $serves }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "slipstream.rankVolumes" $ | nindent 4 }}
    {{- if $serves }}
    {{- include "slipstream.volumes" $ | nindent 4 }}
    {{- end }}
    {{- with $.Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "slipstream.placement" . | nindent 2 }}
{{- end -}}

{{/* A pod that computes and serves nothing: it has no port that is asked, no probe, and no Secret of callers. */}}
{{- define "slipstream.workerContainer" -}}
- name: server
  image: {{ include "slipstream.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - serve
    {{- include "slipstream.rankArgs" . | nindent 4 }}
    {{- include "slipstream.settings" . | nindent 4 }}
  env:
    {{- include "slipstream.env" . | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    {{- include "slipstream.resources" . | nindent 4 }}
  volumeMounts:
    {{- include "slipstream.rankMounts" . | nindent 4 }}
{{- end -}}
