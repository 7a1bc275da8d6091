{{/* Those of all pods of a worker. Secrets are mounted as directories: a file mounted by subPath would never change. */}}
{{- define "slipstream.rankVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.sizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit }}
- name: cache
  {{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
  {{- end }}
{{- include "slipstream.modelVolume" . }}
{{- if gt (int64 .Values.nodes) 1 }}
- name: ranks
  secret:
    secretName: {{ .Values.ranks.existingSecret | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- end -}}

{{/* Those of the pods that serve. */}}
{{- define "slipstream.volumes" -}}
{{- with .Values.diskCache }}
{{- if .bytes }}
- name: disk
  {{- if .existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .existingClaim | quote }}
  {{- else }}
  emptyDir:
    # Files that are being written come on top.
    sizeLimit: {{ add (int64 .bytes) (div (int64 .bytes) 10) | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- with .Values.auth.existingSecret }}
- name: auth
  secret:
    secretName: {{ . | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- if .Values.tenants }}
- name: tenants
  configMap:
    name: {{ include "slipstream.fullname" . }}-tenants
{{- end }}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- with .Values.tls.clientCa.existingSecret }}
- name: client-ca
  secret:
    secretName: {{ . | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- if ne .Values.role "both" }}
- name: transfer
  secret:
    secretName: {{ .Values.transfer.existingSecret | quote }}
    defaultMode: 288 # 0440
{{- end }}
{{- end -}}

{{- define "slipstream.modelVolume" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "emptyDir" }}
- name: model
  emptyDir:
    sizeLimit: {{ $model.emptyDir.sizeLimit }}
{{- else if eq $model.source "existingClaim" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.existingClaim | quote }}
{{- else if eq $model.source "claim" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ include "slipstream.fullname" . }}-model
{{- end }}
{{- end -}}
