{{/*
The security context that Pod Security's "restricted" requires. RDMA pins memory, which requires IPC_LOCK, which Kubernetes
gives to root only, so RDMA has its own profile. If no user is set, the platform chooses one, as OpenShift does.
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
