{{/* An image's reference. Takes root, and kind: cpu, cuda or valkey. A digest takes precedence over a tag. */}}
{{- define "baton.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := get $images .kind -}}
{{- $registry := $image.registry | default (ternary "" $images.registry (eq .kind "valkey")) -}}
{{- with $registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* The kind of Baton image that a pool's pods run. */}}
{{- define "baton.poolImageKind" -}}
{{- if ne .v.image "auto" -}}{{ .v.image }}{{- else -}}{{ ternary "cuda" "cpu" (gt (int .v.gpu.count) 0) }}{{- end -}}
{{- end -}}
