{{/* Pods of this release with one of some roles. Takes root and roles. */}}
{{- define "baton.rolesSelector" -}}
matchLabels:
  app.kubernetes.io/name: baton
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
matchExpressions:
  - {key: baton.dev/role, operator: In, values: [{{ join ", " .roles }}]}
{{- end -}}

{{/* The same as whom a NetworkPolicy lets in. */}}
{{- define "baton.peers" -}}
- podSelector:
    {{- include "baton.rolesSelector" . | nindent 4 }}
{{- end -}}

{{/* Metrics and probes. The kubelet's come from the node, which policies let in. Takes the root. */}}
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
