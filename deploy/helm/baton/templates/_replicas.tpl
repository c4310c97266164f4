{{/*
Who owns the number of replicas of the router and of each pool (replicasManagedBy):

- `external`: whoever scales it. The manifests then contain no number, so neither an upgrade nor a rollback writes one.
  Kubernetes starts such a Deployment with one replica, and conductors set it once to the number in the values.
- `chart`: each upgrade writes the number in the values. An upgrade that would overwrite another owner's number is refused
  before anything changes.

Conductors and stores always belong to the chart.
*/}}

{{/* The number of replicas in the manifest, as text; empty if it belongs to somebody else. Takes v. */}}
{{- define "baton.replicas" -}}
{{- if eq .v.replicasManagedBy "chart" -}}{{ int .v.replicas }}{{- end -}}
{{- end -}}

{{/*
The router's values with its replicas and their owner filled in; as JSON. By default there are two routers, so that new requests are
accepted while a node is drained. But there is one if files and batches have a volume, which only one router can use.
*/}}
{{- define "baton.router" -}}
{{- $router := deepCopy .Values.router -}}
{{- if kindIs "invalid" $router.replicas -}}{{- $_ := set $router "replicas" (ternary 1 2 (ne $router.batches.claimName "")) -}}{{- end -}}
{{- set $router "replicasManagedBy" ($router.replicasManagedBy | default .Values.replicasManagedBy) | toJson -}}
{{- end -}}

{{/* The values of the router and of all pools by the names of their Deployments; as JSON. */}}
{{- define "baton.resizable" -}}
{{- $name := include "baton.fullname" . -}}
{{- $found := dict (printf "%s-router" $name) (set (include "baton.router" . | fromJson) "key" "router") -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $_ := set $found (printf "%s-%s" $name $key) (set $pool "key" (printf "pools.%s" $key)) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/*
Initial numbers of replicas that don't belong to the chart, by Deployment; as JSON. A Deployment whose number has
belonged to the chart until now loses it with this upgrade, so it then gets its current number again.
*/}}
{{- define "baton.initialReplicas" -}}
{{- $found := dict -}}
{{- range $name, $v := include "baton.resizable" . | fromJson -}}
{{- if eq $v.replicasManagedBy "external" -}}
{{- $live := lookup "apps/v1" "Deployment" $.Release.Namespace $name | default dict -}}
{{- $valuesApply := or (not $live) (eq (dig "metadata" "annotations" "baton.dev/replicas-managed-by" "chart" $live) "external") -}}
{{- $_ := set $found $name (ternary $v.replicas (dig "spec" "replicas" 1 $live) $valuesApply | int) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* Whether conductors set initial numbers of replicas: "true", or "". */}}
{{- define "baton.setsInitialReplicas" -}}
{{- if and .Values.rbac.create .Values.rbac.resize (not .Values.ray.enabled) -}}
{{- if include "baton.initialReplicas" . | fromJson -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The Lease by which conductors elect a leader. */}}
{{- define "baton.leaseName" -}}
{{ include "baton.fullname" . }}-leader
{{- end -}}

{{/* Replicas that belong to the chart, but were changed by somebody else. Server-side apply would refuse in the middle. */}}
{{- define "baton.replicaConflicts" -}}
{{- $name := include "baton.fullname" . -}}
{{- $owned := list
      (list "Deployment" (printf "%s-conductor" $name) "conductor" .Values.conductor.replicas "")
      (list "StatefulSet" (printf "%s-kvstore" $name) "kvstore" .Values.kvstore.replicas "") -}}
{{- range $deployment, $v := include "baton.resizable" . | fromJson -}}
{{- if eq $v.replicasManagedBy "chart" -}}
{{- $owned = append $owned (list "Deployment" $deployment $v.key $v.replicas (printf " or %s.replicasManagedBy=external" $v.key)) -}}
{{- end -}}
{{- end -}}
{{- range $owned -}}
{{- include "baton.replicaConflict" (dict "namespace" $.Release.Namespace "kind" (index . 0) "name" (index . 1) "key" (index . 2) "replicas" (index . 3) "or" (index . 4)) -}}
{{- end -}}
{{- end -}}

{{/* Replicas that leave the chart, when conductors may not restore them. */}}
{{- define "baton.replicaLosses" -}}
{{- if not (or .Values.ray.enabled (include "baton.setsInitialReplicas" .)) -}}
{{- range $name, $v := include "baton.resizable" . | fromJson -}}
{{- $live := lookup "apps/v1" "Deployment" $.Release.Namespace $name | default dict -}}
{{- $count := dig "spec" "replicas" 1 $live | int -}}
{{- $owner := dig "metadata" "annotations" "baton.dev/replicas-managed-by" "chart" $live -}}
{{- if and (eq $v.replicasManagedBy "external") $live (eq $owner "chart") (ne $count 1) }}
the Deployment {{ $name }} has {{ $count }} replicas, which would become one, since conductors may not resize it: set rbac.create=true and rbac.resize=true, or {{ $v.key }}.replicasManagedBy=chart
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A writer of the pod template is the release itself; an owner of the number alone is somebody else. */}}
{{- define "baton.replicaConflict" -}}
{{- $live := lookup "apps/v1" .kind .namespace .name | default dict -}}
{{- $now := dig "spec" "replicas" 1 $live | int -}}
{{- if and $live (ne $now (int .replicas)) -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- $fields := dig "fieldsV1" "f:spec" dict . -}}
{{- if and (hasKey $fields "f:replicas") (not (hasKey $fields "f:template")) }}
the {{ $.kind }} {{ $.name }} was scaled to {{ $now }} by {{ .manager }}, and this chart would set it to {{ $.replicas }}: to keep its size, set {{ $.key }}.replicas={{ $now }}{{ $.or }}; to change it, first run kubectl -n {{ $.namespace }} scale {{ lower $.kind }}/{{ $.name }} --replicas={{ $.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
