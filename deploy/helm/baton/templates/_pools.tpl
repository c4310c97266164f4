{{/* All enabled pools, each with its own values merged over poolDefaults; as JSON. */}}
{{- define "baton.pools" -}}
{{- $pools := dict -}}
{{- range $key, $own := .Values.pools -}}
{{- $pool := include "baton.overlay" (list $.Values.poolDefaults ($own | default dict)) | fromJson -}}
{{- if $pool.enabled -}}
{{- $_ := set $pool "model" (include "baton.overlay" (list $.Values.model ($pool.model | default dict)) | fromJson) -}}
{{- $_ := set $pool "replicasManagedBy" ($pool.replicasManagedBy | default $.Values.replicasManagedBy) -}}
{{- $_ := set $pools $key $pool -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/*
Merges one map over another, recursively; as JSON. Unlike with mergeOverwrite, false, 0 and "" override the values of
the map below.
*/}}
{{- define "baton.overlay" -}}
{{- $below := index . 0 -}}
{{- $above := index . 1 -}}
{{- $both := dict -}}
{{- range $key, $value := $below -}}{{- $_ := set $both $key $value -}}{{- end -}}
{{- range $key, $value := $above -}}
{{- $under := get $below $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $under) -}}
{{- $_ := set $both $key (include "baton.overlay" (list $under $value) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $both $key $value -}}
{{- end -}}
{{- end -}}
{{- $both | toJson -}}
{{- end -}}

{{/*
Settings of a pool: its own, and those that follow from its resources. A worker whose GPU is missing must fail instead of
computing on the CPU, and a worker with a part of a node's cores must not start a thread for every core. As JSON.
*/}}
{{- define "baton.poolSettings" -}}
{{- $derived := dict "device" (include "baton.poolDevice" .) -}}
{{- $cores := dig "limits" "cpu" (dig "requests" "cpu" "" .v.resources) .v.resources -}}
{{- if $cores -}}
{{- $_ := set $derived "threads" (include "baton.cores" $cores | int) -}}
{{- end -}}
{{- range $name := keys .root.Values.settings -}}{{- $_ := unset $derived $name -}}{{- end -}}
{{- include "baton.overlay" (list $derived .v.settings) -}}
{{- end -}}

{{/* off, dry_run or on. YAML reads on and off as true and false. */}}
{{- define "baton.autoscaleMode" -}}
{{- $mode := .Values.conductor.autoscale.mode -}}
{{- if kindIs "bool" $mode -}}{{ ternary "on" "off" $mode }}{{- else -}}{{ $mode }}{{- end -}}
{{- end -}}
