"""The HorizontalPodAutoscaler controller. The cluster has no metrics, so the controller does only
what the real one does without them: it brings each target's number of replicas between
``minReplicas`` and ``maxReplicas``."""

from tests.kube.api import Api
from tests.kube.kinds import AUTOSCALER, DEPLOYMENT, STATEFUL_SET, Object
from tests.kube.request import Request
from tests.kube.subresources import change_scale

KINDS = {each.kind: each for each in (DEPLOYMENT, STATEFUL_SET)}
MANAGER = "kube-controller-manager"


def reconcile(api: Api) -> None:
    for autoscaler in api.store.all(AUTOSCALER):
        _reconcile(api, autoscaler["metadata"]["namespace"], autoscaler["spec"])


def _reconcile(api: Api, namespace: str, spec: Object) -> None:
    """Bring the number of replicas of an autoscaler's target between ``minReplicas`` and
    ``maxReplicas``. As in Kubernetes, a target with zero replicas is not scaled."""
    target = spec["scaleTargetRef"]
    kind, name = KINDS[target["kind"]], target["name"]
    found = api.store.find(kind, namespace, name)
    if found is None or found["spec"]["replicas"] == 0:
        return
    now = found["spec"]["replicas"]
    wanted = min(max(now, spec.get("minReplicas", 1)), spec["maxReplicas"])
    if wanted != now:
        body = {"spec": {"replicas": wanted}}
        change_scale(
            api, Request("update", kind, namespace, name, "scale", {}, body, manager=MANAGER)
        )
