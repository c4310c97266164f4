{{/*
Objects that need a CRD. In a cluster that lacks the CRD, the object is left out and NOTES.txt tells how to install the CRD,
or the chart refuses the values if no pod could run without the object.
*/}}

{{/*
Whether the cluster has a kind (like "ray.io/v1/RayCluster"), or there is no cluster, so that everything is rendered:
"true", or "". With access to a cluster, Helm knows the kinds of all API groups, and so "v1/Pod". Takes root and api.
*/}}
{{- define "baton.hasApi" -}}
{{- $apis := .root.Capabilities.APIVersions -}}
{{- if or ($apis.Has .api) (not ($apis.Has "v1/Pod")) -}}true{{- end -}}
{{- end -}}

{{/* The command that installs the CRDs of an API group, as text for a message. Takes the group. */}}
{{- define "baton.crdCommand" -}}
{{- $helm := "helm install %s --repo %s -n %s --create-namespace" -}}
{{- $commands := dict
      "ray.io" (printf $helm "kuberay-operator kuberay-operator" "https://ray-project.github.io/kuberay-helm" "kuberay")
      "keda.sh" (printf $helm "keda keda" "https://kedacore.github.io/charts" "keda")
      "cert-manager.io" (printf $helm "cert-manager cert-manager" "https://charts.jetstack.io" "cert-manager --set crds.enabled=true")
      "gateway.networking.k8s.io" "kubectl apply --server-side -f https://github.com/kubernetes-sigs/gateway-api/releases/latest/download/standard-install.yaml"
      "monitoring.coreos.com" (printf $helm "prometheus-operator-crds prometheus-operator-crds" "https://prometheus-community.github.io/helm-charts" "monitoring") -}}
{{- get $commands . -}}
{{- end -}}

{{/* Missing CRDs without which no pod could run. */}}
{{- define "baton.crdProblems" -}}
{{- $tls := .Values.tls -}}
{{- $needs := list
      (list .Values.ray.enabled "ray.enabled" "ray.io/v1/RayCluster" "or set ray.enabled=false for pools as Deployments")
      (list (and $tls.router.enabled (not $tls.router.existingSecret)) "tls.router.enabled" "cert-manager.io/v1/Certificate" "or set tls.router.existingSecret")
      (list (and $tls.rpc.enabled (not $tls.rpc.existingSecret)) "tls.rpc.enabled" "cert-manager.io/v1/Certificate" "or set tls.rpc.existingSecret") -}}
{{- range $needs -}}
{{- $api := index . 2 -}}
{{- if and (index . 0) (not (include "baton.hasApi" (dict "root" $ "api" $api))) }}
{{ index . 1 }} needs {{ base $api }}s, which this Kubernetes cluster doesn't know: install them with `{{ include "baton.crdCommand" (splitList "/" $api | first) }}`, {{ index . 3 }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A warning for each requested object that was left out; as a JSON list. */}}
{{- define "baton.crdWarnings" -}}
{{- $wanted := list
      (list .Values.router.httpRoute.enabled "router.httpRoute" "gateway.networking.k8s.io/v1/HTTPRoute")
      (list (eq (toString .Values.monitoring.podMonitor) "true") "monitoring.podMonitor" "monitoring.coreos.com/v1/PodMonitor")
      (list (eq (toString .Values.monitoring.serviceMonitor) "true") "monitoring.serviceMonitor" "monitoring.coreos.com/v1/ServiceMonitor")
      (list (eq (toString .Values.monitoring.rules) "true") "monitoring.rules" "monitoring.coreos.com/v1/PrometheusRule") -}}
{{- if not .Values.ray.enabled -}}
{{- range $key, $pool := include "baton.pools" . | fromJson -}}
{{- $wanted = append $wanted (list $pool.keda.enabled (printf "pools.%s.keda" $key) "keda.sh/v1alpha1/ScaledObject") -}}
{{- end -}}
{{- end -}}
{{- $warnings := list -}}
{{- range $wanted -}}
{{- $api := index . 2 -}}
{{- if and (index . 0) (not (include "baton.hasApi" (dict "root" $ "api" $api))) -}}
{{- $warnings = append $warnings (printf "%s was left out, because this Kubernetes cluster doesn't know %ss. Install them with `%s`, then upgrade this release." (index . 1) (base $api) (include "baton.crdCommand" (splitList "/" $api | first))) -}}
{{- end -}}
{{- end -}}
{{- $warnings | toJson -}}
{{- end -}}
