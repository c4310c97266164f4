{{/*
What Pod Security's "restricted" asks for. RDMA pins memory: that takes IPC_LOCK, which Kubernetes gives to root only,
so it is a profile of its own.
*/}}
{{- define "baton.podSecurity" -}}
{{- $root := and .v.rdma .v.rdma.enabled .v.rdma.runAsRoot -}}
{{- $user := int .root.Values.security.user -}}
runAsNonRoot: {{ not $root }}
runAsUser: {{ ternary 0 $user (not (not $root)) }}
runAsGroup: {{ $user }}
fsGroup: {{ $user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .v.rdma .v.rdma.enabled }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}
