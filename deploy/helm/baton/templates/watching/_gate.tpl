{{/*
Whether an object of Prometheus operator is created: "true", or "". Takes root, wanted (auto or a truth value), and api.
*/}}
{{- define "baton.wanted" -}}
{{- if eq (toString .wanted) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has .api -}}true{{- end -}}
{{- else if eq (toString .wanted) "true" -}}{{- include "baton.hasApi" . -}}{{- end -}}
{{- end -}}
