{{/*
How many workers of a role all pools have together. Takes root and role.
*/}}
{{- define "baton.rayCount" -}}
{{- $count := 0 -}}
{{- $role := .role -}}
{{- range $_, $pool := include "baton.pools" .root | fromJson -}}
{{- if eq $pool.role $role -}}{{- $count = add $count (int $pool.replicas) -}}{{- end -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{/* Settings of `baton up`. Its programs share a pod, so they pick their own ports but for the router's. */}}
{{- define "baton.raySettings" -}}
{{- $settings := dict
      "on" "ray"
      "ray_address" "auto"
      "prefill" (include "baton.rayCount" (dict "root" . "role" "prefill"))
      "decode" (include "baton.rayCount" (dict "root" . "role" "decode"))
      "ray_worker_gpus" .Values.ray.workerGpus -}}
{{- $settings = merge $settings (include "baton.routerSettings" . | fromJson) -}}
{{- merge $settings (deepCopy .Values.ray.settings) | toJson -}}
{{- end -}}

{{/* What the containers of a Ray node share: Ray's sockets lie in /tmp/ray, its objects in /dev/shm. */}}
{{- define "baton.rayPod" -}}
metadata:
  labels:
    {{- include "baton.podLabels" . | nindent 4 }}
    {{- with .v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "baton.config" .root | sha256sum }}
    {{- with .v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "baton.podIdentity" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "baton.graceSeconds" . }}
  {{- with include "baton.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "baton.image" . | quote }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      env:
        - {name: HOME, value: /var/lib/baton}
        - {name: BATON_HOME, value: /var/lib/baton}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        {{- with include "baton.modelEnv" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- include "baton.rayProbes" .healthAddress | nindent 6 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "baton.volumeMounts" . | nindent 8 }}
    {{- with .beside }}
    {{- . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
{{- end -}}

{{/* Ours are without Ray's dashboard, whose agent the operator's own probes ask. Takes an address, as a shell has it. */}}
{{- define "baton.rayProbes" -}}
startupProbe:
  exec: {command: [sh, -c, {{ printf "ray health-check --address %s" . | quote }}]}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
readinessProbe:
  exec: {command: [sh, -c, {{ printf "ray health-check --address %s" . | quote }}]}
  periodSeconds: 10
  timeoutSeconds: 10
livenessProbe:
  exec: {command: [sh, -c, {{ printf "ray health-check --address %s" . | quote }}]}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 5
{{- end -}}

{{/* `baton up` beside Ray's head: it is ready once the router is. */}}
{{- define "baton.raySupervisor" -}}
- name: baton
  image: {{ include "baton.image" . | quote }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  command:
    - sh
    - -c
    - until ray health-check --address 127.0.0.1:6379; do sleep 1; done; exec baton up
  env:
    {{- include "baton.rayEnv" . | nindent 4 }}
  ports:
    - {name: http, containerPort: {{ .root.Values.ports.http }}, protocol: TCP}
  startupProbe:
    httpGet: {path: /ready, port: http, scheme: {{ .scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ ceil (divf (float64 .v.startSeconds) 5.0) | int }}
  readinessProbe:
    httpGet: {path: /ready, port: http, scheme: {{ .scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
  livenessProbe:
    httpGet: {path: /health, port: http, scheme: {{ .scheme }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- include "baton.resources" (dict "v" (dict "resources" .v.head.supervisorResources) "model" .model) | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "baton.volumeMounts" . | nindent 4 }}
{{- end -}}

{{- define "baton.rayEnv" -}}
{{ include "baton.fieldEnv" (dict "name" "POD_IP" "path" "status.podIP") }}
- {name: HOME, value: /var/lib/baton}
- {name: BATON_HOME, value: /var/lib/baton}
- {name: BATON_CONFIG, value: /etc/baton/baton.yaml}
# Workers come from other machines.
- {name: BATON_GRPC_HOST, value: $(POD_IP)}
{{ include "baton.secretEnv" (dict "name" "BATON_CLUSTER_SECRET" "secret" (include "baton.secretName" .root) "key" "cluster-secret") }}
{{ include "baton.redisEnv" .root }}
- name: BATON_DRAIN_SECONDS
  value: {{ .v.drainSeconds | quote }}
{{ include "baton.routerEnv" .root }}
{{- include "baton.modelEnv" . }}
{{- include "baton.settingsEnv" .settings }}
{{- end -}}
