{{/*
Secrets as files, one per setting and named like it, which Baton reads from the folder BATON_SECRETS_DIRECTORY. Unlike
environment variables, files are not inherited by other processes, and not shown by tools that list a process's environment.
*/}}
{{- define "baton.secretsPath" -}}/etc/baton-secrets{{- end -}}

{{/* Takes root and role. Only routers get the tenant secret and the key of the admin API. */}}
{{- define "baton.secretsVolume" -}}
{{- $redis := .root.Values.redis -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "baton.secretName" .root }}
          items:
            - {key: cluster-secret, path: cluster_secret}
            {{- if eq .role "router" }}
            - {key: tenant-secret, path: tenant_secret}
            - {key: admin-key, path: admin_key}
            {{- end }}
            {{- if $redis.enabled }}
            - {key: redis-password, path: redis_password}
            {{- end }}
      {{- with $redis.external.existingSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: {{ $redis.external.urlKey }}, path: redis_url}
      {{- end }}
{{- end -}}

{{- define "baton.secretsMount" -}}
- name: secrets
  mountPath: {{ include "baton.secretsPath" .root }}
  readOnly: true
{{- end -}}
