"""Builds the routing table of services: the addresses of DNS names, and the ready pods of each
service port."""

from tests.kube.api import Api
from tests.kube.controllers.endpoints import backends, gets_traffic, port_at
from tests.kube.kinds import SERVICE, Object
from tests.kube.pods import is_being_deleted

DOMAIN = "svc.cluster.local"

Table = dict[str, dict[str, list[str]]]
"""``ports`` maps each service's address:port to the address:port of each of its pods; ``names``
maps full DNS names to addresses."""


def routes(api: Api, api_server: str) -> Table:
    """Return the routes of all services. ``api_server`` is the API server's address."""
    ports: dict[str, list[str]] = {}
    names = {f"kubernetes.default.{DOMAIN}": [api_server]}
    for service in api.store.all(SERVICE):
        if is_being_deleted(service):
            continue
        pods = [pod for pod in backends(api, service) if gets_traffic(service, pod)]
        ports |= _ports(service, pods)
        names |= _names(service, pods)
    return {"ports": ports, "names": names}


def _ports(service: Object, pods: list[Object]) -> dict[str, list[str]]:
    address = service["spec"].get("clusterIP", "None")
    if address == "None":
        return {}
    return {
        f"{address}:{port['port']}": [_place(pod, port) for pod in pods]
        for port in service["spec"].get("ports") or []
        if port["protocol"] == "TCP"
    }


def _place(pod: Object, port: Object) -> str:
    return f"{pod['status']['podIP']}:{port_at(pod, port)}"


def _names(service: Object, pods: list[Object]) -> dict[str, list[str]]:
    """Return the addresses of a service by DNS name and, if the service is headless, those of its
    pods with host names."""
    metadata, spec = service["metadata"], service["spec"]
    own = f"{metadata['name']}.{metadata['namespace']}.{DOMAIN}"
    if spec.get("clusterIP", "None") != "None":
        return {own: [spec["clusterIP"]]}
    names = {own: [pod["status"]["podIP"] for pod in pods]} if pods else {}
    for pod in pods:
        if pod["spec"].get("subdomain") == metadata["name"] and pod["spec"].get("hostname"):
            names[f"{pod['spec']['hostname']}.{own}"] = [pod["status"]["podIP"]]
    return names
