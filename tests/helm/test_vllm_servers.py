"""Tests pools whose pods have a vLLM server of their own (``values-vllm-stock.yaml``)."""

import pytest
from helm_python import HelmRenderError

from tests.helm.chart import COMMIT, Object, Pod, Release, make_values, render
from tests.helm.pod_security import violations

BASE = make_values(
    model__source="pvc",
    model__path="Qwen3-0.6B",
    model__pvc__claimName="models",
    pools__prefill__enabled=False,
    pools__decode__enabled=False,
    pools__mixed__role="mixed",
    pools__mixed__vllmServer__enabled=True,
)


def workers_of(release: Release) -> Pod:
    [pod] = [pod for pod in release.serving() if pod.role == "mixed"]
    return pod


def server_of(pod: Pod) -> Object:
    return next(each for each in pod.spec["initContainers"] if each["name"] == "vllm")


def test_the_server_runs_beside_the_worker_on_loopback() -> None:
    pod = workers_of(render(BASE | make_values(ports__http=8123)))
    server = server_of(pod)
    assert server["restartPolicy"] == "Always"
    assert server["command"] == ["vllm", "serve"]
    assert server["args"] == [
        "/models/Qwen3-0.6B", "--host=127.0.0.1", "--port=8123",
        "--served-model-name=Qwen3-0.6B", "--enable-prompt-tokens-details",
        "--shutdown-timeout=60",
    ]  # fmt: skip
    assert "ports" not in server
    variables = {each["name"]: each.get("value") for each in pod.main["env"]}
    assert variables["BATON_ATTACH"] == "mixed=http://127.0.0.1:8123"
    assert variables["BATON_MODEL"] == "/models/Qwen3-0.6B"
    assert not {"BATON_DEVICE", "BATON_THREADS"} & variables.keys()
    assert pod.main["image"].partition(":")[0] == "docker.io/library/baton-sidecar"
    assert violations(pod.spec) == []


def test_gpus_and_arguments_are_the_servers() -> None:
    own = make_values(
        model__source="hub",
        model__hub__id="Qwen/Qwen3-8B",
        model__hub__revision=COMMIT,
        pools__prefill__enabled=False,
        pools__decode__enabled=False,
        pools__mixed__role="mixed",
        pools__mixed__gpu__count=2,
        pools__mixed__vllmServer__enabled=True,
        pools__mixed__vllmServer__args=["--tensor-parallel-size=2"],
    )
    pod = workers_of(render(own))
    server = server_of(pod)
    assert server["image"] == "docker.io/vllm/vllm-openai:v0.32.0"
    assert server["args"][:2] == ["Qwen/Qwen3-8B", f"--revision={COMMIT}"]
    assert server["args"][-1] == "--tensor-parallel-size=2"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in pod.main["resources"]["limits"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"pools__mixed__role": "prefill"}, "set pools.mixed.role=mixed"),
        ({"model__source": "demo"}, "pools.mixed.vllmServer has no model"),
        ({"ray__enabled": True}, "pools.mixed.vllmServer does not work with ray.enabled"),
    ],
)
def test_what_a_server_lacks_is_told(values: Object, problem: str) -> None:
    own = {
        "model__source": "pvc",
        "model__pvc__claimName": "models",
        "pools__mixed__role": "mixed",
        "pools__mixed__vllmServer__enabled": True,
    }
    with pytest.raises(HelmRenderError, match=problem):
        render(make_values(**own | values))
