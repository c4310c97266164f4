{{/* One variable for each of a map of Baton's settings. Lists are joined by commas. */}}
{{- define "baton.settingsEnv" -}}
{{- range $name, $value := . }}
- name: BATON_{{ $name | upper }}
{{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
{{- else if kindIs "map" $value }}
  value: {{ toJson $value | quote }}
{{- else if kindIs "float64" $value }}
  value: {{ toJson $value | quote }}
{{- else }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.fieldEnv" -}}
- name: {{ .name }}
  valueFrom:
    fieldRef:
      fieldPath: {{ .path }}
{{- end -}}

{{/*
The identity and location of a process. It is identified by the pod's UID, since names are reused. Variables that other
variables refer to come first.
*/}}
{{- define "baton.identityEnv" -}}
{{ include "baton.fieldEnv" (dict "name" "POD_NAME" "path" "metadata.name") }}
{{ include "baton.fieldEnv" (dict "name" "POD_UID" "path" "metadata.uid") }}
{{ include "baton.fieldEnv" (dict "name" "POD_IP" "path" "status.podIP") }}
{{ include "baton.fieldEnv" (dict "name" "NODE_NAME" "path" "spec.nodeName") }}
- name: BATON_ID
  value: $(POD_NAME).$(POD_UID)
- name: BATON_ADVERTISE_ADDRESS
  value: $(POD_IP)
- name: BATON_CONFIG
  value: /etc/baton/baton.yaml
- name: BATON_HOME
  value: /var/lib/baton
- name: HOME
  value: /var/lib/baton
{{- end -}}

{{/*
The URL of Redis, unless it has a password, and the folder from which Baton reads its secrets (_secrets.tpl). Takes the root.
*/}}
{{- define "baton.secretsEnv" -}}
- name: BATON_SECRETS_DIRECTORY
  value: {{ include "baton.secretsPath" . }}
{{- with ternary (printf "redis://%s-redis:6379/0" (include "baton.fullname" .)) .Values.redis.external.url .Values.redis.enabled }}
- name: BATON_REDIS_URL
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Where the model is, for roles that need it. Takes model. */}}
{{- define "baton.modelEnv" -}}
{{- if ne .model.source "demo" }}
- name: BATON_MODEL
  value: {{ include "baton.modelPath" .model | quote }}
{{- end }}
{{- include "baton.hubEnv" .model }}
{{- with .model.servedName }}
- name: BATON_SERVED_MODEL_NAME
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* All models of a router that serves several, `model` first. Takes their values by name. */}}
{{- define "baton.modelsEnv" -}}
{{- $paths := list -}}
{{- $hub := dict "source" "" -}}
{{- range $name, $model := . -}}
{{- $path := printf "%s=%s" $name (include "baton.modelPath" $model) -}}
{{- $paths = ternary (append $paths $path) (prepend $paths $path) (hasKey $model "volume") -}}
{{- if eq $model.source "hub" -}}{{- $hub = $model -}}{{- end -}}
{{- end }}
- name: BATON_MODELS
  value: {{ join "," $paths | quote }}
{{- include "baton.hubEnv" $hub }}
{{- end -}}

{{/* Where the Hugging Face hub's client keeps files, and its token. Takes a model's values. */}}
{{- define "baton.hubEnv" -}}
{{- if eq .source "hub" }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- if .hub.existingSecret }}
- name: HF_TOKEN_PATH
  value: /etc/baton-hub/token
{{- end }}
{{- end }}
{{- end -}}

{{/* All variables of a Baton container. Takes the context of a pod. */}}
{{- define "baton.env" -}}
{{ include "baton.identityEnv" . }}
{{ include "baton.secretsEnv" .root }}
- name: BATON_DRAIN_TIMEOUT_SECONDS
  value: {{ .v.drainSeconds | quote }}
{{- if .models }}
{{- include "baton.modelsEnv" .models }}
{{- else if .model }}
{{- include "baton.modelEnv" . }}
{{- end }}
{{- with .settings }}
{{- include "baton.settingsEnv" . }}
{{- end }}
{{- with .env }}
{{ . }}
{{- end }}
{{- with .v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
