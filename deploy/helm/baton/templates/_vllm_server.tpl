{{/*
The container of a pool's own vLLM server (vllmServer): vLLM's image, unmodified, which the pod's Baton container attaches over
loopback. It is a sidecar in Kubernetes' sense, an init container with restartPolicy Always, for the order of its life: Baton starts
once vLLM serves, and vLLM gets SIGTERM only after Baton has drained and ended. If both got SIGTERM at once, vLLM would end new
requests with `abort`, and refuse those that a router still sends, while Baton drains. A preStop hook of vLLM's container that waits
for Baton would do the same, but would need a program in vLLM's image that asks the other container.

A kubelet probes from outside, and the server listens on loopback, so the startup probe is a command. There are no others: Baton's
readiness needs tokens from the server, and a server that ends is restarted. Its caches are in /tmp. Takes the context of a pod.

Only its NixlConnector is reached from outside the pod, by the servers of other pools: they ask its side channel how to read KV, and
read it over ports that UCX picks. Neither authenticates anybody (baton.vllmServerNetworkProblems).
*/}}
{{- define "baton.vllmServer" -}}
- name: vllm
  image: {{ include "baton.image" (dict "root" .root "kind" (ternary "vllmServerCuda" "vllmServer" (eq (include "baton.poolDevice" .) "cuda"))) | quote }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  restartPolicy: Always
  command: ["vllm", "serve"]
  args:
    {{- include "baton.vllmServerArgs" . | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    # vLLM's image has no user of this number, so Python finds neither a home nor a name.
    - {name: HOME, value: /tmp}
    - {name: USER, value: vllm}
    - {name: VLLM_NO_USAGE_STATS, value: "1"}
    {{- if include "baton.exchangesKv" .v }}
    {{- include "baton.fieldEnv" (dict "name" "VLLM_NIXL_SIDE_CHANNEL_HOST" "path" "status.podIP") | nindent 4 }}
    - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ include "baton.sideChannelPort" . | quote }}}
    {{- end }}
    {{- include "baton.hubEnv" .model | nindent 4 }}
    {{- with .v.vllmServer.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  startupProbe:
    exec:
      command: ["python3", "-c", "import urllib.request; urllib.request.urlopen('{{ include "baton.vllmServerUrl" .root }}/health', timeout=3)"]
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ include "baton.startFailures" (dict "root" .root "period" 5) }}
  resources:
    {{- include "baton.resources" . | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: vllm-tmp
      mountPath: /tmp
    {{- include "baton.kvEventsMount" . | nindent 4 }}
    {{- if .v.sharedMemory }}
    - name: shm
      mountPath: /dev/shm
    {{- end }}
    {{- include "baton.modelMounts" . | nindent 4 }}
    {{- with .v.vllmServer.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The server's port is the router's, which no worker uses, so no other program of the pod has it. */}}
{{- define "baton.vllmServerUrl" -}}
http://127.0.0.1:{{ .Values.ports.http }}
{{- end -}}

{{/*
Where the server publishes its KV events, by which requests are placed where their prefix is cached: sockets in a folder that only the
pod's two containers have, since ZMQ authenticates nobody.
*/}}
{{- define "baton.kvEventsMount" -}}
- name: vllm-events
  mountPath: /run/vllm
{{- end -}}

{{/*
The flag for it. Not if the pool's own arguments have it; Baton then asks the server where the events are. And not with data-parallel ranks,
for which vLLM finds no socket files of their own, and whose events Baton can't use.
*/}}
{{- define "baton.kvEventsArg" -}}
{{- if not (include "baton.hasServerArg" (dict "v" .v "flags" (list "--kv-events-config" "--data-parallel" "-dp"))) -}}
--kv-events-config={{ dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" "ipc:///run/vllm/events" "replay_endpoint" "ipc:///run/vllm/replay" | toJson }}
{{- end -}}
{{- end -}}

{{/* The server as the setting `attach` names it. Servers before vLLM 0.32 can't be asked for their events. */}}
{{- define "baton.attachedServer" -}}
{{ .role }}={{ include "baton.vllmServerUrl" .root }}
{{- if include "baton.kvEventsArg" . -}}?kv_events=ipc:///run/vllm/events&kv_replay=ipc:///run/vllm/replay{{- end -}}
{{- end -}}

{{/* Whether the pool's own arguments have one of these flags, in a form that vLLM reads: "true", or "". Takes v and flags. */}}
{{- define "baton.hasServerArg" -}}
{{- $own := false -}}
{{- range $arg := .v.vllmServer.args -}}
{{- range $.flags -}}{{- $own = or $own (hasPrefix . (replace "_" "-" $arg)) -}}{{- end -}}
{{- end -}}
{{- if $own -}}true{{- end -}}
{{- end -}}

{{- define "baton.vllmServerArgs" -}}
{{- if eq .model.source "hub" -}}
- {{ .model.hub.id }}
- --revision={{ .model.hub.revision }}
{{- else -}}
- {{ include "baton.modelPath" .model }}
{{- end }}
- --host=127.0.0.1
- --port={{ .root.Values.ports.http }}
- --served-model-name={{ include "baton.modelName" .model }}
- --enable-prompt-tokens-details
- '--structured-outputs-config={"backend":"guidance"}'
- --shutdown-timeout={{ .v.drainSeconds }}
{{- with include "baton.kvEventsArg" . }}
- {{ . | quote }}
{{- end }}
{{- with include "baton.kvTransferArg" . }}
- {{ . | quote }}
{{- end }}
{{- range .v.vllmServer.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Whether this is a pool with vLLM servers of its own: "true", or "". Takes v. */}}
{{- define "baton.hasVllmServer" -}}
{{- if dig "vllmServer" "enabled" false .v -}}true{{- end -}}
{{- end -}}

{{/* Whether the servers of this pool exchange KV with those of other pools: "true", or "". Takes the pool's values. */}}
{{- define "baton.exchangesKv" -}}
{{- if and .vllmServer.enabled (has .role (list "prefill" "decode")) -}}true{{- end -}}
{{- end -}}

{{/* The flag by which the server exchanges KV, unless the pool's own arguments have it. */}}
{{- define "baton.kvTransferArg" -}}
{{- if and (include "baton.exchangesKv" .v) (not (include "baton.hasServerArg" (dict "v" .v "flags" (list "--kv-transfer-config")))) -}}
{{- $config := dict "kv_connector" "NixlConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" -}}
{{- if eq (include "baton.poolDevice" .) "cpu" -}}{{- $_ := set $config "kv_buffer_device" "cpu" -}}{{- end -}}
--kv-transfer-config={{ toJson $config }}
{{- end -}}
{{- end -}}

{{/* NixlConnector's own default. Each pod has its own network, so one number is free in all of them. */}}
{{- define "baton.sideChannelPort" -}}5600{{- end -}}

{{- define "baton.vllmServerProblems" -}}
{{- $pools := include "baton.pools" . | fromJson -}}
{{- range $key, $pool := $pools -}}
{{- if include "baton.exchangesKv" $pool -}}
{{- include "baton.kvPartnerProblems" (dict "pools" $pools "key" $key "pool" $pool) -}}
{{- include "baton.vllmServerNetworkProblems" (dict "root" $ "key" $key "pool" $pool) -}}
{{- end -}}
{{- if eq ($pool.settings.engine | default $.Values.settings.engine | default "baton") "vllm" }}
pools.{{ $key }} has engine vllm, with which workers of one machine start servers: on Kubernetes set pools.{{ $key }}.vllmServer.enabled instead
{{- end -}}
{{- if $pool.vllmServer.enabled -}}
{{- if eq $pool.model.source "demo" }}
pools.{{ $key }}.vllmServer has no model, since the demo model is only in Baton's images: set model.source to hub, pvc, image or hostPath
{{- end -}}
{{- if $.Values.ray.enabled }}
pools.{{ $key }}.vllmServer does not work with ray.enabled: set one of them to false
{{- end -}}
{{- if semverCompare "<1.29.0-0" $.Capabilities.KubeVersion.Version }}
pools.{{ $key }}.vllmServer needs Kubernetes 1.29 or newer, and this is {{ $.Capabilities.KubeVersion.Version }}: older ones have no sidecars
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A pool whose servers have nobody to exchange KV with: Baton's workers can't, nor servers on other devices. */}}
{{- define "baton.kvPartnerProblems" -}}
{{- $role := ternary "decode" "prefill" (eq .pool.role "prefill") -}}
{{- $model := include "baton.modelName" .pool.model -}}
{{- $device := include "baton.poolDevice" (dict "v" .pool) -}}
{{- $found := false -}}
{{- range .pools -}}
{{- $found = or $found (and .vllmServer.enabled (eq .role $role) (eq (include "baton.modelName" .model) $model) (eq (include "baton.poolDevice" (dict "v" .)) $device)) -}}
{{- end -}}
{{- if not $found }}
pools.{{ .key }}.vllmServer exchanges KV with other vLLM servers only, and {{ $model }} has no {{ $role }} pool of them ({{ $device }}): add one with vllmServer.enabled=true, or set pools.{{ .key }}.role=mixed
{{- end -}}
{{- end -}}

{{- define "baton.vllmServerNetworkProblems" -}}
{{- $port := include "baton.sideChannelPort" . -}}
{{- range $name, $number := .root.Values.ports -}}
{{- if eq (toString $number) $port }}
ports.{{ $name }} is {{ $port }}, which is the port of NixlConnector in pools.{{ $.key }}: set another one
{{- end -}}
{{- end -}}
{{- if not .root.Values.nixl.privateNetwork -}}
{{- if or .pool.rdma.enabled .pool.rdma.hostNetwork }}
pools.{{ .key }}.vllmServer exchanges KV with whoever is on the network, and NetworkPolicies apply neither to RDMA nor to the node's network: set nixl.privateNetwork=true if only this release is on it
{{- else if not .root.Values.networkPolicy.enabled }}
pools.{{ .key }}.vllmServer exchanges KV with whoever reaches its pods: set networkPolicy.enabled=true, or nixl.privateNetwork=true if only this release reaches them
{{- end -}}
{{- end -}}
{{- end -}}
