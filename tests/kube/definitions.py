"""Creates CustomResourceDefinitions of the operators whose objects the chart can create."""

from tests.kube.api import Api
from tests.kube.kinds import DEFINITION

KINDS = {
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
    "ServiceMonitor": ("monitoring.coreos.com", "v1", "servicemonitors"),
    "PrometheusRule": ("monitoring.coreos.com", "v1", "prometheusrules"),
    "Certificate": ("cert-manager.io", "v1", "certificates"),
    "Issuer": ("cert-manager.io", "v1", "issuers"),
    "HTTPRoute": ("gateway.networking.k8s.io", "v1", "httproutes"),
    "ScaledObject": ("keda.sh", "v1alpha1", "scaledobjects"),
    "RayCluster": ("ray.io", "v1", "rayclusters"),
}
MONITORING = ("PodMonitor", "ServiceMonitor", "PrometheusRule")


def define(api: Api, *kinds: str) -> None:
    for kind in kinds:
        group, version, plural = KINDS[kind]
        api.create(
            DEFINITION,
            {
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural},
                    "versions": [{"name": version, "served": True, "storage": True}],
                },
            },
        )
