"""Tests a cluster of two prefill and two decode workers with vLLM: its answers, its caches,
sampling, and that streams survive killed workers."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema_rs
import psutil
import pytest
from tokenizers import Tokenizer

from kvstore.segment import Segment
from testkit.local_cluster import LocalCluster
from tests.conversation import EXACT
from tests.vllm.e2e.streams import STREAM_TOKENS, start_streams, stream, wait_until_restarted
from tests.vllm.e2e.vllm_cluster import (
    BLOCK_TOKENS,
    GREEDY,
    VllmAnswers,
    prompt,
    vllm_cluster,
)

pytestmark = pytest.mark.timeout(600)
STREAMS = 8
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class"]},
        "arguments": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["kind", "arguments"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path]) -> Iterator[LocalCluster]:
    """Run a cluster with the tenants ``a`` and ``b``. Requests use the key of ``a`` by default. At
    the end, ``baton check`` must succeed."""
    settings = {**EXACT, "transports": "shm", "api_keys": "one=a,two=b"}
    with vllm_cluster(models["qwen3"], 2, 2, **settings) as running:
        running.api_key = "one"
        yield running
        checked = running.baton("check", check=False)
        assert checked.returncode == 0, checked.stdout


def complete(cluster: LocalCluster, tokens: list[int], max_tokens: int, **fields: Any) -> Any:
    body = {"prompt": tokens, "max_tokens": max_tokens, "return_token_ids": True, **fields}
    return cluster.post("/v1/completions", body)


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def store_stats(cluster: LocalCluster) -> dict[str, Any]:
    stats: dict[str, Any] = json.loads(cluster.baton("kv", "stats", "--json").stdout)["kvstore"]
    assert stats["violation"] == ""
    return stats


def num_stored(cluster: LocalCluster) -> int:
    return int(store_stats(cluster)["put_blocks"])


def damage_stored_blocks(cluster: LocalCluster) -> int:
    """Invert a byte of every block in the SSD tier; return the number of blocks."""
    count = 0
    for path in (cluster.home / "store").rglob("*"):
        if path.is_file() and (segment := Segment.open(path, path.stat().st_size)) is not None:
            with path.open("r+b") as file:
                for slot, _ in segment.records():
                    file.seek(segment.slot_offset(slot))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 0xFF]))
                    count += 1
            segment.close()
    return count


def test_greedy_answers_are_those_of_vllm_alone(
    cluster: LocalCluster, references: dict[str, VllmAnswers]
) -> None:
    references["qwen3"].check(cluster)
    body = {"prompt": prompt(60, 100), "max_tokens": 3, **GREEDY}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    assert headers["x-baton-prefill"] != headers["x-baton-decode"]
    assert headers["x-baton-transport"] == "shm"
    assert int(headers["x-baton-kv-transfer-bytes"]) > 0


def test_a_conversation_is_cached_for_its_tenant_and_across_restarts(cluster: LocalCluster) -> None:
    before = num_stored(cluster)
    first = prompt(61, 200)
    answer = complete(cluster, first, 40, **GREEDY)
    assert cached_tokens(answer) == 0
    # The KV of the answer's last token is never computed.
    num_blocks = (200 + 40 - 1) // BLOCK_TOKENS
    while num_stored(cluster) < before + num_blocks:
        pass  # blocks are stored in the background; the test's timeout bounds this
    second = first + answer["choices"][0]["token_ids"] + prompt(62, 10)
    expected = complete(replace(cluster, api_key="two"), second, 20, **GREEDY)
    assert cached_tokens(expected) == 0
    for _ in range(3):  # the requests are placed on different workers
        again = complete(cluster, second, 20, **GREEDY)
        assert again["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert cached_tokens(again) == num_blocks * BLOCK_TOKENS

    for role in ("prefill", "decode"):
        for process in cluster.processes(role):
            os.kill(process["pid"], signal.SIGKILL)
    wait_until_restarted(cluster)
    again = complete(cluster, second, 20, **GREEDY)
    assert again["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert cached_tokens(again) == num_blocks * BLOCK_TOKENS


def test_a_damaged_block_is_computed_again(cluster: LocalCluster) -> None:
    """The store node is terminated, so that it writes its blocks to the SSD tier. The workers are
    killed, so that no other copies are left. Then one byte of each block in the SSD tier is
    changed."""
    question = prompt(66, 200)
    before = num_stored(cluster)
    answer = complete(cluster, question, 20, **GREEDY)
    num_blocks = (200 + 20 - 1) // BLOCK_TOKENS
    while num_stored(cluster) < before + num_blocks:
        pass  # blocks are stored in the background; the test's timeout bounds this
    [store] = cluster.processes("kvstore")
    os.kill(store["pid"], signal.SIGTERM)
    psutil.wait_procs([psutil.Process(store["pid"])])
    for role in ("prefill", "decode"):
        for process in cluster.processes(role):
            os.kill(process["pid"], signal.SIGKILL)
    wait_until_restarted(cluster)
    assert store_stats(cluster)["disk_blocks"] >= num_blocks
    assert damage_stored_blocks(cluster) >= num_blocks
    again = complete(cluster, question, 20, **GREEDY)
    assert cached_tokens(again) == 0
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert store_stats(cluster)["checksum_failures"] > 0


def test_seeds_determine_answers_and_logprobs_are_reported(cluster: LocalCluster) -> None:
    def answer(**fields: Any) -> Any:
        body = complete(cluster, prompt(63, 50), 12, ignore_eos=True, **fields)
        return body["choices"][0]

    seeded = answer(seed=5, temperature=1.0)["token_ids"]
    assert answer(seed=5, temperature=1.0)["token_ids"] == seeded
    assert answer(seed=6, temperature=1.0)["token_ids"] != seeded
    greedy = answer(temperature=0, logprobs=2)
    assert greedy["token_ids"] not in (seeded, [])
    for chosen, top in zip(
        greedy["logprobs"]["token_logprobs"], greedy["logprobs"]["top_logprobs"], strict=True
    ):
        assert chosen == max(top.values()) < 0


def test_answers_follow_a_json_schema(cluster: LocalCluster, models: dict[str, Path]) -> None:
    # Whitespace is excluded, because the schema allows any amount of it between values, and the
    # random model would seldom stop generating it.
    spaces = Tokenizer.from_file(str(models["qwen3"] / "tokenizer.json")).encode(" \t\r\n").ids
    bias = dict.fromkeys(map(str, spaces), -100)
    shape = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    texts = set()
    for seed in range(3):
        answer = cluster.post(
            "/v1/completions",
            {
                "prompt": prompt(64, 70), "max_tokens": 300, "seed": seed, "logit_bias": bias,
                "response_format": shape,
            },
        )["choices"][0]  # fmt: skip
        assert answer["finish_reason"] == "stop"
        assert jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(answer["text"]))
        texts.add(answer["text"])
    assert len(texts) > 1


@pytest.mark.parametrize(("role", "prompt_tokens"), [("prefill", 1500), ("decode", 80)])
def test_streams_survive_a_killed_worker(
    role: str, prompt_tokens: int, cluster: LocalCluster
) -> None:
    """There are two cases: a prefill worker is killed while long prompts are still being computed
    and transferred, or a decode worker while the answers are being generated."""
    cluster.wait_until_ready()
    victim = cluster.processes(role)[0]["pid"]
    with ThreadPoolExecutor(STREAMS) as pool:
        prompts, streams = start_streams(pool, cluster, STREAMS, prompt_tokens)
        os.kill(victim, signal.SIGKILL)
        answers = [each.result() for each in streams]
    wait_until_restarted(cluster)
    assert any(process["restarts"] for process in cluster.processes(role))
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda each: stream(cluster, each, Event()), prompts))
    assert [len(answer) for answer in answers] == [STREAM_TOKENS] * STREAMS
    assert answers == undisturbed
