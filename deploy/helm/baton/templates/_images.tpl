{{/*
An image's reference. Takes root, and kind: a key of images. A digest takes precedence over a tag. Without a registry, it is
the name that container runtimes give to an image without one, like docker.io/library/baton, spelled out: some runtimes would
look for a short name in other registries, too, and policies refuse it.
*/}}
{{- define "baton.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := get $images .kind -}}
{{- $registry := $image.registry | default (ternary "" $images.registry (has .kind (list "valkey" "vllmServer" "vllmServerCuda"))) -}}
{{- $registry | default (ternary "docker.io" "docker.io/library" (contains "/" $image.repository)) }}/{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* What a pool's workers compute on: cpu or cuda. */}}
{{- define "baton.poolDevice" -}}
{{- if ne .v.image "auto" -}}{{ .v.image }}{{- else -}}{{ ternary "cuda" "cpu" (gt (int .v.gpu.count) 0) }}{{- end -}}
{{- end -}}

{{/*
The kind of Baton image that a pool's pods run: the one for its device, with vLLM if the pool's engine is vllm; if vLLM is a server of
its own in the pod, the one without torch.
*/}}
{{- define "baton.poolImageKind" -}}
{{- $device := include "baton.poolDevice" . -}}
{{- if include "baton.hasVllmServer" . -}}
sidecar
{{- else if eq (.v.settings.engine | default .root.Values.settings.engine | default "baton") "vllm" -}}
{{ ternary "vllmCuda" "vllm" (eq $device "cuda") }}
{{- else -}}
{{ $device }}
{{- end -}}
{{- end -}}
