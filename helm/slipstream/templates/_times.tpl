{{/* How long things take. Each of these is a whole number as text. */}}

{{/* preStop, linger and grace: all that streams are promised. */}}
{{- define "slipstream.drainSeconds" -}}
{{- with .Values.drain -}}
{{- add (int64 .preStopSeconds) (int64 .lingerSeconds) (int64 .graceSeconds) -}}
{{- end -}}
{{- end -}}

{{/* Beyond the drain: last statuses, GOAWAY, the end of the engine; 20 seconds where a step hangs. */}}
{{- define "slipstream.terminationSeconds" -}}
{{- $drain := int64 (include "slipstream.drainSeconds" .) -}}
{{- if kindIs "invalid" .Values.drain.terminationGracePeriodSeconds -}}
{{- add $drain 20 -}}
{{- else -}}
{{- int64 .Values.drain.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.startupFailures" -}}
{{- with .Values.probes.startup -}}
{{- div (add (int64 .seconds) (int64 .periodSeconds) -1) (int64 .periodSeconds) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.startupSeconds" -}}
{{- mul (int64 (include "slipstream.startupFailures" .)) (int64 .Values.probes.startup.periodSeconds) -}}
{{- end -}}

{{- define "slipstream.progressSeconds" -}}
{{- if kindIs "invalid" .Values.rollout.progressDeadlineSeconds -}}
{{- add (int64 (include "slipstream.startupSeconds" .)) (int64 .Values.rollout.minReadySeconds) 300 -}}
{{- else -}}
{{- int64 .Values.rollout.progressDeadlineSeconds -}}
{{- end -}}
{{- end -}}

{{/* A CPU quantity ("2", 0.5, "1500m") in thousandths of a core; 0 where there is none. */}}
{{- define "slipstream.milliCpu" -}}
{{- $text := . | toString -}}
{{- if kindIs "invalid" . -}}
0
{{- else if hasSuffix "m" $text -}}
{{- $text | trimSuffix "m" | int64 -}}
{{- else -}}
{{- mulf (float64 $text) 1000 | int64 -}}
{{- end -}}
{{- end -}}
