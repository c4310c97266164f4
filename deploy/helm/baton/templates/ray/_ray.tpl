{{/*
The total number of workers of a role in all pools. Takes root and role.
*/}}
{{- define "baton.rayCount" -}}
{{- $count := 0 -}}
{{- $role := .role -}}
{{- range $_, $pool := include "baton.pools" .root | fromJson -}}
{{- if eq $pool.role $role -}}{{- $count = add $count (int $pool.replicas) -}}{{- end -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{/* Settings of `baton up`. Its processes share a pod, so they choose free ports, except for the router's port. */}}
{{- define "baton.raySettings" -}}
{{- $settings := dict
      "on" "ray"
      "ray_address" "$(POD_IP):6379"
      "ray_worker_gpus" .Values.ray.workerGpus -}}
{{- range include "baton.workerRoles" (dict "root" .) | fromJsonArray -}}
{{- $_ := set $settings . (include "baton.rayCount" (dict "root" $ "role" .)) -}}
{{- end -}}
{{- $settings = merge $settings (include "baton.routerSettings" . | fromJson) -}}
{{- merge $settings (deepCopy .Values.ray.settings) | toJson -}}
{{- end -}}

{{/* Volumes that the containers of a Ray node share: Ray's sockets are in /tmp/ray, its objects in /dev/shm. */}}
{{- define "baton.rayPod" -}}
metadata:
  {{- include "baton.podMetadata" (merge (dict "annotations" (include "baton.config" .root | sha256sum | printf "checksum/config: %s")) .) | nindent 2 }}
spec:
  {{- include "baton.podIdentity" . | nindent 2 }}
  {{- if .beside }}
  # A Ray driver finds its node among the processes that are visible to it.
  shareProcessNamespace: true
  {{- end }}
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
      {{- include "baton.rayProbes" . | nindent 6 }}
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
    {{- if .beside }}
    {{- include "baton.secretsVolume" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* KubeRay's own probes query the dashboard's agent, which Baton's image does not have, so only the raylet's port is checked. */}}
{{- define "baton.rayProbes" -}}
startupProbe:
  tcpSocket: {port: {{ include "baton.rayletPort" . }}}
  periodSeconds: 2
  failureThreshold: {{ include "baton.startFailures" (dict "root" .root "period" 2) }}
readinessProbe:
  tcpSocket: {port: {{ include "baton.rayletPort" . }}}
  periodSeconds: 5
livenessProbe:
  tcpSocket: {port: {{ include "baton.rayletPort" . }}}
  periodSeconds: 10
  failureThreshold: 6
{{- end -}}

{{/* The port is arbitrary for Ray; it is fixed so that probes can use it. */}}
{{- define "baton.rayletPort" -}}6380{{- end -}}

{{/* `baton up` beside Ray's head: it is ready once the router is. */}}
{{- define "baton.raySupervisor" -}}
- name: baton
  image: {{ include "baton.image" . | quote }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  command:
    - bash
    - -c
    - until (exec 3<>/dev/tcp/$POD_IP/{{ include "baton.rayletPort" . }}) 2>/dev/null; do sleep 1; done; exec baton up
  env:
    {{- include "baton.rayEnv" . | nindent 4 }}
  ports:
    - {name: http, containerPort: {{ .root.Values.ports.http }}, protocol: TCP}
  startupProbe:
    httpGet: {path: /ready, port: http, scheme: {{ .scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ include "baton.startFailures" (dict "root" .root "period" 5) }}
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
    {{- include "baton.secretsMount" . | nindent 4 }}
{{- end -}}

{{- define "baton.rayEnv" -}}
{{ include "baton.fieldEnv" (dict "name" "POD_IP" "path" "status.podIP") }}
- {name: HOME, value: /var/lib/baton}
- {name: BATON_HOME, value: /var/lib/baton}
- {name: BATON_CONFIG, value: /etc/baton/baton.yaml}
# Workers on other machines connect to this address.
- {name: BATON_GRPC_HOST, value: $(POD_IP)}
{{ include "baton.secretsEnv" .root }}
- name: BATON_DRAIN_TIMEOUT_SECONDS
  value: {{ .v.drainSeconds | quote }}
{{- include "baton.modelEnv" . }}
{{- include "baton.settingsEnv" .settings }}
{{- end -}}
