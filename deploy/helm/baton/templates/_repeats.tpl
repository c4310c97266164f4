{{/*
Values that give something a name that is taken. Kubernetes refuses such an object only when it is applied, after others of
the release.
*/}}

{{/* The metadata of a pod template. Takes a pod's context, and annotations (as text). */}}
{{- define "baton.podMetadata" -}}
{{- $labels := include "baton.podLabels" . -}}
{{- $annotations := list .annotations (include "baton.fabricAnnotation" .) | compact | join "\n" -}}
{{- $problems := list (include "baton.keyProblems" (dict "value" (printf "%s.podLabels" (include "baton.valuesPath" .)) "given" .v.podLabels "own" (fromYaml $labels))) -}}
{{- $problems = append $problems (include "baton.keyProblems" (dict "value" (printf "%s.podAnnotations" (include "baton.valuesPath" .)) "given" .v.podAnnotations "own" (fromYaml $annotations))) -}}
{{- include "baton.failWith" (join "\n" $problems) -}}
labels:
  {{- $labels | nindent 2 }}
  {{- with .v.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- $annotations | nindent 2 }}
  {{- with .v.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Where the values of a pod are. Takes root, role, and pool for pools only. */}}
{{- define "baton.valuesPath" -}}
{{- if .pool -}}pools.{{ .pool }}
{{- else if and .root.Values.ray.enabled (ne .role "redis") -}}ray
{{- else -}}{{ .role }}
{{- end -}}
{{- end -}}

{{/* Keys of a map that are also keys of the chart's own. Takes value (its path), given and own. */}}
{{- define "baton.keyProblems" -}}
{{- range $key := keys (.given | default dict) | sortAlpha -}}
{{- if hasKey $.own $key }}
{{ $.value }} repeats {{ $key }}, which this chart sets itself: leave it out
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names that a pod's spec has more than once. Takes a pod's context, and spec (as text). */}}
{{- define "baton.specProblems" -}}
{{- $path := include "baton.valuesPath" . -}}
{{- $spec := fromYaml .spec -}}
{{- $main := first $spec.containers -}}
{{- $names := dict "env" list "mounts" list "volumes" (ternary (list "disk") list (dig "disk" "enabled" false .v)) "containers" list -}}
{{- range $main.env -}}{{- $_ := set $names "env" (append $names.env .name) -}}{{- end -}}
{{- range $main.volumeMounts -}}{{- $_ := set $names "mounts" (append $names.mounts (trimSuffix "/" .mountPath)) -}}{{- end -}}
{{- range $spec.volumes -}}{{- $_ := set $names "volumes" (append $names.volumes .name) -}}{{- end -}}
{{- range concat ($spec.initContainers | default list) $spec.containers -}}{{- $_ := set $names "containers" (append $names.containers .name) -}}{{- end -}}
{{- range $kind, $value := dict "env" "extraEnv" "mounts" "extraVolumeMounts" "volumes" "extraVolumes" "containers" "extraContainers or initContainers" -}}
{{- $seen := dict -}}
{{- range get $names $kind -}}
{{- if hasKey $seen . }}
{{ $path }}.{{ $value }} repeats {{ . }}, which the pod has already: {{ ternary "leave it out" "give it another name" (has $kind (list "env" "mounts")) }}
{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations for the objects of the whole release. */}}
{{- define "baton.commonProblems" -}}
{{- $own := "^(baton\\.dev/.*|helm\\.sh/chart|app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by))$" -}}
{{- $monitoring := .Values.monitoring -}}
{{- range $value, $labels := dict "commonLabels" .Values.commonLabels "monitoring.labels" $monitoring.labels "monitoring.dashboards.labels" $monitoring.dashboards.labels -}}
{{- range $key := keys $labels | sortAlpha -}}
{{- if regexMatch $own $key }}
{{ $value }} repeats {{ $key }}, which this chart sets itself: leave it out
{{- else if and (ne $value "commonLabels") (hasKey $.Values.commonLabels $key) }}
{{ $value }} repeats {{ $key }}, which is in commonLabels: keep one
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "baton.keyProblems" (dict "value" "commonAnnotations" "given" .Values.commonAnnotations "own" (dict "baton.dev/replicas-managed-by" "")) -}}
{{- end -}}
