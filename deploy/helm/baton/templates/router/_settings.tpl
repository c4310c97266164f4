{{/* Settings of routers only; as JSON. */}}
{{- define "baton.routerSettings" -}}
{{- $settings := dict "host" .Values.listen "port" (int .Values.ports.http) -}}
{{- if .Values.tls.router.enabled -}}
{{- $_ := set $settings "tls_certificate" "/etc/baton-tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/etc/baton-tls/tls.key" -}}
{{- end -}}
{{- if include "baton.hasTenants" . -}}
{{- $_ := set $settings "tenants_file" (printf "/etc/baton-tenants/%s" .Values.auth.secretKey) -}}
{{- else -}}
{{- $_ := set $settings "allow_open_http" true -}}
{{- end -}}
{{- if .Values.router.batches.claimName -}}
{{- $_ := set $settings "batch_folder" "/var/lib/baton-batches" -}}
{{- end -}}
{{- merge $settings (deepCopy .Values.router.settings) | toJson -}}
{{- end -}}

{{- define "baton.hasTenants" -}}
{{- if or .Values.auth.tenants .Values.auth.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "baton.routerVolumes" -}}
{{- if include "baton.hasTenants" . }}
- name: tenants
  secret:
    secretName: {{ include "baton.tenantsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- if .Values.tls.router.enabled }}
- name: router-tls
  secret:
    secretName: {{ include "baton.routerTlsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.router.batches.claimName }}
- name: batches
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- end -}}

{{- define "baton.routerMounts" -}}
{{- if include "baton.hasTenants" . }}
- name: tenants
  mountPath: /etc/baton-tenants
  readOnly: true
{{- end }}
{{- if .Values.tls.router.enabled }}
- name: router-tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- if .Values.router.batches.claimName }}
- name: batches
  mountPath: /var/lib/baton-batches
{{- end }}
{{- end -}}
