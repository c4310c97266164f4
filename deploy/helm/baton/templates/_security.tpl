{{/*
What Pod Security's "restricted" asks for. RDMA pins memory: that takes IPC_LOCK, which Kubernetes gives to root only,
so it is a profile of its own. Without a user the platform picks one, as OpenShift does.
*/}}
{{- define "baton.podSecurity" -}}
{{- $root := and .v.rdma .v.rdma.enabled .v.rdma.runAsRoot -}}
{{- $user := .root.Values.security.user -}}
runAsNonRoot: {{ not $root }}
{{- if $root }}
runAsUser: 0
{{- else if $user }}
runAsUser: {{ $user }}
{{- end }}
{{- with $user }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
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
