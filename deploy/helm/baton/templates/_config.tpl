{{/*
baton.yaml: what all programs share. Whatever is secret, or differs between pods, is in their environment, which wins.
*/}}
{{- define "baton.config" -}}
{{- $ports := .Values.ports -}}
{{- $own := dict
      "cluster" (include "baton.cluster" .)
      "grpc_host" .Values.listen
      "grpc_port" (int $ports.grpc)
      "line_port" (int $ports.line)
      "ops_host" .Values.listen
      "ops_port" (int $ports.ops)
      "endpoint_grace_seconds" (int .Values.endpointGraceSeconds)
      "log_level" .Values.logs.level
      "log_format" .Values.logs.format -}}
{{- if .Values.tls.rpc.enabled -}}
{{- $_ := set $own "rpc_tls_certificate" "/etc/baton-rpc-tls/tls.crt" -}}
{{- $_ := set $own "rpc_tls_key" "/etc/baton-rpc-tls/tls.key" -}}
{{- $_ := set $own "rpc_tls_ca" "/etc/baton-rpc-tls/ca.crt" -}}
{{- end -}}
{{- if .Values.traces.endpoint -}}
{{- $_ := set $own "trace_endpoint" .Values.traces.endpoint -}}
{{- $_ := set $own "trace_sample" .Values.traces.sample -}}
{{- end -}}
{{- toYaml (merge $own (deepCopy .Values.settings)) -}}
{{- end -}}
