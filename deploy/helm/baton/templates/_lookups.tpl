{{/*
Checks that look up objects of the cluster. A lookup that the installer may not make fails the whole installation, so every
object looked up by default is in the release's namespace, and of a kind that the ClusterRole "admin" may read.
*/}}

{{/*
Whether lookups find anything: "true", or "" without access to a cluster. Every namespace has the ConfigMap
kube-root-ca.crt.
*/}}
{{- define "baton.canLookUp" -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" -}}true{{- end -}}
{{- end -}}

{{/* RuntimeClasses and PriorityClasses that don't exist: Kubernetes would create none of their pods. */}}
{{- define "baton.classProblems" -}}
{{- if and .Values.checks.clusterScoped (include "baton.canLookUp" .) -}}
{{- range $where, $v := include "baton.workloads" . | fromJson -}}
{{- if and $v.runtimeClassName (not (lookup "node.k8s.io/v1" "RuntimeClass" "" $v.runtimeClassName)) }}
{{ $where }}.runtimeClassName: there is no RuntimeClass {{ $v.runtimeClassName }}; leave the value empty for the default runtime
{{- end -}}
{{- if and $v.priorityClassName (not (lookup "scheduling.k8s.io/v1" "PriorityClass" "" $v.priorityClassName)) }}
{{ $where }}.priorityClassName: there is no PriorityClass {{ $v.priorityClassName }}; leave the value empty for the default priority
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The values of everything that runs in pods, by their path in values.yaml; as JSON. */}}
{{- define "baton.workloads" -}}
{{- $workloads := dict -}}
{{- if .Values.ray.enabled -}}
{{- $_ := set $workloads "ray" .Values.ray -}}
{{- else -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $_ := set $workloads (printf "pools.%s" $key) $pool -}}
{{- end -}}
{{- $_ := set $workloads "router" (include "baton.router" . | fromJson) -}}
{{- $_ := set $workloads "conductor" .Values.conductor -}}
{{- if .Values.kvstore.enabled -}}{{- $_ := set $workloads "kvstore" .Values.kvstore -}}{{- end -}}
{{- end -}}
{{- if .Values.redis.enabled -}}{{- $_ := set $workloads "redis" .Values.redis -}}{{- end -}}
{{- $workloads | toJson -}}
{{- end -}}

{{/* The claims that pods mount, by the paths of their names in values.yaml; as JSON. */}}
{{- define "baton.claims" -}}
{{- $claims := dict "router.batches.claimName" .Values.router.batches.claimName -}}
{{- $models := dict "model" .Values.model -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}{{- $_ := set $models (printf "pools.%s.model" $key) $pool.model -}}{{- end -}}
{{- range $where, $model := $models -}}
{{- $own := dict "pvc" (list "pvc.claimName" $model.pvc.claimName) "hub" (list "hub.cache.claimName" $model.hub.cache.claimName) -}}
{{- with get $own $model.source -}}
{{- if or (eq $where "model") (not (has (last .) (values $claims))) -}}
{{- $_ := set $claims (printf "%s.%s" $where (first .)) (last .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $claims | toJson -}}
{{- end -}}

{{- define "baton.claimProblems" -}}
{{- if and .Values.checks.existing (include "baton.canLookUp" .) -}}
{{- range $path, $claim := include "baton.claims" . | fromJson -}}
{{- if and $claim (not (lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $claim)) }}
{{ $path }}: there is no PersistentVolumeClaim {{ $claim }} in the namespace {{ $.Release.Namespace }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Changes of the store's volumes, which Kubernetes refuses for an existing StatefulSet. The message has the commands that make
the change: pods keep running without their StatefulSet, and the upgrade creates it again.
*/}}
{{- define "baton.diskProblems" -}}
{{- $store := .Values.kvstore -}}
{{- $namespace := .Release.Namespace -}}
{{- $name := printf "%s-kvstore" (include "baton.fullname" .) -}}
{{- if and .Values.checks.existing $store.enabled (not .Values.ray.enabled) (include "baton.canLookUp" .) -}}
{{- with lookup "apps/v1" "StatefulSet" $namespace $name -}}
{{- $orphan := printf "kubectl -n %s delete statefulset %s --cascade=orphan" $namespace $name -}}
{{- $claims := list -}}
{{- range $index := until (int .spec.replicas) -}}{{- $claims = append $claims (printf "disk-%s-%d" $name $index) -}}{{- end -}}
{{- $live := dict -}}
{{- range .spec.volumeClaimTemplates | default list -}}
{{- if eq .metadata.name "disk" -}}{{- $live = .spec -}}{{- end -}}
{{- end -}}
{{- if ne (empty $live) (not $store.disk.enabled) }}
kvstore.disk.enabled is {{ $store.disk.enabled }}, and the StatefulSet {{ $name }} is {{ ternary "without" "with" (empty $live) }} volumes, which an upgrade can't change: run `{{ $orphan }}`, then upgrade again
{{- else if $live -}}
{{- $size := dig "resources" "requests" "storage" "0" $live -}}
{{- $now := include "baton.quantity" $size | float64 -}}
{{- $wanted := include "baton.quantity" $store.disk.size | float64 -}}
{{- if gt $wanted $now }}
kvstore.disk.size is {{ $store.disk.size }}, and the volumes of the StatefulSet {{ $name }} have {{ $size }}, which an upgrade can't change: run `{{ $orphan }}` and `for claim in {{ join " " $claims }}; do kubectl -n {{ $namespace }} patch pvc $claim -p '{"spec":{"resources":{"requests":{"storage":"{{ $store.disk.size }}"}}}}'; done` (the StorageClass must allow expansion), then upgrade again
{{- else if lt $wanted $now }}
kvstore.disk.size is {{ $store.disk.size }}, and the volumes of the StatefulSet {{ $name }} have {{ $size }}; volumes can't shrink: keep the size, or lose what is stored with `kubectl -n {{ $namespace }} delete statefulset {{ $name }}` and `kubectl -n {{ $namespace }} delete pvc {{ join " " $claims }}`, then upgrade again
{{- end -}}
{{- $class := dig "storageClassName" "" $live -}}
{{- if ne (toString $store.disk.storageClassName) $class }}
kvstore.disk.storageClassName is {{ toJson $store.disk.storageClassName }}, and the volumes of the StatefulSet {{ $name }} have {{ toJson $class }}, which can't be changed: keep the class, or lose what is stored with `kubectl -n {{ $namespace }} delete statefulset {{ $name }}` and `kubectl -n {{ $namespace }} delete pvc {{ join " " $claims }}`, then upgrade again
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Another release in this namespace that has the same cluster name: their members would register with each other. */}}
{{- define "baton.clusterProblems" -}}
{{- if and .Values.checks.existing (include "baton.canLookUp" .) -}}
{{- $cluster := include "baton.cluster" . -}}
{{- range (lookup "v1" "ConfigMap" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- if and (eq (get $labels "baton.dev/cluster") $cluster) (ne $release $.Release.Name) (hasSuffix "-config" .metadata.name) }}
cluster: the release {{ $release }} in the namespace {{ $.Release.Namespace }} has the cluster name {{ $cluster }} already: set cluster to another name
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
