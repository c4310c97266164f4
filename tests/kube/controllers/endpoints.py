"""The Endpoints and EndpointSlice controllers list the pods that are behind each service."""

from tests.kube.api import Api
from tests.kube.failures import Refused
from tests.kube.kinds import ENDPOINTS, POD, SERVICE, SLICE, Kind, Object
from tests.kube.pods import FINISHED, is_being_deleted, phase
from tests.kube.selectors import selects
from tests.kube.subresources import is_ready

SERVICE_NAME = "kubernetes.io/service-name"


def reconcile(api: Api) -> None:
    for service in api.store.all(SERVICE):
        if service["spec"].get("selector") and not is_being_deleted(service):
            pods = backends(api, service)
            _write(api, ENDPOINTS, endpoints(service, pods))
            _write(api, SLICE, endpoint_slice(service, pods))


def backends(api: Api, service: Object) -> list[Object]:
    """Return the service's pods that have an address and have not finished, including those that
    are being deleted."""
    selector = {"matchLabels": service["spec"]["selector"]}

    def is_backend(pod: Object) -> bool:
        return (
            selects(selector, pod["metadata"].get("labels") or {})
            and bool((pod.get("status") or {}).get("podIP"))
            and phase(pod) not in FINISHED
        )

    return api.store.all(POD, service["metadata"]["namespace"], is_backend)


def gets_traffic(service: Object, pod: Object) -> bool:
    """Return whether the service sends traffic to the pod: the pod is ready and not being deleted,
    or the service sets ``publishNotReadyAddresses``."""
    if service["spec"].get("publishNotReadyAddresses"):
        return True
    return is_ready(pod) and not is_being_deleted(pod)


def port_at(pod: Object, port: Object) -> int:
    """Return the pod's port number for a service port, or 0 if the pod has no port of that name."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for each in container.get("ports") or []:
            if each.get("name") == target:
                return int(each["containerPort"])
    return 0


def _metadata(service: Object, name: str) -> Object:
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": service["metadata"]["name"],
        "uid": service["metadata"]["uid"],
    }
    labels = {
        **(service["metadata"].get("labels") or {}),
        SERVICE_NAME: service["metadata"]["name"],
    }
    return {
        "name": name,
        "namespace": service["metadata"]["namespace"],
        "labels": labels,
        "ownerReferences": [owner],
    }


def _named(port: Object) -> Object:
    return {"name": port["name"]} if port.get("name") else {}


def endpoints(service: Object, pods: list[Object]) -> Object:
    """Return the Endpoints object, with one subset for each distinct set of resolved ports."""
    subsets: dict[str, Object] = {}
    for pod in pods:
        open_here = gets_traffic(service, pod)
        if is_being_deleted(pod) and not open_here:
            continue
        ports = [
            {**_named(port), "port": port_at(pod, port), "protocol": port["protocol"]}
            for port in service["spec"].get("ports") or []
        ]
        subset = subsets.setdefault(str(ports), {"ports": ports})
        where = "addresses" if open_here else "notReadyAddresses"
        subset.setdefault(where, []).append(_address(pod))
    metadata = _metadata(service, service["metadata"]["name"])
    return {"metadata": metadata, "subsets": list(subsets.values())}


def _address(pod: Object) -> Object:
    return {
        "ip": pod["status"]["podIP"],
        "nodeName": pod["spec"]["nodeName"],
        "targetRef": {
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "namespace": pod["metadata"]["namespace"],
            "uid": pod["metadata"]["uid"],
        },
    }


def endpoint_slice(service: Object, pods: list[Object]) -> Object:
    entries = []
    for pod in pods:
        leaving, ready = is_being_deleted(pod), is_ready(pod)
        always = bool(service["spec"].get("publishNotReadyAddresses"))
        conditions = {
            "ready": always or (ready and not leaving),
            "serving": ready,
            "terminating": leaving,
        }
        address = _address(pod)
        entries.append(
            {
                "addresses": [address["ip"]],
                "conditions": conditions,
                "nodeName": address["nodeName"],
                "targetRef": address["targetRef"],
            }
        )
    first = pods[0] if pods else {"spec": {"containers": []}}
    ports = [
        {**_named(port), "port": port_at(first, port), "protocol": port["protocol"]}
        for port in service["spec"].get("ports") or []
    ]
    metadata = _metadata(service, f"{service['metadata']['name']}-1")
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": entries, "ports": ports}


def _write(api: Api, kind: Kind, wanted: Object) -> None:
    metadata = wanted["metadata"]
    found = api.store.find(kind, metadata["namespace"], metadata["name"])
    if found is None:
        try:
            api.create(kind, wanted)
        except Refused:
            return  # the service's namespace is being deleted
    else:
        api.store.put(kind, {**found, **wanted, "metadata": found["metadata"]})
