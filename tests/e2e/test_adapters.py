"""Tests LoRA adapters on a cluster: those of the settings and those loaded at run time, beside the
base model, under traffic, and while a worker dies."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.lora_zoo import ATTENTION, make_adapter
from testkit.machine import pause
from testkit.model_zoo import make_model
from tests.exactness import reference_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PROMPT = list(range(3, 83))
TOKENS = 200
ROUNDS = 10
FIELDS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@dataclass
class Served:
    cluster: LocalCluster
    folders: dict[str, Path]
    answers: dict[str, list[int]]
    """The tokens of transformers and peft, by adapter; the base model is called ``model``."""

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, self.cluster.url + path, json=body, timeout=60)

    def load(self, name: str) -> httpx.Response:
        body = {"name": name, "path": str(self.folders[name])}
        return self.request("POST", "/admin/adapters", body)

    def complete(self, model: str, tokens: int = 24) -> list[int]:
        return self.cluster.complete(PROMPT, tokens, model=model, **FIELDS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    model = make_model(root / "model", "qwen3")
    folders = {
        "first": make_adapter(root / "first", model, seed=2),
        "second": make_adapter(root / "second", model, seed=3, rank=8, targets=ATTENTION),
        "third": make_adapter(root / "third", model, seed=4, rank=16, targets=("down_proj",)),
    }
    answers = {}
    for name, folder in {"model": None, **folders}.items():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if folder is not None:
            reference = PeftModel.from_pretrained(reference, folder).eval()
        answers[name] = reference_of(reference, PROMPT, TOKENS).tokens
    settings: dict[str, object] = {"adapters": f"first={folders['first']}", "max_lora_rank": 16}
    with local_cluster(model, prefill=1, decode=2, settings=settings) as cluster:
        yield Served(cluster, folders, answers)


def test_adapter_of_the_settings_answers_beside_the_base_model(served: Served) -> None:
    for name in ("model", "first", "model", "first"):
        assert served.complete(name) == served.answers[name][:24]
    loaded_on: list[str] = []
    while len(loaded_on) < 3:  # the test's timeout bounds this
        (listed,) = served.request("GET", "/admin/adapters").json()["adapters"]
        assert (listed["name"], listed["path"], listed["errors"]) == ("first", None, {})
        loaded_on = listed["loaded_on"]
    assert loaded_on == ["decode-0", "decode-1", "prefill-0"]
    assert served.request("DELETE", "/admin/adapters/first").status_code == 409
    assert "adapter first: loaded" in served.cluster.baton("status").stdout


def test_adapter_is_loaded_and_unloaded_at_run_time(served: Served) -> None:
    assert served.load("second").json()["errors"] == {}
    models = served.request("GET", "/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in models] == [
        ("model", None),
        ("first", "model"),
        ("second", "model"),
    ]
    assert served.complete("second") == served.answers["second"][:24]
    body = {"prompt": PROMPT, "max_tokens": 1, "model": "second"}
    assert served.request("POST", "/v1/completions", body).json()["model"] == "second"
    assert served.request("DELETE", "/admin/adapters/second").json()["deleted"]
    assert served.request("POST", "/v1/completions", body).status_code == 404
    assert served.request("DELETE", "/admin/adapters/second").status_code == 404


def test_vllm_names_of_the_routes(served: Served) -> None:
    body = {"lora_name": "third", "lora_path": str(served.folders["third"])}
    assert served.request("POST", "/v1/load_lora_adapter", body).status_code == 200
    assert served.complete("third") == served.answers["third"][:24]
    unload = {"lora_name": "third"}
    assert served.request("POST", "/v1/unload_lora_adapter", unload).status_code == 200
    assert served.request("POST", "/v1/unload_lora_adapter", unload).status_code == 404


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"name": "x", "path": "relative"}, "must be absolute"),
        ({"name": "x", "path": "/nowhere"}, "adapter_config.json: the file is missing"),
        ({"name": "-", "path": "/nowhere"}, "the name must begin"),
        ({"name": "model", "path": "/nowhere"}, "is the name of a model"),
        ({"name": "x"}, "the body must be like"),
    ],
)
def test_invalid_requests_are_refused(served: Served, body: Any, reason: str) -> None:
    response = served.request("POST", "/admin/adapters", body)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_folder_that_workers_refuse_is_reported(served: Served, tmp_path: Path) -> None:
    """The files change between the router's check and the workers' reading, so that these
    refuse them."""
    folder = make_adapter(tmp_path / "changing", served.folders["first"].parent / "model", seed=9)
    served.folders["changing"] = folder
    served.load("changing")
    served.request("DELETE", "/admin/adapters/changing")
    (folder / "adapter_config.json").write_text("{}")
    response = served.load("changing")
    assert (response.status_code, "peft_type" in response.text) == (400, True)


def test_adapters_come_and_go_under_traffic(served: Served) -> None:
    """Clients keep asking for the base model and the adapter of the settings, while others are
    loaded, used and unloaded."""
    failures: list[str] = []
    stop = threading.Event()

    def ask(name: str) -> None:
        while not stop.is_set():
            try:
                if served.complete(name) != served.answers[name][:24]:
                    failures.append(f"{name}: another answer")
            except Exception as error:
                failures.append(f"{name}: {error}")

    threads = [threading.Thread(target=ask, args=[name]) for name in ("model", "first")]
    for thread in threads:
        thread.start()
    try:
        for number in range(int(os.environ.get("ADAPTER_ROUNDS", ROUNDS))):
            name = ("second", "third")[number % 2]
            assert served.load(name).json()["loaded_on"]
            assert served.complete(name) == served.answers[name][:24]
            assert served.request("DELETE", f"/admin/adapters/{name}").status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_adapters_survive_the_loss_of_redis(served: Served) -> None:
    """The embedded Redis keeps nothing on disk. The workers write the list of adapters again."""
    assert served.load("second").json()["loaded_on"]
    (redis,) = served.cluster.processes("redis")
    os.kill(redis["pid"], signal.SIGKILL)
    restarted = False
    while not restarted:  # the test's timeout bounds this
        assert served.complete("second") == served.answers["second"][:24]
        (redis,) = served.cluster.processes("redis")
        restarted = redis["restarts"] > 0 and redis["state"] == "serving"
    for _ in range(20):  # longer than routers keep the adapters of a Redis that lost its data
        assert served.complete("second") == served.answers["second"][:24]
        pause(0.5)
    listed = served.request("GET", "/admin/adapters").json()["adapters"]
    assert [each["name"] for each in listed] == ["first", "second"]
    assert served.request("DELETE", "/admin/adapters/second").status_code == 200


def test_stream_with_an_adapter_continues_when_its_worker_dies(served: Served) -> None:
    body = {
        "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "return_token_ids": True,
        "model": "first", **FIELDS,
    }  # fmt: skip
    tokens: list[int] = []
    url = served.cluster.url + "/v1/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
        request_id = answer.headers["x-baton-request-id"]
        killed = False
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
            if len(tokens) >= 20 and not killed:
                killed = True
                worker = served.cluster.get(f"/admin/requests/{request_id}")["decode"]["id"]
                (process,) = [p for p in served.cluster.status()["processes"] if p["id"] == worker]
                os.kill(process["pid"], signal.SIGKILL)
    assert killed
    assert tokens == served.answers["first"]


def test_three_adapters_with_two_models(served: Served, tmp_path: Path) -> None:
    """All at once, from several clients, each answer is the one that it would be alone. An adapter
    of the settings belongs to the first model, unless another one is named."""
    root = served.folders["first"].parent
    other = make_model(tmp_path / "other", "llama", seed=5)
    fourth = make_adapter(tmp_path / "fourth", other, seed=6)
    names = ["model", "first", "second", "other", "fourth"]
    adapters = f"first={root / 'first'},second={root / 'second'},fourth=other:{fourth}"
    settings: dict[str, object] = {
        "models": f"model={root / 'model'},other={other}",
        "adapters": adapters,
    }
    with local_cluster(prefill=1, decode=1, settings=settings) as cluster:

        def complete(name: str) -> list[int]:
            return cluster.complete(PROMPT, 48, model=name, **FIELDS)

        alone = {name: complete(name) for name in names}
        assert len({tuple(tokens) for tokens in alone.values()}) == len(names)
        for name in ("model", "first", "second"):
            assert alone[name] == served.answers[name][:48]
        with ThreadPoolExecutor(10) as pool:
            together = list(pool.map(complete, names * 6))
        assert together == [alone[name] for name in names * 6]
        listed = cluster.get("/v1/models")["data"]
        parents = {each["id"]: each.get("parent") for each in listed}
        assert parents == {
            "model": None,
            "other": None,
            "first": "model",
            "second": "model",
            "fourth": "other",
        }
