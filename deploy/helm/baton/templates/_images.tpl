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
The kind of Baton image that a pool's pods run: the one for its device, or the one without torch beside a vLLM server.
*/}}
{{- define "baton.poolImageKind" -}}
{{- if include "baton.hasVllmServer" . -}}sidecar{{- else -}}{{ include "baton.poolDevice" . }}{{- end -}}
{{- end -}}
