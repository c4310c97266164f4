{{/*
Names. The longest suffix of the full name is a pool's name (20 characters at most) with its hyphen, which
leaves 42 of the 63 characters that a Service's name may have; a StatefulSet's revision label is 11 characters longer
than its name, which fits. A release may have dots in its name, a Service may not.
*/}}
{{- define "baton.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- else if contains $name $release -}}
{{- $release | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" ($release | trunc (int (sub 41 (len $name))) | trimSuffix "-") $name | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The cluster's name: the prefix of its keys in Redis, and the label by which its pods are found. */}}
{{- define "baton.cluster" -}}
{{- .Values.cluster | default (include "baton.fullname" .) -}}
{{- end -}}

{{/* The ServiceAccount of all pods except the conductor's. */}}
{{- define "baton.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "baton.fullname" .) -}}
{{- end -}}

{{- define "baton.conductorServiceAccountName" -}}
{{- .Values.conductor.serviceAccount.name | default (printf "%s-conductor" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.secretName" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-secrets" (include "baton.fullname" .)) -}}
{{- end -}}

{{/*
Whether the generated Secret is kept when the release is uninstalled: "true", or "". It has the tenant secret, without which
nothing is found in the store's volumes, so it is kept if they are.
*/}}
{{- define "baton.keepsSecrets" -}}
{{- $disk := .Values.kvstore.disk -}}
{{- $isKept := and .Values.kvstore.enabled (not .Values.ray.enabled) $disk.enabled (eq $disk.whenDeleted "Retain") -}}
{{- if and $isKept (not .Values.secrets.existingSecret) -}}true{{- end -}}
{{- end -}}

{{- define "baton.tenantsSecretName" -}}
{{- .Values.auth.existingSecret | default (printf "%s-tenants" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.routerTlsSecretName" -}}
{{- .Values.tls.router.existingSecret | default (printf "%s-router-tls" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.rpcTlsSecretName" -}}
{{- .Values.tls.rpc.existingSecret | default (printf "%s-rpc-tls" (include "baton.fullname" .)) -}}
{{- end -}}

{{/* The URL of the router for clients in this Kubernetes cluster. */}}
{{- define "baton.url" -}}
{{- $scheme := ternary "https" "http" .Values.tls.router.enabled -}}
{{- $port := int .Values.router.service.port -}}
{{- $usual := ternary 443 80 .Values.tls.router.enabled -}}
{{- $scheme }}://{{ include "baton.fullname" . }}-router.{{ .Release.Namespace }}{{ if ne $port $usual }}:{{ $port }}{{ end }}
{{- end -}}
