{{/*
The container of a pool's own vLLM server (vllmServer): vLLM's image, unmodified, which the pod's Baton container attaches over
loopback. It is a sidecar in Kubernetes' sense, an init container with restartPolicy Always, for the order of its life: Baton starts
once vLLM serves, and vLLM gets SIGTERM only after Baton has drained and ended. If both got SIGTERM at once, vLLM would end new
requests with `abort`, and refuse those that a router still sends, while Baton drains. A preStop hook of vLLM's container that waits
for Baton would do the same, but would need a program in vLLM's image that asks the other container.

A kubelet probes from outside, and the server listens on loopback, so the startup probe is a command. There are no others: Baton's
readiness needs tokens from the server, and a server that ends is restarted. Its caches are in /tmp. Takes the context of a pod.
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
    {{- include "baton.hubEnv" .model | nindent 4 }}
    {{- with .v.vllmServer.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  startupProbe:
    exec:
      command: ["python3", "-c", "import urllib.request; urllib.request.urlopen('{{ include "baton.vllmServerUrl" .root }}/health', timeout=3)"]
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ max 1 (ceil (divf (float64 .v.startSeconds) 5.0) | int) }}
  resources:
    {{- include "baton.resources" . | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: vllm-tmp
      mountPath: /tmp
    {{- if .v.sharedMemory }}
    - name: shm
      mountPath: /dev/shm
    {{- end }}
    {{- include "baton.modelMounts" . | nindent 4 }}
{{- end -}}

{{/* The server's port is the router's, which no worker uses, so no other program of the pod has it. */}}
{{- define "baton.vllmServerUrl" -}}
http://127.0.0.1:{{ .Values.ports.http }}
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
- --shutdown-timeout={{ .v.drainSeconds }}
{{- range .v.vllmServer.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Whether this is a pool with vLLM servers of its own: "true", or "". Takes v. */}}
{{- define "baton.hasVllmServer" -}}
{{- if dig "vllmServer" "enabled" false .v -}}true{{- end -}}
{{- end -}}

{{- define "baton.vllmServerProblems" -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- if $pool.vllmServer.enabled -}}
{{- if ne $pool.role "mixed" }}
pools.{{ $key }}.vllmServer needs workers that serve whole requests: set pools.{{ $key }}.role=mixed
{{- end -}}
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
