"""Tests what unmodified ``vllm serve`` processes offer beyond tokens, through a cluster:
embeddings, scores, and chats with images equal those of the server itself. Run for each version in
``--stock``."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.vision_model import make_vision_model, png
from tests.vllm.e2e.stock_server import Server, vllm_serve

pytestmark = pytest.mark.timeout(600)
ARGUMENTS = ("--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--host=127.0.0.1")
POOLING = ("--runner=pooling", "--convert=embed")
CHATS = "/v1/chat/completions"

Pair = tuple[LocalCluster, Server]


def attached(model: Path, log: Path, version: str, arguments: tuple[str, ...]) -> Iterator[Pair]:
    with vllm_serve(model, log, version, 0, arguments) as server:
        settings: dict[str, object] = {"attach": f"mixed={server.url}", "admission": "off"}
        with local_cluster(
            model, 0, 0, mixed=1, settings=settings, timeout_seconds=400.0
        ) as cluster:
            yield cluster, server


@pytest.fixture(scope="module")
def pooling(stock_version: str, models: dict[str, Path], tmp_path_factory: Any) -> Iterator[Pair]:
    log = tmp_path_factory.mktemp("pooling") / "log"
    yield from attached(models["llama"], log, stock_version, (*ARGUMENTS, *POOLING))


@pytest.fixture(scope="module")
def vision(stock_version: str, tmp_path_factory: Any) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vision")
    model = make_vision_model(folder / "model")
    yield from attached(model, folder / "log", stock_version, ARGUMENTS)


def from_server(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(server.ask(path, {**body, "model": "served"}))
    return answer


def test_embeddings_and_scores_are_the_servers(pooling: Pair) -> None:
    cluster, server = pooling
    for path, body, field in (
        ("/v1/embeddings", {"input": ["hello", "a longer text"]}, "data"),
        ("/v1/embeddings", {"input": [[5, 6, 7]], "dimensions": None}, "data"),
        ("/pooling", {"input": "hello"}, "data"),
        ("/score", {"text_1": "hello", "text_2": ["hello", "b"]}, "data"),
        ("/v1/rerank", {"query": "hello", "documents": ["b", "hello"]}, "results"),
    ):
        expected, got = from_server(server, path, body), cluster.post(path, body)
        assert got[field] == expected[field]
        assert got["usage"] == expected["usage"]
    usage = json.loads(cluster.baton("usage", "--json").stdout)["total"]
    assert (usage["requests"], usage["prompt_tokens"] > 0) == (5, True)


def test_a_server_that_pools_refuses_other_requests(pooling: Pair) -> None:
    cluster, _ = pooling
    with pytest.raises(RuntimeError, match=r"400.*generates nothing; its servers have"):
        cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    with pytest.raises(RuntimeError, match=r"400.*/classify is not supported by the model"):
        cluster.post("/classify", {"input": "a"})
    with pytest.raises(RuntimeError, match=r"400.*maximum context length"):
        cluster.post("/v1/embeddings", {"input": "a" * 2000})


def chat(colour: tuple[int, int, int], **fields: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(*colour)).decode()
    content = [{"type": "text", "text": "What is it?"}]
    content.append({"type": "image_url", "image_url": {"url": url}})  # type: ignore[dict-item]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 12, "temperature": 0, **fields}


def test_chats_with_images_are_the_servers(vision: Pair) -> None:
    cluster, server = vision
    answers = []
    for colour in ((255, 0, 0), (0, 40, 255)):
        body = chat(colour, logprobs=True)
        expected, got = from_server(server, CHATS, body), cluster.post(CHATS, body)
        assert got["choices"] == expected["choices"]
        assert got["usage"] == expected["usage"]
        answers.append(got["choices"][0]["logprobs"])
    assert answers[0] != answers[1]  # the image counts


def test_texts_of_a_model_with_images_go_as_tokens(vision: Pair) -> None:
    cluster, server = vision
    prompt = [20, 30, 40, 50]
    assert cluster.complete(prompt, 8, temperature=0) == server.complete(
        prompt, max_tokens=8, temperature=0
    )
