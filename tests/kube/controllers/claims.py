"""The PersistentVolumeClaim controller binds every claim immediately, because a claim's folder can
be created on any node."""

from tests.kube.api import Api
from tests.kube.kinds import CLAIM
from tests.kube.pods import phase


def reconcile(api: Api) -> None:
    for claim in api.store.all(CLAIM):
        if phase(claim) != "Bound":
            claim["status"] = {
                "phase": "Bound",
                "capacity": dict(claim["spec"]["resources"]["requests"]),
                "accessModes": claim["spec"]["accessModes"],
            }
            api.set_status(CLAIM, claim)
