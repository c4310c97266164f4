{{/*
A Deployment up to and including its pod template. Takes name, replicas (as text; empty: none) and strategy in addition to
a pod's context.
The progress deadline allows for one pod to terminate and another to start.
*/}}
{{- define "baton.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  annotations:
    baton.dev/replicas-managed-by: {{ ternary "chart" "external" (not (not .replicas)) }}
    {{- with .root.Values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with .replicas }}
  replicas: {{ . }}
  {{- end }}
  revisionHistoryLimit: {{ .root.Values.revisionHistoryLimit }}
  progressDeadlineSeconds: {{ add (int .root.Values.startSeconds) (int (include "baton.graceSeconds" .)) 60 }}
  strategy:
    {{- .strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  template:
    {{- include "baton.podTemplate" . | nindent 4 }}
{{- end -}}

{{/* Evictions are limited as v.pdb says; a pod that isn't ready may always be evicted. Takes name, v. */}}
{{- define "baton.pdb" -}}
{{- if .v.pdb.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  {{- include "baton.annotations" .root }}
spec:
  {{- if not (kindIs "invalid" .v.pdb.minAvailable) }}
  minAvailable: {{ .v.pdb.minAvailable }}
  {{- else }}
  maxUnavailable: {{ .v.pdb.maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* A headless Service with the addresses of a role's ready pods. */}}
{{- define "baton.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  {{- include "baton.annotations" .root }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector:
    {{- include "baton.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ .root.Values.ports.grpc }}, targetPort: grpc, protocol: TCP}
    {{- if ne .role "kvstore" }}
    - {name: framed, port: {{ .root.Values.ports.framed }}, targetPort: framed, protocol: TCP}
    {{- end }}
    - {name: ops, port: {{ .root.Values.ports.ops }}, targetPort: ops, protocol: TCP}
{{- end -}}

{{/* With GPUs, there may be none free for an additional pod, so an old pod is removed first; otherwise a new pod is added first. */}}
{{- define "baton.rollingUpdate" -}}
{{- if .v.strategy -}}
{{- toYaml .v.strategy -}}
{{- else -}}
{{- $scarce := and .v.gpu (gt (int (dig "gpu" "count" 0 .v)) 0) -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: {{ ternary 0 1 (not (not $scarce)) }}
  maxUnavailable: {{ ternary 1 0 (not (not $scarce)) }}
{{- end -}}
{{- end -}}
