{{/* A selector of this release's pods with one of the given roles. Takes root and roles. */}}
{{- define "baton.rolesSelector" -}}
matchLabels:
  app.kubernetes.io/name: baton
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
matchExpressions:
  - {key: baton.dev/role, operator: In, values: [{{ join ", " .roles }}]}
{{- end -}}

{{/* The same selector, as an allowed source in a NetworkPolicy. */}}
{{- define "baton.peers" -}}
- podSelector:
    {{- include "baton.rolesSelector" . | nindent 4 }}
{{- end -}}

{{/* Sources of metrics scrapes. The kubelet's probes come from the node, which policies always allow. Takes the root. */}}
{{- define "baton.metricsIngress" -}}
- ports:
    - {port: {{ .Values.ports.ops }}, protocol: TCP}
  from:
    {{- if .Values.networkPolicy.metricsFrom }}
    {{- toYaml .Values.networkPolicy.metricsFrom | nindent 4 }}
    {{- else }}
    - namespaceSelector: {}
    {{- end }}
{{- end -}}
