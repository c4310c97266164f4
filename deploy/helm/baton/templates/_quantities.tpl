{{/* A Kubernetes quantity of memory (512Mi, 2G, 1048576) as a number of bytes. */}}
{{- define "baton.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
      "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (hasKey $units $unit) -}}
{{- fail (printf "%s is no amount of memory: write it like 512Mi or 2Gi" $text) -}}
{{- end -}}
{{- mulf (float64 (trimSuffix $unit $text)) (float64 (get $units $unit)) | floor | int64 -}}
{{- end -}}

{{/* A quantity of CPUs (250m, 4, 0.5) as a whole number, at least 1. */}}
{{- define "baton.cores" -}}
{{- $text := toString . -}}
{{- $millis := 0.0 -}}
{{- if hasSuffix "m" $text -}}
{{- $millis = float64 (trimSuffix "m" $text) -}}
{{- else -}}
{{- $millis = mulf (float64 $text) 1000.0 -}}
{{- end -}}
{{- max 1 (divf $millis 1000.0 | ceil | int) -}}
{{- end -}}

{{/* The termination grace period: endpointGraceSeconds, drainSeconds and marginSeconds. */}}
{{- define "baton.graceSeconds" -}}
{{- add (int .root.Values.endpointGraceSeconds) (int .v.drainSeconds) (int .root.Values.marginSeconds) -}}
{{- end -}}
