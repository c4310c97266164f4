{{/* Settings of conductors only: the pools' location, and whether and within which bounds they are autoscaled; as JSON. */}}
{{- define "baton.conductorSettings" -}}
{{- $name := include "baton.fullname" . -}}
{{- $autoscale := .Values.conductor.autoscale -}}
{{- $mode := include "baton.autoscaleMode" . -}}
{{- $places := list -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $places = append $places (printf "%s=%s/%s-%s" $key $pool.role $name $key) -}}
{{- end -}}
{{- $settings := dict
      "kubernetes_namespace" .Release.Namespace
      "kubernetes_pools" (join "," $places)
      "kubernetes_lease" (include "baton.leaseName" .)
      "kubernetes_watch" .Values.conductor.watchPods -}}
{{- if ne $mode "off" -}}
{{- $settings = merge $settings (dict
      "autoscale" $mode
      "autoscale_pools" "kubernetes"
      "autoscale_prefill_pool" (include "baton.autoscaledPool" (dict "root" . "role" "prefill"))
      "autoscale_decode_pool" (include "baton.autoscaledPool" (dict "root" . "role" "decode"))
      "min_prefill" (int $autoscale.prefill.min)
      "max_prefill" (int $autoscale.prefill.max)
      "min_decode" (int $autoscale.decode.min)
      "max_decode" (int $autoscale.decode.max)
      "max_workers" (int $autoscale.maxWorkers)) -}}
{{- end -}}
{{- merge $settings (deepCopy .Values.conductor.settings) | toJson -}}
{{- end -}}

{{/*
Which pool of a role the autoscaler resizes: the configured one, else the only one, else the one with the
role's name; empty if there is none of these, or if the autoscaler leaves the role alone. Takes root and role.
*/}}
{{- define "baton.autoscaledPool" -}}
{{- if hasKey .root.Values.conductor.autoscale .role -}}
{{- $named := (get .root.Values.conductor.autoscale .role).pool -}}
{{- $same := list -}}
{{- range $key, $pool := include "baton.pools" .root | fromJson -}}
{{- if eq $pool.role $.role -}}{{- $same = append $same $key -}}{{- end -}}
{{- end -}}
{{- if $named -}}{{- if has $named $same -}}{{ $named }}{{- end -}}
{{- else if eq (len $same) 1 -}}{{ first $same }}
{{- else if has .role $same -}}{{ .role }}
{{- end -}}
{{- end -}}
{{- end -}}
