{{/* The kinds of workers, as JSON: what Baton's own table says of each (files/worker_kinds.yaml), in its order. */}}
{{- define "baton.workerKinds" -}}
{{- .Files.Get "files/worker_kinds.yaml" | fromYamlArray | toJson -}}
{{- end -}}

{{/* The roles of workers, as JSON. With `engine`, only of those that run Baton's engine. Takes root. */}}
{{- define "baton.workerRoles" -}}
{{- $roles := list -}}
{{- range include "baton.workerKinds" .root | fromJsonArray -}}
{{- if or .runs_engine (not $.engine) -}}{{- $roles = append $roles .role -}}{{- end -}}
{{- end -}}
{{- $roles | toJson -}}
{{- end -}}

{{/*
The roles that pools of these roles lack to serve requests, as JSON: prefill if no worker computes prompts, decode if none writes
answers; but pools of workers that serve alone lack nothing. Takes root and roles.
*/}}
{{- define "baton.missingRoles" -}}
{{- $alone := false -}}
{{- $missing := list "prefill" "decode" -}}
{{- range include "baton.workerKinds" .root | fromJsonArray -}}
{{- if has .role $.roles -}}
{{- if and .computes_prompts .writes_answers -}}{{- $alone = true -}}
{{- else -}}{{- $missing = without $missing (ternary "prefill" "decode" .computes_prompts) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $alone (eq (len $missing) 2) -}}{{- $missing = list -}}{{- end -}}
{{- $missing | toJson -}}
{{- end -}}

{{/* All enabled pools, each with its own values merged over poolDefaults; as JSON. */}}
{{- define "baton.pools" -}}
{{- $pools := dict -}}
{{- range $key, $own := .Values.pools -}}
{{- $pool := include "baton.overlay" (list $.Values.poolDefaults ($own | default dict)) | fromJson -}}
{{- if $pool.enabled -}}
{{- $model := include "baton.namedModel" (dict "root" $ "name" $pool.modelName) | fromJson -}}
{{- $_ := set $pool "model" (include "baton.overlay" (list $model ($pool.model | default dict)) | fromJson) -}}
{{- /* A pool may have other weights, but routers know all pools of a model by one name. */ -}}
{{- $name := include "baton.modelName" $model -}}
{{- if ne (include "baton.modelName" $pool.model) $name -}}{{- $_ := set $pool.model "servedName" $name -}}{{- end -}}
{{- $_ := set $pool "replicasManagedBy" ($pool.replicasManagedBy | default $.Values.replicasManagedBy) -}}
{{- $_ := set $pools $key $pool -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* The values of a model in `models`, or of `model` if the name is empty; as JSON. Takes root and name. */}}
{{- define "baton.namedModel" -}}
{{- $model := .root.Values.model -}}
{{- if .name -}}
{{- $own := get .root.Values.models .name | default dict -}}
{{- $model = include "baton.overlay" (list $model $own) | fromJson -}}
{{- $_ := set $model "servedName" .name -}}
{{- end -}}
{{- $model | toJson -}}
{{- end -}}

{{/*
The models of all pools if at least one pool has a named one, as JSON: their values by name. `model` has its name in the API.
*/}}
{{- define "baton.servedModels" -}}
{{- $served := dict -}}
{{- $hasNamed := false -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $model := include "baton.namedModel" (dict "root" $ "name" $pool.modelName) | fromJson -}}
{{- with $pool.modelName -}}
{{- $_ := set $model "volume" (printf "model-%s" (sha256sum . | trunc 8)) -}}
{{- $_ := set $model "mount" (printf "/other-models/%s" .) -}}
{{- end -}}
{{- $_ := set $served (include "baton.modelName" $model) $model -}}
{{- $hasNamed = or $hasNamed (ne $pool.modelName "") -}}
{{- end -}}
{{- ternary $served dict $hasNamed | toJson -}}
{{- end -}}

{{/* A model's name in the API. Takes the model's values. */}}
{{- define "baton.modelName" -}}
{{- if .servedName -}}{{ .servedName }}
{{- else if eq .source "demo" -}}demo
{{- else if eq .source "hub" -}}{{ base .hub.id }}
{{- else -}}{{ base (list "models" (trimAll "/" .path) | compact | join "/") }}
{{- end -}}
{{- end -}}

{{/*
Where a model is in a pod. Takes the model's values, with the folder at which its volume is mounted as `mount`.
*/}}
{{- define "baton.modelPath" -}}
{{- if eq .source "hub" -}}{{ .hub.id }}@{{ .hub.revision }}
{{- else if eq .source "demo" -}}demo
{{- else -}}{{ list (.mount | default "/models") (trimAll "/" .path) | compact | join "/" }}
{{- end -}}
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
computing on the CPU, and a worker with a part of a node's cores must not start a thread for every core. With a vLLM server in the
pod, only its URL follows. As JSON.
*/}}
{{- define "baton.poolSettings" -}}
{{- if include "baton.hasVllmServer" . -}}
{{- include "baton.overlay" (list (dict "attach" (include "baton.attachedServer" .)) .v.settings) -}}
{{- else -}}
{{- $derived := dict "device" (include "baton.poolDevice" .) -}}
{{- $cores := dig "limits" "cpu" (dig "requests" "cpu" "" .v.resources) .v.resources -}}
{{- if $cores -}}
{{- $_ := set $derived "threads" (include "baton.cores" $cores | int) -}}
{{- end -}}
{{- range $name := keys .root.Values.settings -}}{{- $_ := unset $derived $name -}}{{- end -}}
{{- include "baton.overlay" (list $derived .v.settings) -}}
{{- end -}}
{{- end -}}

{{/* off, dry_run or on. YAML reads on and off as true and false. */}}
{{- define "baton.autoscaleMode" -}}
{{- $mode := .Values.conductor.autoscale.mode -}}
{{- if kindIs "bool" $mode -}}{{ ternary "on" "off" $mode }}{{- else -}}{{ $mode }}{{- end -}}
{{- end -}}
