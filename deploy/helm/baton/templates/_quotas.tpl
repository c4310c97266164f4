{{/*
Checks against the ResourceQuotas of the namespace. Quotas that have scopes of their own may not apply to this chart's pods, so
they are not checked.
*/}}

{{/* The quotas that apply, by name, each with hard and used; as JSON. */}}
{{- define "baton.quotas" -}}
{{- $found := dict -}}
{{- range (lookup "v1" "ResourceQuota" .Release.Namespace "").items -}}
{{- if not (or .spec.scopeSelector (without (.spec.scopes | default list) "NotTerminating" "NotBestEffort")) -}}
{{- $_ := set $found .metadata.name (dict "hard" (.spec.hard | default dict) "used" (dig "used" dict (.status | default dict))) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/*
Requests and limits that a quota requires of every container, and that neither the values nor a LimitRange set: Kubernetes
would create none of these pods. And sums that the whole release exceeds.
*/}}
{{- define "baton.quotaProblems" -}}
{{- if and .Values.checks.existing (include "baton.canLookUp" .) -}}
{{- $containers := merge (include "baton.allResources" . | fromJson) (include "baton.addedContainers" . | fromJson) -}}
{{- $namespace := .Release.Namespace -}}
{{- $set := include "baton.limitRangeDefaults" . | fromJson -}}
{{- range $quotaName, $quota := include "baton.quotas" . | fromJson -}}
{{- range $key := keys $quota.hard | sortAlpha -}}
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
the ResourceQuota {{ $quotaName }} in the namespace {{ $namespace }} refuses containers without {{ $need }}: set {{ join ", " $missing }} (or create a LimitRange with a default)
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "baton.quotaSumProblems" . -}}
{{- end -}}
{{- end -}}

{{/*
What the pods of the whole release request, by key of a quota; as JSON. Init containers are left out, because their resources
count only beyond those of the other containers, and so is what a LimitRange sets.
*/}}
{{- define "baton.totals" -}}
{{- $totals := dict "pods" 0.0 -}}
{{- range $where, $v := include "baton.workloads" . | fromJson -}}
{{- $replicas := float64 (ternary 1 $v.replicas (eq $where "redis")) -}}
{{- $_ := set $totals "pods" (addf $totals.pods $replicas) -}}
{{- $main := include "baton.resources" (dict "v" $v) | fromYaml -}}
{{- $containers := list $main -}}
{{- range $v.extraContainers | default list -}}{{- $containers = append $containers (.resources | default dict) -}}{{- end -}}
{{- if include "baton.hasVllmServer" (dict "v" $v) -}}{{- $containers = append $containers $v.vllmServer.sidecar.resources -}}{{- end -}}
{{- range $resources := $containers -}}
{{- $limits := $resources.limits | default dict -}}
{{- range $kind, $amounts := dict "limits" $limits "requests" (merge (deepCopy ($resources.requests | default dict)) $limits) -}}
{{- range $name, $amount := $amounts -}}
{{- $key := printf "%s.%s" $kind $name -}}
{{- $amount = mulf $replicas (include "baton.quantity" $amount | float64) -}}
{{- $_ := set $totals $key (addf (get $totals $key | default 0.0) $amount) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $totals | toJson -}}
{{- end -}}

{{/*
Sums for which a quota leaves less than the whole release requests. Only before the first installation: later on, the release's
own pods are in the sums, and others may have scaled its pools.
*/}}
{{- define "baton.quotaSumProblems" -}}
{{- if and .Release.IsInstall (not .Values.ray.enabled) -}}
{{- $totals := include "baton.totals" . | fromJson -}}
{{- range $name, $quota := include "baton.quotas" . | fromJson -}}
{{- range $key, $hard := $quota.hard -}}
{{- $total := get $totals (ternary (printf "requests.%s" $key) $key (has $key (list "cpu" "memory" "ephemeral-storage"))) | default 0.0 -}}
{{- $left := subf (include "baton.quantity" $hard | float64) (include "baton.quantity" (get $quota.used $key | default 0) | float64) -}}
{{- if gt $total (addf $left 0.0001) }}
the ResourceQuota {{ $name }} in the namespace {{ $.Release.Namespace }} leaves {{ include "baton.amount" (list $key $left) }} of {{ $key }} ({{ $hard }} less what is used), and the release with all its replicas needs {{ include "baton.amount" (list $key $total) }}: lower replicas or resources, or have the quota raised
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An amount in the unit of a quota's key. Takes the key and the number. */}}
{{- define "baton.amount" -}}
{{- if or (contains "memory" (index . 0)) (contains "storage" (index . 0)) -}}
{{- printf "%.0fMi" (divf (index . 1) 1048576.0) -}}
{{- else -}}
{{- round (index . 1) 3 -}}
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
