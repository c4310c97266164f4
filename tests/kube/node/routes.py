"""Where services lead at this moment: addresses of names, and ready pods behind each port."""

from tests.kube.api import Api
from tests.kube.controllers.endpoints import backends, is_open, port_at
from tests.kube.kinds import SERVICE, Object
from tests.kube.pods import is_leaving

DOMAIN = "svc.cluster.local"

Table = dict[str, dict[str, list[str]]]
"""``ports``: address:port of a service → those of its pods. ``names``: full names → addresses."""


def routes(api: Api, node: str) -> Table:
    """Of all services. ``node`` is where the API server is."""
    ports: dict[str, list[str]] = {}
    names = {f"kubernetes.default.{DOMAIN}": [node]}
    for service in api.store.all(SERVICE):
        if is_leaving(service):
            continue
        pods = [pod for pod in backends(api, service) if is_open(service, pod)]
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
    """The service's own, and those of pods that have host names in it."""
    metadata, spec = service["metadata"], service["spec"]
    own = f"{metadata['name']}.{metadata['namespace']}.{DOMAIN}"
    if spec.get("clusterIP", "None") != "None":
        return {own: [spec["clusterIP"]]}
    names = {own: [pod["status"]["podIP"] for pod in pods]} if pods else {}
    for pod in pods:
        if pod["spec"].get("subdomain") == metadata["name"] and pod["spec"].get("hostname"):
            names[f"{pod['spec']['hostname']}.{own}"] = [pod["status"]["podIP"]]
    return names
