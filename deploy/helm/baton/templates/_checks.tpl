{{- define "baton.checks" -}}
{{- end -}}
