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

{{/*
Requests and limits that a ResourceQuota requires of every container, and that neither the values nor a LimitRange set:
Kubernetes would create none of these pods. Quotas that have scopes of their own may not apply, so they are not checked.
*/}}
{{- define "baton.quotaProblems" -}}
{{- if and .Values.checks.existing (include "baton.canLookUp" .) -}}
{{- $containers := merge (include "baton.allResources" . | fromJson) (include "baton.addedContainers" . | fromJson) -}}
{{- $namespace := .Release.Namespace -}}
{{- $set := include "baton.limitRangeDefaults" . | fromJson -}}
{{- range $quota := (lookup "v1" "ResourceQuota" $namespace "").items -}}
{{- if not (or $quota.spec.scopeSelector (without ($quota.spec.scopes | default list) "NotTerminating" "NotBestEffort")) -}}
{{- range $key := keys ($quota.spec.hard | default dict) | sortAlpha -}}
{{- $need := ternary (printf "requests.%s" $key) $key (has $key (list "cpu" "memory")) -}}
{{- if and (has $need (list "requests.cpu" "requests.memory" "limits.cpu" "limits.memory")) (not (hasKey $set $need)) -}}
{{- $kind := splitList "." $need | first -}}
{{- $name := splitList "." $need | last -}}
{{- $missing := list -}}
{{- range $path, $resources := $containers -}}
{{- $own := merge dict (get $resources $kind | default dict) (ternary ($resources.limits | default dict) dict (eq $kind "requests")) -}}
{{- if not (hasKey $own $name) -}}{{- $missing = append $missing (printf "%s.%s" $path $need) -}}{{- end -}}
{{- end -}}
{{- if $missing }}
the ResourceQuota {{ $quota.metadata.name }} in the namespace {{ $namespace }} refuses containers without {{ $need }}: set {{ join ", " $missing }} (or create a LimitRange with a default)
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The requests and limits (like "limits.cpu") that LimitRanges of the namespace set where a container has none; as JSON. */}}
{{- define "baton.limitRangeDefaults" -}}
{{- $set := dict -}}
{{- range (lookup "v1" "LimitRange" .Release.Namespace "").items -}}
{{- range (.spec.limits | default list) -}}
{{- if eq .type "Container" -}}
{{- range $name, $_ := .default | default dict -}}
{{- $_ := set $set (printf "limits.%s" $name) true -}}
{{- $_ := set $set (printf "requests.%s" $name) true -}}
{{- end -}}
{{- range $name, $_ := .defaultRequest | default dict -}}{{- $_ := set $set (printf "requests.%s" $name) true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $set | toJson -}}
{{- end -}}
