"""Tests pools whose pods have a vLLM server of their own (``values-vllm.yaml``)."""

import json
from typing import Any

import pytest
from helm_python import HelmRenderError

from attached_worker.vllm_protocol import CONNECTOR
from tests.helm.chart import (
    COMMIT,
    Object,
    Pod,
    Release,
    make_values,
    render,
    values_of,
    with_value,
)
from tests.helm.pod_security import violations
from tests.helm.test_problems import problems

BASE = make_values(
    model__source="pvc",
    model__path="Qwen3-0.6B",
    model__pvc__claimName="models",
    pools__prefill__enabled=False,
    pools__decode__enabled=False,
    pools__mixed__role="mixed",
    pools__mixed__vllmServer__enabled=True,
)
WHERE_EVENTS_ARE = "?kv_events=ipc:///run/vllm/events&kv_replay=ipc:///run/vllm/replay"
EVENTS = "--kv-events-config=" + json.dumps(
    {
        "enable_kv_cache_events": True,
        "endpoint": "ipc:///run/vllm/events",
        "publisher": "zmq",
        "replay_endpoint": "ipc:///run/vllm/replay",
    },
    separators=(",", ":"),
)


def split(**values: Any) -> Object:
    """Return values of prefill and decode pools of servers, changed as in ``make_values``."""
    changed = values_of("vllm-pools")
    for path, value in values.items():
        changed = with_value(changed, path.replace("__", "."), value)
    return changed


def workers_of(release: Release, role: str = "mixed") -> Pod:
    [pod] = [pod for pod in release.serving() if pod.role == role]
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
        '--structured-outputs-config={"backend":"guidance"}', "--shutdown-timeout=60", EVENTS,
    ]  # fmt: skip
    assert "ports" not in server
    variables = {each["name"]: each.get("value") for each in pod.main["env"]}
    assert variables["BATON_ATTACH"] == "mixed=http://127.0.0.1:8123" + WHERE_EVENTS_ARE
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


def test_servers_of_mixed_pools_exchange_no_kv() -> None:
    server = server_of(workers_of(render(BASE)))
    assert not [arg for arg in server["args"] if "kv-transfer" in arg]
    assert not [each["name"] for each in server["env"] if "NIXL" in each["name"]]


@pytest.mark.parametrize(
    ("device", "config"),
    [("cpu", CONNECTOR | {"kv_buffer_device": "cpu"}), ("cuda", CONNECTOR)],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_of_prefill_and_decode_pools_exchange_kv(
    role: str, device: str, config: Object
) -> None:
    """A server names its pod's address to the others."""
    pod = workers_of(render(split(poolDefaults__image=device)), role)
    server = server_of(pod)
    flag, _, given = server["args"][-1].partition("=")
    assert (flag, json.loads(given)) == ("--kv-transfer-config", config)
    variables = {each["name"]: each.get("value") or each["valueFrom"] for each in server["env"]}
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    attach = f"{role}=http://127.0.0.1:8000" + WHERE_EVENTS_ARE
    assert {"name": "BATON_ATTACH", "value": attach} in pod.main["env"]


@pytest.mark.parametrize(
    "own",
    [
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config", "{}"],
        ["--kv-transfer-config.kv_connector=NixlConnector"],
    ],
)
def test_a_pools_own_kv_transfer_config_is_the_only_one(own: list[str]) -> None:
    pod = workers_of(render(split(pools__decode__vllmServer__args=own)), "decode")
    assert server_of(pod)["args"][6:] == ["--shutdown-timeout=60", EVENTS, *own]


def test_both_containers_of_a_pod_have_the_sockets_of_kv_events_and_no_other_pod() -> None:
    for role in ("prefill", "decode"):
        pod = workers_of(render(split()), role)
        mount = {"name": "vllm-events", "mountPath": "/run/vllm"}
        assert mount in server_of(pod)["volumeMounts"] and mount in pod.main["volumeMounts"]
        volume = {"name": "vllm-events", "emptyDir": {"sizeLimit": "1Mi"}}
        assert volume in pod.spec["volumes"]


@pytest.mark.parametrize("own", [["--kv_events_config", "{}"], ["--data-parallel-size=2"]])
def test_a_server_with_events_of_its_own_or_several_ranks_is_asked_for_them(own: list[str]) -> None:
    """For a second rank, vLLM refuses an endpoint that is a socket file."""
    pod = workers_of(render(split(pools__decode__vllmServer__args=own)), "decode")
    args = server_of(pod)["args"]
    assert EVENTS not in args and args[-len(own) :] == own
    assert {"name": "BATON_ATTACH", "value": "decode=http://127.0.0.1:8000"} in pod.main["env"]


def test_vllms_container_mounts_volumes_of_the_pool() -> None:
    mount = {"name": "plugin", "mountPath": "/plugin"}
    own = split(
        pools__decode__extraVolumes=[{"name": "plugin", "configMap": {"name": "plugin"}}],
        pools__decode__vllmServer__volumeMounts=[mount],
    )
    pod = workers_of(render(own), "decode")
    assert mount in server_of(pod)["volumeMounts"]
    assert mount not in pod.main["volumeMounts"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model__source": "demo"}, "pools.mixed.vllmServer has no model"),
        ({"ray__enabled": True}, "pools.mixed.vllmServer does not work with ray.enabled"),
        ({"settings__engine": "vllm"}, "on Kubernetes set pools.mixed.vllmServer.enabled"),
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


NO_PREFILL = (
    "pools.decode.vllmServer exchanges KV with other vLLM servers only, and Qwen3-0.6B has no"
    " prefill pool of them (cpu): add one with vllmServer.enabled=true, or set"
    " pools.decode.role=mixed"
)
OPEN = (
    "pools.{0}.vllmServer exchanges KV with whoever reaches its pods: set"
    " networkPolicy.enabled=true, or nixl.privateNetwork=true if only this release reaches them"
)
FABRIC = (
    "pools.decode.vllmServer exchanges KV with whoever is on the network, and NetworkPolicies apply"
    " neither to RDMA nor to the node's network: set nixl.privateNetwork=true if only this release"
    " is on it"
)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (split(), []),
        (split(pools__prefill__vllmServer__enabled=False), [NO_PREFILL]),
        (
            split(
                models__other={},
                pools__prefill__modelName="other",
                pools__more={"role": "decode", "modelName": "other"},
                pools__first={"role": "prefill", "vllmServer": {"enabled": False}},
            ),
            [NO_PREFILL],
        ),
        (split(networkPolicy__enabled=False), [OPEN.format("decode"), OPEN.format("prefill")]),
        (split(networkPolicy__enabled=False, nixl__privateNetwork=True), []),
        (split(pools__decode__rdma__enabled=True), [FABRIC]),
        (split(pools__decode__rdma__hostNetwork=True), [FABRIC]),
        (split(pools__decode__rdma__enabled=True, nixl__privateNetwork=True), []),
        (
            split(ports__ops=5600, pools__more={"role": "mixed"}),
            [
                f"ports.ops is 5600, which is the port of NixlConnector in pools.{pool}: set"
                " another one"
                for pool in ("decode", "prefill")
            ],
        ),
    ],
)  # fmt: skip
def test_servers_that_exchange_kv_need_each_other_and_a_private_network(
    values: Object, found: list[str]
) -> None:
    assert problems(values) == found


def test_servers_on_different_devices_exchange_no_kv() -> None:
    [decode, prefill] = problems(split(pools__prefill__image="cuda"))
    assert decode == NO_PREFILL
    assert "pools.prefill.vllmServer" in prefill and "no decode pool of them (cuda)" in prefill
