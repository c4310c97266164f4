{{/* Valkey's configuration without the password. Its content is rewritten all the time, so nothing is saved to disk. */}}
{{- define "baton.redisConfig" -}}
port 6379
dir /data
save ""
appendonly no
maxmemory {{ include "baton.bytes" .Values.redis.maxMemory }}
maxmemory-policy volatile-lru
{{- end -}}
