{{/* Whether an object that needs a CRD is created: "true", or "". Takes root, wanted (auto or a truth value), and api. */}}
{{- define "baton.wanted" -}}
{{- if eq (toString .wanted) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has .api -}}true{{- end -}}
{{- else if .wanted -}}true{{- end -}}
{{- end -}}
