{{/*
Volumes and mounts of a Baton pod. The root file system is read-only, so every folder that is written to is a volume.
Each template for volumes has a matching one for mounts.
*/}}
{{- define "baton.volumes" -}}
- name: config
  configMap:
    name: {{ include "baton.fullname" .root }}-config
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.volumes.tmpSize }}
- name: home
  emptyDir:
    sizeLimit: {{ .root.Values.volumes.homeSize }}
{{- with .v.sharedMemory }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- if include "baton.hasVllmServer" . }}
- name: vllm-tmp
  emptyDir:
    sizeLimit: {{ .v.vllmServer.tmpSize }}
- name: vllm-events
  emptyDir:
    sizeLimit: 1Mi
{{- end }}
{{- include "baton.modelVolumes" . }}
{{- if .root.Values.tls.rpc.enabled }}
- name: rpc-tls
  secret:
    secretName: {{ include "baton.rpcTlsSecretName" .root }}
    defaultMode: 0440
{{- end }}
{{- with .volumes }}
{{ . }}
{{- end }}
{{- with .v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.volumeMounts" -}}
- name: config
  mountPath: /etc/baton
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /var/lib/baton
{{- if include "baton.hasVllmServer" . }}
{{ include "baton.kvEventsMount" . }}
{{- else if .v.sharedMemory }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- include "baton.modelMounts" . }}
{{- if .root.Values.tls.rpc.enabled }}
- name: rpc-tls
  mountPath: /etc/baton-rpc-tls
  readOnly: true
{{- end }}
{{- with .mounts }}
{{ . }}
{{- end }}
{{- with .v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The volumes of a pod's model, or of all models of a router that serves several. Models from the hub share a cache. */}}
{{- define "baton.modelVolumes" -}}
{{- $hub := dict -}}
{{- range .models | default (ternary (dict "" .model) dict (not (empty .model))) -}}
{{- if eq .source "hub" -}}{{- $hub = . -}}{{- else -}}{{- include "baton.modelVolume" . -}}{{- end -}}
{{- end -}}
{{- with $hub -}}{{- include "baton.modelVolume" . -}}{{- end -}}
{{- end -}}

{{- define "baton.modelMounts" -}}
{{- $hub := dict -}}
{{- range .models | default (ternary (dict "" .model) dict (not (empty .model))) -}}
{{- if eq .source "hub" -}}{{- $hub = . -}}{{- else -}}{{- include "baton.modelMount" . -}}{{- end -}}
{{- end -}}
{{- with $hub -}}{{- include "baton.modelMount" . -}}{{- end -}}
{{- end -}}

{{/*
The model's weights. Takes the model's values, with the names of the volume and of the folder as `volume` and `mount` if there
are several models. The demo model is in the image.
*/}}
{{- define "baton.modelVolume" -}}
{{- if eq .source "pvc" }}
- name: {{ .volume | default "model" }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
{{- else if eq .source "image" }}
- name: {{ .volume | default "model" }}
  image:
    reference: {{ .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
{{- else if eq .source "hostPath" }}
- name: {{ .volume | default "model" }}
  hostPath:
    path: {{ .hostPath.path }}
    type: Directory
{{- else if eq .source "hub" }}
- name: hub-cache
{{- if .hub.cache.claimName }}
  persistentVolumeClaim:
    claimName: {{ .hub.cache.claimName }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .hub.cache.size }}
{{- end }}
{{- with .hub.existingSecret }}
- name: hub-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $.hub.tokenKey }}, path: token}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.modelMount" -}}
{{- if eq .source "hub" }}
- name: hub-cache
  mountPath: /var/cache/huggingface
{{- if .hub.existingSecret }}
- name: hub-token
  mountPath: /etc/baton-hub
  readOnly: true
{{- end }}
{{- else if ne .source "demo" }}
- name: {{ .volume | default "model" }}
  mountPath: {{ .mount | default "/models" }}
  readOnly: true
{{- if and (eq .source "pvc") .pvc.subPath }}
  subPath: {{ .pvc.subPath }}
{{- end }}
{{- end }}
{{- end -}}
