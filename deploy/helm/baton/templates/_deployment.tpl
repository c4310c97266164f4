{{/*
A Deployment's head, down to its pods. Takes name, replicas and strategy beside a pod's context. A rollout is late
only when a pod has had its time to leave and another its time to start.
*/}}
{{- define "baton.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  {{- include "baton.annotations" .root }}
spec:
  replicas: {{ .replicas }}
  revisionHistoryLimit: {{ .root.Values.revisionHistoryLimit }}
  progressDeadlineSeconds: {{ add (int .v.startSeconds) (int (include "baton.graceSeconds" .)) 60 }}
  strategy:
    {{- .strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  template:
    {{- include "baton.podTemplate" . | nindent 4 }}
{{- end -}}

{{/* Never more than one at a time by an eviction; a pod that isn't ready may always be evicted. Takes name, v. */}}
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

{{/* The addresses of a role's pods, ready ones only. */}}
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
    - {name: framed, port: {{ include "baton.framedPort" .root }}, targetPort: framed, protocol: TCP}
    {{- end }}
    - {name: ops, port: {{ .root.Values.ports.ops }}, targetPort: ops, protocol: TCP}
{{- end -}}

{{/* Where GPUs are scarce there is no room for one more; elsewhere nothing need ever be missing. */}}
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
