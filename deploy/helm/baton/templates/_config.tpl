{{/*
baton.yaml has the settings that all pods share. Settings that differ between pods are environment variables, and secrets are
files (_secrets.tpl); both take precedence.
*/}}
{{- define "baton.config" -}}
{{- $own := dict
      "cluster" (include "baton.cluster" .)
      "log_level" .Values.logs.level
      "log_format" .Values.logs.format
      "endpoint_grace_seconds" (int .Values.endpointGraceSeconds) -}}
{{- if not .Values.ray.enabled -}}
{{- $own = merge $own (include "baton.portSettings" . | fromJson) -}}
{{- end -}}
{{- if include "baton.setsInitialReplicas" . -}}
{{- $_ := set $own "kubernetes_initial_replicas" (include "baton.initialReplicas" . | fromJson) -}}
{{- end -}}
{{- if .Values.tls.rpc.enabled -}}
{{- $_ := set $own "rpc_tls_certificate" "/etc/baton-rpc-tls/tls.crt" -}}
{{- $_ := set $own "rpc_tls_key" "/etc/baton-rpc-tls/tls.key" -}}
{{- $_ := set $own "rpc_tls_ca" "/etc/baton-rpc-tls/ca.crt" -}}
{{- end -}}
{{- with .Values.nixl.interfaces -}}
{{- $_ := set $own "nixl_interfaces" (join "," .) -}}
{{- $_ := set $own "nixl_private_network" $.Values.nixl.privateNetwork -}}
{{- end -}}
{{- if .Values.traces.endpoint -}}
{{- $_ := set $own "trace_endpoint" .Values.traces.endpoint -}}
{{- $_ := set $own "trace_sample" .Values.traces.sample -}}
{{- end -}}
{{- $given := deepCopy .Values.settings -}}
{{- range $name, $value := dict "redis_wait_seconds" 60 "worker_wait_seconds" 10 -}}{{/* pods start in any order */}}
{{- if not (hasKey $given $name) -}}{{- $_ := set $given $name $value -}}{{- end -}}
{{- end -}}
{{- toYaml (merge $own $given) -}}
{{- end -}}

{{/*
Those settings of baton.yaml whose change restarts this role's pods, as JSON: the ones that the role's program reads, except
live ones (it follows their changes while it runs) and those that the pods' own variables override. Takes the context of a pod.
*/}}
{{- define "baton.restartingConfig" -}}
{{- $reader := ternary "worker" .role (has .role (include "baton.workerRoles" . | fromJsonArray)) -}}
{{- $table := .root.Files.Get "files/settings.yaml" | fromYaml -}}
{{- $own := .settings | default dict -}}
{{- $restarting := dict -}}
{{- range $name, $value := include "baton.config" .root | fromYaml -}}
{{- $scope := get $table $name -}}
{{- if and (has $reader $scope.readers) (not (has $reader $scope.live)) (not (hasKey $own $name)) -}}
{{- $_ := set $restarting $name $value -}}
{{- end -}}
{{- end -}}
{{- $restarting | toJson -}}
{{- end -}}

{{/* A second network for pods that transfer KV. A pod's own annotations take precedence. Takes root, role and v. */}}
{{- define "baton.fabricAnnotation" -}}
{{- $key := "k8s.v1.cni.cncf.io/networks" -}}
{{- if and .root.Values.nixl.networks (not (hasKey (.v.podAnnotations | default dict) $key)) (has .role (concat (include "baton.workerRoles" (dict "root" .root "engine" true) | fromJsonArray) (list "kvstore" "ray-worker"))) -}}
{{ $key }}: {{ .root.Values.nixl.networks | quote }}
{{- end -}}
{{- end -}}

{{/* The listening addresses, which are the same in every pod; as JSON. */}}
{{- define "baton.portSettings" -}}
{{- dict
      "grpc_host" .Values.listen
      "grpc_port" (int .Values.ports.grpc)
      "framed_port" (int .Values.ports.framed)
      "ops_host" .Values.listen
      "ops_port" (int .Values.ports.ops) | toJson -}}
{{- end -}}
