{{/* Whether a value is a Kubernetes quantity (250m, 0.5, 512Mi, 1e9): "true", or "". */}}
{{- define "baton.isQuantity" -}}
{{- if regexMatch "^([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$" (toString .) -}}true{{- end -}}
{{- end -}}

{{/* A quantity as a number of its unit, like bytes or CPUs; 0 if it is malformed, which baton.quantityProblems reports. */}}
{{- define "baton.quantity" -}}
{{- $text := toString . -}}
{{- $units := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
      "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (include "baton.isQuantity" .) -}}
0
{{- else if $unit -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $units $unit) -}}
{{- else -}}
{{- float64 $text -}}
{{- end -}}
{{- end -}}

{{/* A quantity of memory or storage as a whole number of bytes. */}}
{{- define "baton.bytes" -}}
{{- include "baton.quantity" . | float64 | floor | int64 -}}
{{- end -}}

{{/* A quantity of CPUs (250m, 4, 0.5) as a whole number, at least 1. */}}
{{- define "baton.cores" -}}
{{- max 1 (include "baton.quantity" . | float64 | ceil | int) -}}
{{- end -}}

{{/* The termination grace period: endpointGraceSeconds, drainSeconds and marginSeconds. */}}
{{- define "baton.graceSeconds" -}}
{{- add (int .root.Values.endpointGraceSeconds) (int .v.drainSeconds) (int .root.Values.marginSeconds) -}}
{{- end -}}
