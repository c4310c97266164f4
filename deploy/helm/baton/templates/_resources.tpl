{{/* Checks of quantities and of the resources of all containers. */}}

{{/* The resources of all of this chart's containers, by their path in values.yaml; as JSON. */}}
{{- define "baton.allResources" -}}
{{- $found := dict "test.resources" .Values.test.resources -}}
{{- if .Values.ray.enabled -}}
{{- $_ := set $found "ray.head.resources" .Values.ray.head.resources -}}
{{- $_ := set $found "ray.head.supervisorResources" .Values.ray.head.supervisorResources -}}
{{- $_ := set $found "ray.workers.resources" .Values.ray.workers.resources -}}
{{- end -}}
{{- range $where, $v := omit (include "baton.workloads" . | fromJson) "ray" -}}
{{- $_ := set $found (printf "%s.resources" $where) $v.resources -}}
{{- if include "baton.hasVllmServer" (dict "v" $v) -}}{{- $_ := set $found (printf "%s.vllmServer.sidecar.resources" $where) $v.vllmServer.sidecar.resources -}}{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* Containers that users add to pods, by their path in values.yaml; as JSON. */}}
{{- define "baton.addedContainers" -}}
{{- $found := dict -}}
{{- range $where, $v := omit (include "baton.workloads" . | fromJson) "ray" -}}
{{- range $list := list "initContainers" "extraContainers" -}}
{{- range $index, $container := get $v $list | default list -}}
{{- $_ := set $found (printf "%s.%s[%d].resources" $where $list $index) ($container.resources | default dict) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* All quantities of the values except resources, by path; as JSON. */}}
{{- define "baton.sizes" -}}
{{- $sizes := dict "volumes.tmpSize" .Values.volumes.tmpSize "volumes.homeSize" .Values.volumes.homeSize -}}
{{- $_ := set $sizes "model.hub.cache.size" .Values.model.hub.cache.size -}}
{{- if .Values.redis.enabled -}}{{- $_ := set $sizes "redis.maxMemory" .Values.redis.maxMemory -}}{{- end -}}
{{- if .Values.kvstore.enabled -}}
{{- $_ := set $sizes "kvstore.memory" .Values.kvstore.memory -}}
{{- $_ := set $sizes "kvstore.disk.size" .Values.kvstore.disk.size -}}
{{- end -}}
{{- range $where, $v := include "baton.workloads" . | fromJson -}}
{{- if $v.sharedMemory -}}{{- $_ := set $sizes (printf "%s.sharedMemory" $where) $v.sharedMemory -}}{{- end -}}
{{- if include "baton.hasVllmServer" (dict "v" $v) -}}{{- $_ := set $sizes (printf "%s.vllmServer.tmpSize" $where) $v.vllmServer.tmpSize -}}{{- end -}}
{{- $size := dig "model" "hub" "cache" "size" "" $v -}}
{{- if and $size (ne (toString $size) (toString $.Values.model.hub.cache.size)) -}}
{{- $_ := set $sizes (printf "%s.model.hub.cache.size" $where) $size -}}
{{- end -}}
{{- end -}}
{{- $sizes | toJson -}}
{{- end -}}

{{- define "baton.quantityProblems" -}}
{{- range $path, $size := include "baton.sizes" . | fromJson -}}
{{- if not (include "baton.isQuantity" $size) }}
{{ $path }} is {{ toJson $size }}, which is not a quantity: write bytes like 512Mi or 2Gi
{{- end -}}
{{- end -}}
{{- range $path, $resources := include "baton.allResources" . | fromJson -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $name, $quantity := get $resources $kind | default dict -}}
{{- if not (include "baton.isQuantity" $quantity) }}
{{ $path }}.{{ $kind }}.{{ $name }} is {{ toJson $quantity }}, which is not a quantity: write {{ ternary "CPUs like 500m or 2" "bytes like 512Mi or 2Gi" (eq $name "cpu") }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $request := $resources.requests | default dict -}}
{{- $limit := get ($resources.limits | default dict) $name -}}
{{- if and (ne (toString $limit) "") (include "baton.isQuantity" $request) (include "baton.isQuantity" $limit) -}}
{{- if gt (include "baton.quantity" $request | float64) (include "baton.quantity" $limit | float64) }}
{{ $path }}.requests.{{ $name }} ({{ $request }}) is above {{ $path }}.limits.{{ $name }} ({{ $limit }}): raise the limit, or lower the request
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
