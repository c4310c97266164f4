{{/* What only conductors need: whether they follow the load, and how far; as JSON. */}}
{{- define "baton.conductorSettings" -}}
{{- $autoscale := .Values.conductor.autoscale -}}
{{- $mode := include "baton.autoscaleMode" . -}}
{{- $settings := dict "kubernetes_namespace" .Release.Namespace "kubernetes_watch" .Values.conductor.watchPods -}}
{{- if ne $mode "off" -}}
{{- $settings = merge $settings (dict
      "autoscale" $mode
      "autoscale_pools" "kubernetes"
      "min_prefill" (int $autoscale.prefill.min)
      "max_prefill" (int $autoscale.prefill.max)
      "min_decode" (int $autoscale.decode.min)
      "max_decode" (int $autoscale.decode.max)
      "max_workers" (int $autoscale.maxWorkers)) -}}
{{- end -}}
{{- merge $settings (deepCopy .Values.conductor.settings) | toJson -}}
{{- end -}}
