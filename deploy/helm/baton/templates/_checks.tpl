{{/*
Reports all problems of the values that values.schema.json can't detect at once, each with the value to set. Every
template named …Problems writes one line per problem.
*/}}
{{- define "baton.checks" -}}
{{- $problems := list -}}
{{- range list "baton.poolProblems" "baton.vllmServerProblems" "baton.ownerProblems" "baton.replicaConflicts" "baton.replicaLosses" "baton.quantityProblems" "baton.memoryProblems" "baton.redisProblems"
      "baton.authProblems" "baton.networkProblems" "baton.fabricProblems" "baton.accountProblems" "baton.missingProblems"
      "baton.claimProblems" "baton.diskProblems" "baton.clusterProblems" "baton.classProblems"
      "baton.quotaProblems" "baton.crdProblems" "baton.commonProblems" -}}
{{- $problems = append $problems (include . $) -}}
{{- end -}}
{{- include "baton.failWith" (join "\n" $problems) -}}
{{- end -}}

{{/* Fails if there are problems: one per line, among empty lines. */}}
{{- define "baton.failWith" -}}
{{- $problems := list -}}
{{- range splitList "\n" . -}}
{{- with trim . -}}{{- $problems = append $problems . -}}{{- end -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values can't work:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "baton.poolProblems" -}}
{{- $roles := list -}}
{{- $known := include "baton.workerRoles" (dict "root" .) | fromJsonArray -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- if not (has $pool.role $known) }}
pools.{{ $key }} has no role: set pools.{{ $key }}.role to {{ join ", " (initial $known) }} or {{ last $known }}
{{- end -}}
{{- if has $key (list "router" "router-ops" "conductor" "kvstore" "redis" "ray" "config" "secrets" "tenants" "test") }}
pools.{{ $key }}: {{ $key }} is the name of something else of this chart; give the pool another one
{{- end -}}
{{- $roles = append $roles $pool.role -}}
{{- if and (gt (int $pool.gpu.count) 0) (eq $pool.image "cpu") }}
pools.{{ $key }} asks for {{ $pool.gpu.count }} GPUs with an image that can't use them: set pools.{{ $key }}.image to cuda or auto
{{- end -}}
{{- $device := toString (get (merge (deepCopy $pool.settings) (deepCopy $.Values.settings)) "device" | default "") -}}
{{- if and (gt (int $pool.gpu.count) 0) (eq $device "cpu") }}
pools.{{ $key }} asks for {{ $pool.gpu.count }} GPUs, and its settings.device is cpu: leave that out, or set pools.{{ $key }}.gpu.count=0
{{- end -}}
{{- end -}}
{{- range include "baton.missingRoles" (dict "root" . "roles" $roles) | fromJsonArray }}
no pool has the role {{ . }}: set pools.{{ . }}.enabled=true and pools.{{ . }}.role={{ . }}
{{- end -}}
{{- $problems := include "baton.poolModelProblems" . -}}
{{- $problems -}}
{{- if not (trim $problems) -}}{{- include "baton.modelPoolProblems" . -}}{{- end -}}
{{- end -}}

{{/* Pools whose model is unknown, or has no weights. */}}
{{- define "baton.poolModelProblems" -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- if and $pool.modelName (not (hasKey $.Values.models $pool.modelName)) }}
pools.{{ $key }}.modelName is {{ $pool.modelName }}: set models.{{ $pool.modelName }} to that model's values
{{- else -}}
{{- $or := ternary (printf "models.%s" $pool.modelName) "model" (ne $pool.modelName "") -}}
{{- include "baton.modelProblems" (dict "model" $pool.model "where" (printf "pools.%s.model" $key) "or" $or) -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.ray.enabled (include "baton.servedModels" . | fromJson)) -}}
{{- include "baton.modelProblems" (dict "model" .Values.model "where" "the router's model" "or" "model") -}}
{{- end -}}
{{- end -}}

{{/* Models, of several, that lack a pool. */}}
{{- define "baton.modelPoolProblems" -}}
{{- $served := include "baton.servedModels" . | fromJson -}}
{{- if and $served .Values.ray.enabled }}
pools have a modelName, which ray.enabled does not support: leave it out, and set model
{{- end -}}
{{- range $name := keys $served | sortAlpha -}}
{{- $roles := list -}}
{{- range $key, $pool := include "baton.pools" $ | fromJson -}}
{{- if eq (include "baton.modelName" $pool.model) $name -}}{{- $roles = append $roles $pool.role -}}{{- end -}}
{{- end -}}
{{- range include "baton.missingRoles" (dict "root" $ "roles" $roles) | fromJsonArray }}
the model {{ $name }} has no {{ . }} pool: add one, with the same modelName
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A model source that lacks a required value. */}}
{{- define "baton.modelProblems" -}}
{{- $model := .model -}}
{{- $needs := dict "hub" (list "hub" "id") "pvc" (list "pvc" "claimName") "image" (list "image" "reference") "hostPath" (list "hostPath" "path") -}}
{{- with get $needs $model.source -}}
{{- if not (get (get $model (first .)) (last .)) }}
{{ $.where }} has no model: its source is {{ $model.source }}, so set {{ $.or }}.{{ join "." . }}
{{- else if and (eq $model.source "hub") (not $model.hub.revision) }}
{{ $.where }} has no fixed revision: pods that start after a push to {{ $model.hub.id }} would serve other weights, so set {{ $.or }}.hub.revision to a commit
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Replicas must have exactly one owner. */}}
{{- define "baton.ownerProblems" -}}
{{- $on := eq (include "baton.autoscaleMode" .) "on" -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $owners := list -}}
{{- if and $on (eq $key (include "baton.autoscaledPool" (dict "root" $ "role" $pool.role))) -}}{{- $owners = append $owners "conductor.autoscale.mode=on" -}}{{- end -}}
{{- if $pool.hpa.enabled -}}{{- $owners = append $owners (printf "pools.%s.hpa.enabled" $key) -}}{{- end -}}
{{- if $pool.keda.enabled -}}{{- $owners = append $owners (printf "pools.%s.keda.enabled" $key) -}}{{- end -}}
{{- if gt (len $owners) 1 }}
the replicas of pools.{{ $key }} have two owners: {{ join " and " $owners }}; keep one
{{- else if and $owners (ne $pool.replicasManagedBy "external") }}
the replicas of pools.{{ $key }} have two owners: {{ first $owners }} and this chart, which writes them at every upgrade; set replicasManagedBy=external
{{- end -}}
{{- if and $owners $.Values.ray.enabled }}
{{ first $owners }}: with ray.enabled there are no Deployments to resize
{{- end -}}
{{- include "baton.boundProblems" (dict "hpa" $pool.hpa "where" (printf "pools.%s.hpa" $key)) -}}
{{- include "baton.boundProblems" (dict "hpa" $pool.keda "where" (printf "pools.%s.keda" $key)) -}}
{{- if and $pool.keda.enabled (not $pool.keda.triggers) }}
pools.{{ $key }}.keda has no triggers: it would do nothing; set pools.{{ $key }}.keda.triggers
{{- end -}}
{{- end -}}
{{- include "baton.autoscaleProblems" . -}}
{{- if and .Values.router.hpa.enabled (eq (include "baton.router" . | fromJson).replicasManagedBy "chart") }}
the replicas of the router have two owners: router.hpa.enabled and this chart; set router.replicasManagedBy=external
{{- end -}}
{{- include "baton.boundProblems" (dict "hpa" .Values.router.hpa "where" "router.hpa") -}}
{{- end -}}

{{- define "baton.autoscaleProblems" -}}
{{- $mode := include "baton.autoscaleMode" . -}}
{{- if and (ne $mode "off") (gt (len (include "baton.servedModels" . | fromJson)) 1) }}
conductor.autoscale.mode is {{ $mode }}, which several models do not support: set it to off, and use hpa or keda of the pools
{{- end -}}
{{- $autoscale := .Values.conductor.autoscale -}}
{{- $roles := list -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}{{- $roles = append $roles $pool.role -}}{{- end -}}
{{- if and (ne $mode "off") $roles (not (or (has "prefill" $roles) (has "decode" $roles))) }}
conductor.autoscale.mode is {{ $mode }}, and there are only {{ join " and " (uniq $roles) }} pools, which conductors don't resize: set it to off
{{- else -}}
{{- range list "prefill" "decode" -}}
{{- $bounds := get $autoscale . -}}
{{- if and (ne $mode "off") (not (include "baton.autoscaledPool" (dict "root" $ "role" .))) }}
{{- if $bounds.pool }}
conductor.autoscale.{{ . }}.pool: there is no pool {{ $bounds.pool }} with the role {{ . }}
{{- else }}
several pools have the role {{ . }}: set conductor.autoscale.{{ . }}.pool to the one that is to be resized
{{- end -}}
{{- end -}}
{{- if gt (int $bounds.min) (int $bounds.max) }}
conductor.autoscale.{{ . }}.min ({{ $bounds.min }}) is above its max ({{ $bounds.max }})
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (add (int $autoscale.prefill.min) (int $autoscale.decode.min)) (int $autoscale.maxWorkers) }}
conductor.autoscale.maxWorkers ({{ $autoscale.maxWorkers }}) is less than the least of both pools together
{{- end -}}
{{- if and (eq $mode "on") .Values.rbac.create (not .Values.rbac.resize) }}
conductor.autoscale.mode is on, and conductors may not resize pools: set rbac.resize=true
{{- end -}}
{{- end -}}

{{- define "baton.boundProblems" -}}
{{- if and .hpa.enabled (gt (int .hpa.minReplicas) (int .hpa.maxReplicas)) }}
{{ .where }}.minReplicas ({{ .hpa.minReplicas }}) is above maxReplicas ({{ .hpa.maxReplicas }})
{{- end -}}
{{- end -}}

{{/* Volumes in memory count against the memory limit. */}}
{{- define "baton.memoryProblems" -}}
{{- if .Values.ray.enabled -}}
{{- include "baton.sharedProblems" (dict "shared" .Values.ray.sharedMemory "resources" .Values.ray.head.resources "where" "ray" "limit" "ray.head.resources.limits.memory") -}}
{{- include "baton.sharedProblems" (dict "shared" .Values.ray.sharedMemory "resources" .Values.ray.workers.resources "where" "ray" "limit" "ray.workers.resources.limits.memory") -}}
{{- else -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $where := printf "pools.%s" $key -}}
{{- include "baton.sharedProblems" (dict "shared" $pool.sharedMemory "resources" $pool.resources "where" $where "limit" (printf "%s.resources.limits.memory" $where)) -}}
{{- end -}}
{{- $store := .Values.kvstore -}}
{{- $limit := dig "limits" "memory" "" $store.resources -}}
{{- if and $store.enabled (include "baton.isQuantity" $limit) (include "baton.isQuantity" $store.memory) -}}
{{- $needed := add (int64 (include "baton.bytes" $store.memory)) (int64 (include "baton.bytes" ($store.sharedMemory | default "0"))) 268435456 -}}
{{- if gt $needed (int64 (include "baton.bytes" $limit)) }}
kvstore.resources.limits.memory ({{ $limit }}) must hold kvstore.memory ({{ $store.memory }}), kvstore.sharedMemory ({{ $store.sharedMemory }}) and 256Mi for the program
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.sharedProblems" -}}
{{- $limit := dig "limits" "memory" "" .resources -}}
{{- if and (include "baton.isQuantity" .shared) (include "baton.isQuantity" $limit) -}}
{{- if ge (int64 (include "baton.bytes" .shared)) (int64 (include "baton.bytes" $limit)) }}
{{ .where }}.sharedMemory ({{ .shared }}) counts against {{ .limit }} ({{ $limit }}), which must be larger
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.redisProblems" -}}
{{- $redis := .Values.redis -}}
{{- $external := or $redis.external.url $redis.external.existingSecret -}}
{{- if and $redis.enabled $external }}
there are two Redises: set redis.enabled=false, or empty redis.external
{{- else if and (not $redis.enabled) (not $external) }}
there is no Redis: set redis.external.existingSecret to a Secret with its URL, or redis.enabled=true
{{- end -}}
{{- if and $redis.external.url $redis.external.existingSecret }}
redis.external.url and redis.external.existingSecret are both set: keep one
{{- end -}}
{{- if or (regexMatch "^[a-z+]+://[^/]*:[^/]*@" $redis.external.url) (regexMatch "[?&](sentinel_)?password=" $redis.external.url) }}
redis.external.url holds a password, which everybody could read: put the URL into a Secret, and name it in redis.external.existingSecret
{{- end -}}
{{- if and $external (not .Values.cluster) }}
with an external Redis, set cluster: two clusters of one name there would be mixed
{{- end -}}
{{- end -}}

{{- define "baton.authProblems" -}}
{{- $auth := .Values.auth -}}
{{- $keyed := include "baton.hasTenants" . -}}
{{- if and $auth.tenants $auth.existingSecret }}
auth.tenants and auth.existingSecret are both set: keep one
{{- end -}}
{{- if and (not $keyed) (not $auth.allowOpen) }}
nobody may come in: set auth.tenants or auth.existingSecret (or auth.allowOpen=true, for everybody who reaches the router)
{{- end -}}
{{- $router := .Values.router -}}
{{- $outside := or $router.ingress.enabled $router.httpRoute.enabled (ne $router.service.type "ClusterIP") -}}
{{- if and $outside (not $keyed) (not $auth.allowOpenToTheWorld) }}
the router would be open to everybody outside the cluster: set auth.tenants or auth.existingSecret (or auth.allowOpenToTheWorld=true)
{{- end -}}
{{- end -}}

{{- define "baton.networkProblems" -}}
{{- $seen := dict -}}
{{- range $name, $port := .Values.ports -}}
{{- $number := int $port | toString -}}
{{- if hasKey $seen $number }}
ports.{{ $name }} and ports.{{ get $seen $number }} are both {{ $number }}: programs listen on all of them
{{- end -}}
{{- $_ := set $seen $number $name -}}
{{- end -}}
{{- if and .Values.tls.router.enabled (not .Values.tls.router.existingSecret) (not .Values.tls.router.certManager.issuerRef) }}
tls.router has no certificate: set tls.router.existingSecret, or tls.router.certManager.issuerRef
{{- end -}}
{{- if and .Values.router.ingress.enabled (not .Values.router.ingress.hosts) }}
router.ingress has no hosts: set router.ingress.hosts
{{- end -}}
{{- if and .Values.router.httpRoute.enabled (not .Values.router.httpRoute.parentRefs) }}
router.httpRoute belongs to no gateway: set router.httpRoute.parentRefs
{{- end -}}
{{- if and .Values.router.batches.claimName (or (gt (int (include "baton.router" . | fromJson).replicas) 1) .Values.router.hpa.enabled) }}
router.batches.claimName is for one router: set router.replicas=1, or do without the claim
{{- end -}}
{{- end -}}

{{/* The network and the devices that NIXL uses. */}}
{{- define "baton.fabricProblems" -}}
{{- $nixl := .Values.nixl -}}
{{- $all := dict "nixl_interfaces" $nixl.interfaces "nixl_private_network" $nixl.privateNetwork -}}
{{- if and $nixl.networks (not $nixl.interfaces) }}
nixl.networks gives pods a second network that nobody uses: set nixl.interfaces to its device, as in [net1]
{{- end -}}
{{- if and $nixl.interfaces (not $nixl.privateNetwork) }}
nixl.interfaces opens NIXL, and UCX and RDMA authenticate nobody: whoever is on that network can read and write the memory of workers and stores; set nixl.privateNetwork=true if only this release is on it
{{- end -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $told := merge (deepCopy $pool.settings) (ternary $all dict (not (empty $nixl.interfaces))) (deepCopy $.Values.settings) -}}
{{- if and (get $pool.settings "nixl_interfaces") (not (get $told "nixl_private_network")) }}
pools.{{ $key }}.settings.nixl_interfaces opens NIXL, and UCX and RDMA authenticate nobody: set pools.{{ $key }}.settings.nixl_private_network=true if only this release is on that network
{{- end -}}
{{- if and $pool.rdma.enabled (not $pool.vllmServer.enabled) (not (get $told "nixl_interfaces")) }}
pools.{{ $key }}.rdma is enabled, and NIXL may use no network device: set pools.{{ $key }}.settings.nixl_interfaces (or nixl.interfaces) to the device, as in "mlx5_0:1"
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.accountProblems" -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
serviceAccount.create is false: set serviceAccount.name to one that exists
{{- end -}}
{{- if and (not .Values.conductor.serviceAccount.create) (not .Values.conductor.serviceAccount.name) }}
conductor.serviceAccount.create is false: set conductor.serviceAccount.name to one that exists
{{- end -}}
{{- end -}}

{{/* Objects that are named but do not exist, or can't be changed as required. */}}
{{- define "baton.missingProblems" -}}
{{- if and .Values.checks.existing (include "baton.canLookUp" .) -}}
{{- $values := .Values -}}
{{- $secrets := dict
      "secrets.existingSecret" $values.secrets.existingSecret
      "auth.existingSecret" $values.auth.existingSecret
      "redis.external.existingSecret" $values.redis.external.existingSecret
      "model.hub.existingSecret" (ternary $values.model.hub.existingSecret "" (eq $values.model.source "hub"))
      "tls.router.existingSecret" (ternary $values.tls.router.existingSecret "" $values.tls.router.enabled)
      "tls.rpc.existingSecret" (ternary $values.tls.rpc.existingSecret "" $values.tls.rpc.enabled)
      "test.existingSecret" $values.test.existingSecret -}}
{{- range $index, $name := $values.images.pullSecrets -}}{{- $_ := set $secrets (printf "images.pullSecrets[%d]" $index) $name -}}{{- end -}}
{{- range $key, $name := $secrets -}}
{{- if and $name (not (lookup "v1" "Secret" $.Release.Namespace $name)) }}
{{ $key }}: there is no Secret {{ $name }} in the namespace {{ $.Release.Namespace }}
{{- end -}}
{{- end -}}
{{- include "baton.missingKeys" . -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $live := lookup "apps/v1" "Deployment" $.Release.Namespace (printf "%s-%s" (include "baton.fullname" $) $key) | default dict -}}
{{- $role := dig "spec" "selector" "matchLabels" "baton.dev/role" $pool.role $live -}}
{{- if and (not $.Values.ray.enabled) (ne $role $pool.role) }}
pools.{{ $key }} has the role {{ $role }}, and a Deployment can't change it: give the {{ $pool.role }} pool another name
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Secret that exists but lacks a required key. */}}
{{- define "baton.missingKeys" -}}
{{- $values := .Values -}}
{{- $asked := dict
      "secrets.existingSecret" (concat (list "cluster-secret" "tenant-secret" "admin-key") (ternary (list "redis-password") list $values.redis.enabled))
      "auth.existingSecret" (list $values.auth.secretKey)
      "redis.external.existingSecret" (list $values.redis.external.urlKey)
      "model.hub.existingSecret" (ternary (list $values.model.hub.tokenKey) list (eq $values.model.source "hub"))
      "tls.router.existingSecret" (ternary (list "tls.crt" "tls.key") list $values.tls.router.enabled)
      "tls.rpc.existingSecret" (ternary (list "tls.crt" "tls.key" "ca.crt") list $values.tls.rpc.enabled)
      "test.existingSecret" (list $values.test.secretKey) -}}
{{- range $path, $keys := $asked -}}
{{- $name := $values -}}
{{- range splitList "." $path -}}{{- $name = get $name . -}}{{- end -}}
{{- with $name -}}
{{- $live := lookup "v1" "Secret" $.Release.Namespace . -}}
{{- range $key := $keys -}}
{{- if and $live (not (hasKey (dig "data" dict $live) $key)) }}
{{ $path }}: the Secret {{ $name }} has no key {{ $key }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $index, $name := $values.images.pullSecrets -}}
{{- $live := lookup "v1" "Secret" $.Release.Namespace $name -}}
{{- $data := dig "data" dict ($live | default dict) -}}
{{- if and $live (not (or (hasKey $data ".dockerconfigjson") (hasKey $data ".dockercfg"))) }}
images.pullSecrets[{{ $index }}]: the Secret {{ $name }} has no key .dockerconfigjson
{{- end -}}
{{- end -}}
{{- end -}}
