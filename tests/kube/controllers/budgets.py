"""The PodDisruptionBudget controller computes how many pods may currently be evicted."""

from tests.kube.api import Api
from tests.kube.controllers.deployment import resolve_count
from tests.kube.kinds import BUDGET, DEPLOYMENT, POD, REPLICA_SET, STATEFUL_SET, Object
from tests.kube.pods import FINISHED, is_being_deleted, owner_of, phase
from tests.kube.selectors import selects
from tests.kube.subresources import is_ready

KINDS = {each.kind: each for each in (REPLICA_SET, STATEFUL_SET, DEPLOYMENT)}


def reconcile(api: Api) -> None:
    for budget in api.store.all(BUDGET):
        _reconcile(api, budget)


def _reconcile(api: Api, budget: Object) -> None:
    selector = budget["spec"].get("selector")
    pods = api.store.all(
        POD,
        budget["metadata"]["namespace"],
        lambda pod: (
            selects(selector, pod["metadata"].get("labels") or {}) and phase(pod) not in FINISHED
        ),
    )
    expected = _expected(api, pods)
    healthy = sum(is_ready(pod) and not is_being_deleted(pod) for pod in pods)
    desired = _desired(budget["spec"], expected)
    budget["status"] = {
        "observedGeneration": budget["metadata"]["generation"],
        "expectedPods": expected,
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": max(healthy - desired, 0) if expected else 0,
    }
    api.set_status(BUDGET, budget)


def _desired(spec: Object, expected: int) -> int:
    if "minAvailable" in spec:
        return resolve_count(spec["minAvailable"], expected, up=True)
    return max(expected - resolve_count(spec.get("maxUnavailable", 0), expected, up=True), 0)


def _expected(api: Api, pods: list[Object]) -> int:
    """Return the total number of replicas of the pods' controllers; each controller counts once. A
    pod without a controller counts as one replica."""
    controllers: dict[str, int] = {}
    alone = 0
    for pod in pods:
        top = _top(api, pod)
        if top is None:
            alone += 1
        else:
            controllers[top["metadata"]["uid"]] = top["spec"]["replicas"]
    return alone + sum(controllers.values())


def _top(api: Api, found: Object) -> Object | None:
    """Return the topmost controller of an object, such as the Deployment of a ReplicaSet's pod;
    None if the object has no controller."""
    reference = owner_of(found)
    if reference is None or reference["kind"] not in KINDS:
        return None
    namespace = found["metadata"]["namespace"]
    owner = api.store.find(KINDS[reference["kind"]], namespace, reference["name"])
    return (_top(api, owner) or owner) if owner else None
