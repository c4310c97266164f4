{{/*
The pod template that all Baton roles share. Its context:
  root    the chart's
  role    router, conductor, a worker's or kvstore
  pool    a pool's key; pools only
  v       the role's (or pool's) values
  kind    which image: cpu, cuda or sidecar
  model   its values, if the role needs one
  models  the values of all models by name, if the role needs several
  settings, env, volumes, mounts, ports   this role's own, in addition to the common ones
*/}}
{{- define "baton.podTemplate" -}}
{{- $annotations := printf "kubectl.kubernetes.io/default-container: baton\nchecksum/config: %s" (include "baton.restartingConfig" . | sha256sum) -}}
{{- $spec := include "baton.podSpec" . -}}
{{- include "baton.failWith" (include "baton.specProblems" (merge (dict "spec" $spec) .)) -}}
metadata:
  {{- include "baton.podMetadata" (merge (dict "annotations" $annotations) .) | nindent 2 }}
spec:
  {{- $spec | nindent 2 }}
{{- end -}}

{{- define "baton.podSpec" -}}
{{ include "baton.podIdentity" . }}
terminationGracePeriodSeconds: {{ include "baton.graceSeconds" . }}
{{- with include "baton.scheduling" . | trim }}
{{ . }}
{{- end }}
{{- $hasServer := include "baton.hasVllmServer" . }}
{{- if or .v.initContainers $hasServer }}
initContainers:
  {{- with .v.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $hasServer }}
  {{- include "baton.vllmServer" . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  - name: baton
    image: {{ include "baton.image" . | quote }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    command: ["baton", "serve", {{ .role | quote }}]
    terminationMessagePolicy: FallbackToLogsOnError
    env:
      {{- include "baton.env" . | nindent 6 }}
    {{- with .v.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    ports:
      {{- include "baton.containerPorts" . | nindent 6 }}
    {{- include "baton.probes" . | nindent 4 }}
    resources:
      {{- if $hasServer }}
      {{- toYaml .v.vllmServer.sidecar.resources | nindent 6 }}
      {{- else }}
      {{- include "baton.resources" . | nindent 6 }}
      {{- end }}
    securityContext:
      {{- include "baton.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "baton.volumeMounts" . | nindent 6 }}
      {{- include "baton.secretsMount" . | nindent 6 }}
  {{- with .v.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "baton.volumes" . | nindent 2 }}
  {{- include "baton.secretsVolume" . | nindent 2 }}
{{- end -}}

{{/*
The ServiceAccount. Service links would only put variables of every Service of the namespace into each pod's environment.
*/}}
{{- define "baton.podIdentity" -}}
serviceAccountName: {{ ternary (include "baton.conductorServiceAccountName" .root) (include "baton.serviceAccountName" .root) (eq .role "conductor") }}
automountServiceAccountToken: {{ eq .role "conductor" }}
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if and .v.rdma .v.rdma.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .v.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "baton.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* Scheduling. A spread constraint without a labelSelector applies to the role's own pods. */}}
{{- define "baton.scheduling" -}}
{{- with .v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .v.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "baton.tolerations" . | fromJsonArray }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "baton.affinity" . | fromJson }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .v.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | indent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- include "baton.selector" $ | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Tolerations, as JSON: by default, of the taint of nodes with the GPUs that the pod requests. */}}
{{- define "baton.tolerations" -}}
{{- $gpu := ternary (dig "workers" "gpu" dict .v) (.v.gpu | default dict) (eq .role "ray-worker") -}}
{{- if or .v.tolerations (not $gpu.count) -}}
{{- .v.tolerations | default list | toJson -}}
{{- else -}}
{{- list (dict "key" $gpu.resourceName "operator" "Exists" "effect" "NoSchedule") | toJson -}}
{{- end -}}
{{- end -}}

{{/*
Affinity, as JSON: by default, roles and pools prefer zones in which they have fewer pods. This is not a topology spread
constraint, because then a node without a zone would be ignored by the constraint for nodes, too.
*/}}
{{- define "baton.affinity" -}}
{{- $affinity := deepCopy (.v.affinity | default dict) -}}
{{- if and .v.topologySpreadConstraints (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $own := include "baton.selector" . | fromYaml -}}
{{- $term := dict "topologyKey" "topology.kubernetes.io/zone" "labelSelector" (dict "matchLabels" $own) -}}
{{- $preferred := list (dict "weight" 50 "podAffinityTerm" $term) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $preferred) -}}
{{- end -}}
{{- $affinity | toJson -}}
{{- end -}}

{{- define "baton.containerPorts" -}}
{{- if eq .role "router" -}}
- {name: http, containerPort: {{ .root.Values.ports.http }}, protocol: TCP}
{{- else -}}
- {name: grpc, containerPort: {{ .root.Values.ports.grpc }}, protocol: TCP}
{{- if ne .role "kvstore" }}
- {name: framed, containerPort: {{ .root.Values.ports.framed }}, protocol: TCP}
{{- end }}
{{- end }}
- {name: ops, containerPort: {{ .root.Values.ports.ops }}, protocol: TCP}
{{- end -}}

{{/* How often a startup probe may fail, for every program of the chart. Takes root, and the probe's period in seconds. */}}
{{- define "baton.startFailures" -}}
{{- max 1 (ceil (divf (float64 .root.Values.startSeconds) (float64 .period)) | int) -}}
{{- end -}}

{{/*
Three probes of the ops server, which starts before the rest of the process. A start may take as long as startSeconds;
once the program has served, livez detects a hang.
*/}}
{{- define "baton.probes" -}}
{{- $probes := .root.Values.probes -}}
startupProbe:
  httpGet: {path: /startupz, port: ops}
  periodSeconds: {{ $probes.startup.periodSeconds }}
  timeoutSeconds: {{ $probes.startup.timeoutSeconds }}
  failureThreshold: {{ include "baton.startFailures" (dict "root" .root "period" $probes.startup.periodSeconds) }}
readinessProbe:
  httpGet: {path: /readyz, port: ops}
  periodSeconds: {{ $probes.readiness.periodSeconds }}
  timeoutSeconds: {{ $probes.readiness.timeoutSeconds }}
  failureThreshold: {{ $probes.readiness.failureThreshold }}
livenessProbe:
  httpGet: {path: /livez, port: ops}
  periodSeconds: {{ $probes.liveness.periodSeconds }}
  timeoutSeconds: {{ $probes.liveness.timeoutSeconds }}
  failureThreshold: {{ $probes.liveness.failureThreshold }}
{{- end -}}

{{/*
Resources: the given ones, GPUs and RDMA devices (which are limits), and ephemeral storage for a model that the pod itself
downloads from the hub. Takes v, and model if there is one.
*/}}
{{- define "baton.resources" -}}
{{- $limits := deepCopy (.v.resources.limits | default dict) -}}
{{- with .v.gpu -}}
{{- if gt (int .count) 0 -}}{{- $_ := set $limits .resourceName (int .count) -}}{{- end -}}
{{- end -}}
{{- with .v.rdma -}}
{{- if .enabled -}}{{- $_ := set $limits .resourceName (int .count) -}}{{- end -}}
{{- end -}}
{{- $disk := get $limits "ephemeral-storage" -}}
{{- if and $disk .model (eq (dig "source" "" (.model | default dict)) "hub") (not (dig "hub" "cache" "claimName" "" (.model | default dict))) -}}
{{- $bytes := add (int64 (include "baton.bytes" $disk)) (int64 (include "baton.bytes" .model.hub.cache.size)) -}}
{{- $_ := set $limits "ephemeral-storage" (printf "%dMi" (div $bytes 1048576)) -}}
{{- end -}}
{{- $resources := deepCopy .v.resources -}}
{{- $_ := set $resources "limits" $limits -}}
{{- toYaml $resources -}}
{{- end -}}
