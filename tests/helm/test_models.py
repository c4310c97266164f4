"""Tests a release with several models: what its pools and its router get."""

from typing import Any

import pytest

from tests.helm.chart import COMMIT, Object, make_values, render

TWO = make_values(
    model__source="pvc",
    model__pvc__claimName="weights",
    model__path="llama/8b",
    models__chat={
        "source": "hub",
        "hub": {"id": "Qwen/Qwen3-8B", "revision": COMMIT, "existingSecret": "token"},
    },
    models__code={"source": "image", "path": "code", "image": {"reference": "models/code:1"}},
    **{
        f"pools__{role}-{name}": {"role": role, "modelName": name}
        for name in ("chat", "code")
        for role in ("prefill", "decode")
    },
)


def pod(values: Object, name: str) -> Object:
    owners = {each["metadata"]["name"]: each for each in render(values).all("Deployment")}
    spec: Object = owners[f"demo-baton-{name}"]["spec"]["template"]["spec"]
    return spec


def environment(spec: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in spec["containers"][0]["env"]}


def mounts(spec: Object) -> dict[str, str]:
    """Return the folders of all volumes with models, by volume."""
    found = spec["containers"][0]["volumeMounts"]
    assert {each["name"] for each in found} <= {each["name"] for each in spec["volumes"]}
    return {
        each["name"]: each["mountPath"]
        for each in found
        if each["name"].startswith(("model", "hub"))
    }


@pytest.mark.parametrize(
    ("pool", "model", "name", "mounted"),
    [
        ("decode", "/models/llama/8b", "", {"model": "/models"}),
        (
            "prefill-chat",
            f"Qwen/Qwen3-8B@{COMMIT}",
            "chat",
            {"hub-cache": "/var/cache/huggingface", "hub-token": "/etc/baton-hub"},
        ),
        ("decode-code", "/models/code", "code", {"model": "/models"}),
    ],
)
def test_each_pool_has_the_model_that_it_names(
    pool: str, model: str, name: str, mounted: dict[str, str]
) -> None:
    spec = pod(TWO, pool)
    variables = environment(spec)
    assert variables["BATON_MODEL"] == model
    assert variables.get("BATON_SERVED_MODEL_NAME", "") == name
    assert mounts(spec) == mounted


def test_the_router_has_all_models() -> None:
    spec = pod(TWO, "router")
    variables = environment(spec)
    models = dict(each.split("=") for each in variables["BATON_MODELS"].split(","))
    assert list(models) == ["8b", "chat", "code"]  # the one without a name is the default
    assert models["8b"] == "/models/llama/8b"
    assert models["chat"] == f"Qwen/Qwen3-8B@{COMMIT}"
    assert models["code"] == "/other-models/code/code"
    assert "BATON_MODEL" not in variables
    folders = mounts(spec)
    assert folders["model"] == "/models"
    assert folders["hub-cache"] == "/var/cache/huggingface"
    assert "/other-models/code" in folders.values()


def test_a_release_whose_pools_all_name_a_model_has_no_other() -> None:
    named: dict[str, Any] = {
        "models__chat": {"source": "hub", "hub": {"id": "a/b", "revision": COMMIT}},
        "pools__prefill__modelName": "chat",
        "pools__decode__modelName": "chat",
    }
    assert environment(pod(make_values(**named), "router"))["BATON_MODELS"] == f"chat=a/b@{COMMIT}"


def test_a_pool_with_other_weights_of_the_model_keeps_its_name() -> None:
    values = make_values(
        model__source="hub",
        model__hub={"id": "a/b", "revision": COMMIT},
        pools__decode__model__hub={"id": "a/b-fp8", "revision": COMMIT[::-1]},
    )
    variables = environment(pod(values, "decode"))
    assert (variables["BATON_MODEL"], variables["BATON_SERVED_MODEL_NAME"]) == (
        f"a/b-fp8@{COMMIT[::-1]}",
        "b",
    )
    assert "BATON_SERVED_MODEL_NAME" not in environment(pod(values, "prefill"))
    assert "BATON_MODELS" not in environment(pod(values, "router"))
