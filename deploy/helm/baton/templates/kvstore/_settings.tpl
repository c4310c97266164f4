{{/* Settings of stores only, as JSON. A tenth of the volume is left for its file system. */}}
{{- define "baton.kvstoreSettings" -}}
{{- $store := .Values.kvstore -}}
{{- $settings := dict "store_bytes" (include "baton.bytes" $store.memory) "store_disk_bytes" 0 -}}
{{- if $store.disk.enabled -}}
{{- $size := include "baton.bytes" $store.disk.size | float64 -}}
{{- $_ := set $settings "store_disk_bytes" (mulf $size 0.9 | floor | int64 | toString) -}}
{{- $_ := set $settings "store_folder" "/var/lib/baton-store" -}}
{{- end -}}
{{- merge $settings (deepCopy $store.settings) | toJson -}}
{{- end -}}
