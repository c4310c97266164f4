"""Tests a cluster that serves two models: answers, a resize of one model's pool under traffic, and
that a model without workers does not hurt the other."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.model_zoo import make_model
from tests.exactness import reference_of

pytestmark = pytest.mark.timeout(300)

FIELDS = {"temperature": 0, "ignore_eos": True}
PROMPTS = [[5 + (7 * number + place) % 200 for place in range(40)] for number in range(6)]
TOKENS = 24


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "first": make_model(folder / "first", "qwen3", seed=1),
        "second": make_model(folder / "second", "llama", seed=2),
    }


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The answers of each model in transformers."""
    answers = {}
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        answers[name] = [reference_of(model, prompt, TOKENS).tokens for prompt in PROMPTS]
    return answers


@pytest.fixture(scope="module")
def both(paths: dict[str, Path]) -> Iterator[LocalCluster]:
    models = ",".join(f"{name}={path}" for name, path in paths.items())
    with local_cluster(settings={"models": models}) as running:
        yield running


def ask_all(cluster: LocalCluster, name: str) -> list[list[int]]:
    return [cluster.complete(prompt, TOKENS, model=name, **FIELDS) for prompt in PROMPTS]


def test_both_models_answer_at_once_as_each_does_alone(
    both: LocalCluster, expected: dict[str, list[list[int]]]
) -> None:
    assert expected["first"] != expected["second"]
    with ThreadPoolExecutor(4) as pool:
        rounds = [(name, pool.submit(ask_all, both, name)) for name in ("first", "second") * 2]
        for name, answers in rounds:
            assert answers.result() == expected[name]
    listed = both.get("/v1/models")["data"]
    assert [model["id"] for model in listed] == ["first", "second"]


def test_a_pool_of_one_model_is_resized_under_traffic(
    both: LocalCluster, expected: dict[str, list[list[int]]]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = {name: pool.submit(ask_all, both, name) for name in expected}
        grown = both.baton("scale", "second/decode=2")
        assert grown.stdout.splitlines()[-1] == "second/decode 1 → 2: done"
        assert {name: each.result() for name, each in answers.items()} == expected
    workers = [entry["id"] for entry in both.processes("decode")]
    assert sorted(workers) == ["first-decode-0", "second-decode-0", "second-decode-1"]
    both.baton("scale", "second/decode=1")
    wrong = both.baton("scale", "decode=2", check=False)
    assert wrong.returncode == 2
    assert "the pools are first/prefill, first/decode, first/mixed, second/prefill" in wrong.stderr


def test_a_model_whose_worker_is_frozen_does_not_hurt_the_other(
    both: LocalCluster, expected: dict[str, list[list[int]]]
) -> None:
    frozen = next(each for each in both.processes("decode") if each["id"] == "first-decode-0")
    os.kill(frozen["pid"], signal.SIGSTOP)
    try:
        assert ask_all(both, "second") == expected["second"]
    finally:
        os.kill(frozen["pid"], signal.SIGCONT)
    assert ask_all(both, "first") == expected["first"]


def test_an_unknown_model_is_refused_with_the_names_of_the_others(both: LocalCluster) -> None:
    body = {"model": "third", "prompt": PROMPTS[0]}
    answer = httpx.post(both.url + "/v1/completions", json=body)
    assert answer.status_code == 404
    assert "this server has 'first', 'second'" in answer.json()["error"]["message"]


def test_the_books_of_both_models_are_clean(both: LocalCluster) -> None:
    assert both.baton("check").returncode == 0
