"""The Job controller runs pods until enough have succeeded or too many have failed."""

from tests.kube.api import Api
from tests.kube.kinds import JOB, POD, Object
from tests.kube.pods import is_active, is_being_deleted, owned_by, phase, pod_from, set_condition
from tests.kube.store import deep_copy
from tests.kube.subresources import condition

NAME = "batch.kubernetes.io/job-name"


def reconcile(api: Api) -> None:
    for found in api.store.all(JOB):
        over = "True" in (condition(found, "Complete"), condition(found, "Failed"))
        if not is_being_deleted(found) and not over:
            _reconcile(api, found)


def _reconcile(api: Api, found: Object) -> None:
    pods, spec = owned_by(api, POD, found), found["spec"]
    succeeded = sum(phase(pod) == "Succeeded" for pod in pods)
    failed = sum(phase(pod) == "Failed" for pod in pods)
    active = sum(is_active(pod) for pod in pods)
    found["status"] = (found.get("status") or {}) | {
        "startTime": (found.get("status") or {}).get("startTime", api.timestamp()),
        "active": active,
        "ready": active,
        "succeeded": succeeded,
        "failed": failed,
    }
    if succeeded >= spec["completions"]:
        found["status"]["completionTime"] = api.timestamp()
        set_condition(found, "SuccessCriteriaMet", True, api.timestamp(), "CompletionsReached")
        set_condition(found, "Complete", True, api.timestamp(), "CompletionsReached")
    elif failed > spec["backoffLimit"]:
        set_condition(found, "Failed", True, api.timestamp(), "BackoffLimitExceeded")
    else:
        _start(api, found, min(spec["parallelism"], spec["completions"] - succeeded) - active)
    api.set_status(JOB, found)


def _start(api: Api, found: Object, count: int) -> None:
    for _ in range(count):
        pod = pod_from(deep_copy(found["spec"]["template"]), found)
        pod["metadata"]["generateName"] = f"{found['metadata']['name']}-"
        pod["metadata"]["labels"][NAME] = found["metadata"]["name"]
        api.create(POD, pod)
