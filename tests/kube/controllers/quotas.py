"""The ResourceQuota controller publishes how much of each quota is used."""

from tests.kube.api import Api
from tests.kube.kinds import QUOTA
from tests.kube.quantities import quantity_text
from tests.kube.quotas import quota_usage


def reconcile(api: Api) -> None:
    for quota in api.store.all(QUOTA):
        used = quota_usage(api.store, quota)
        quota["status"] = {
            "hard": quota["spec"].get("hard") or {},
            "used": {key: quantity_text(value) for key, value in used.items()},
        }
        api.set_status(QUOTA, quota)
