{{/*
Labels. Each takes a context: root (the chart's), role, and pool (its key, for pools only).
*/}}

{{/* The selector by which a Deployment finds its pods. It can't be changed later, so it has names only. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
baton.dev/role: {{ .role }}
{{- with .pool }}
baton.dev/pool: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of a pod. They don't have the chart's version, since an upgrade that changes nothing for a pod must not restart it. */}}
{{- define "baton.podLabels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/part-of: baton
baton.dev/cluster: {{ include "baton.cluster" .root }}
{{- end -}}

{{/* Labels of any object that belongs to one role. */}}
{{- define "baton.labels" -}}
{{ include "baton.podLabels" . }}
{{ include "baton.releaseLabels" .root }}
{{- end -}}

{{/* Labels of an object that belongs to the whole release. Takes the root. */}}
{{- define "baton.commonLabels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: baton
baton.dev/cluster: {{ include "baton.cluster" . }}
{{ include "baton.releaseLabels" . }}
{{- end -}}

{{- define "baton.releaseLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata.annotations on lines of its own, or nothing. Takes the root. */}}
{{- define "baton.annotations" -}}
{{- with .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}
