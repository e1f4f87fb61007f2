{{- define "tpvision.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- $name | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "tpvision.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* With `extraLabels` in the context, which win over the chart's own. */}}
{{- define "tpvision.metadata" -}}
name: {{ include "tpvision.fullname" . }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- merge (dict) (.extraLabels | default dict) (include "tpvision.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- end }}

{{- define "tpvision.labels" -}}
{{ include "tpvision.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tpvision.hasKeys" -}}
{{- if or .Values.apiKeys.keys .Values.apiKeys.existingSecret }}yes{{ end }}
{{- end }}

{{- define "tpvision.keysSecret" -}}
{{- if and .Values.apiKeys.keys .Values.apiKeys.existingSecret }}
{{- fail "apiKeys: give keys or existingSecret, not both" }}
{{- end }}
{{- .Values.apiKeys.existingSecret | default (printf "%s-keys" (include "tpvision.fullname" .)) }}
{{- end }}

{{- define "tpvision.modelPath" -}}
/models/{{ .Values.model.folder }}
{{- end }}

{{- /* The settings file: the values' own, and what follows from how the chart runs the two containers. */}}
{{- define "tpvision.settings" -}}
{{- $server := dict }}
{{- if include "tpvision.hasKeys" . }}
{{- $server = dict "api_keys_file" "/etc/tpvision-keys/api-keys" }}
{{- end }}
{{- $chosen := dict
      "model" (dict "path" (include "tpvision.modelPath" .))
      "parallel" (dict "workers" "external" "socket" "/run/tpvision/control.sock")
      "server" $server }}
{{- mergeOverwrite (deepCopy .Values.settings) $chosen | toYaml }}
{{- end }}

{{- define "tpvision.drainSeconds" -}}
{{- dig "limits" "drain_timeout_s" 60 .Values.settings | ceil | int }}
{{- end }}

{{- /* The front-end sleeps, drains, flushes and tells its ranks to stop (15 s at most); then each worker has 5 s. */}}
{{- define "tpvision.graceSeconds" -}}
{{- add .Values.preStopSleepSeconds (include "tpvision.drainSeconds" .) 15 (mul 5 .Values.settings.parallel.groups) 5 }}
{{- end }}

{{- define "tpvision.image" -}}
{{- $image := index .Values.image .of }}
{{- $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* What all containers have in common: restricted pod security, and nothing written but to /tmp. */}}
{{- define "tpvision.container" -}}
image: {{ include "tpvision.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError # the last line holds the root cause
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "tpvision.devices" -}}
{{- untilStep 0 (int .Values.settings.parallel.tensor) 1 | join "," }}
{{- end }}

{{- /* As deploy/proxies/nginx.conf, which was tried: wider than our own limits, and nothing is held. */}}
{{- define "tpvision.nginxAnnotations" -}}
{{- $limits := .Values.settings.limits | default dict -}}
nginx.ingress.kubernetes.io/proxy-body-size: "0"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
nginx.ingress.kubernetes.io/proxy-buffer-size: 32k
nginx.ingress.kubernetes.io/proxy-buffers-number: "16"
nginx.ingress.kubernetes.io/proxy-busy-buffers-size: 64k
nginx.ingress.kubernetes.io/proxy-max-temp-file-size: "0"
nginx.ingress.kubernetes.io/proxy-connect-timeout: "2"
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ dig "send_timeout_s" 60 $limits | ceil | int | quote }}
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ add (dig "request_timeout_s" 300 $limits | ceil | int) 10 | quote }}
nginx.ingress.kubernetes.io/proxy-next-upstream: error timeout
{{- end }}
