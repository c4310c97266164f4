"""A real request through a real cluster of processes."""

import json
import subprocess
import sys
import threading
import urllib.request

import httpx
import numpy as np
import openai
import pytest

from tools.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)


def test_status_shows_every_process(cluster: LocalCluster) -> None:
    status = cluster.status()
    assert status["ready"] is True
    assert status["url"] == cluster.url
    roles = sorted(entry["role"] for entry in status["processes"])
    assert roles == [
        "conductor", "decode", "decode", "kvstore", "prefill", "prefill", "redis", "router",
    ]  # fmt: skip
    assert len({entry["pid"] for entry in status["processes"]}) == len(roles)


def test_streamed_chat_with_the_openai_client(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=cluster.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Write a function named read."}]
    fields = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    client.close()


def test_prefill_and_decode_ran_in_different_processes(cluster: LocalCluster) -> None:
    body = {"prompt": "import os\n" * 40, "max_tokens": 8, "temperature": 0}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    pids = {entry["id"]: entry["pid"] for entry in cluster.status()["processes"]}
    prefill, decode = headers["x-baton-prefill"], headers["x-baton-decode"]
    assert pids[prefill] != pids[decode]
    assert headers["x-baton-transport"] in {"shm", "nixl", "grpc"}
    assert int(headers["x-baton-bytes-shipped"]) > 0


def test_explain_tells_where_a_request_went(cluster: LocalCluster) -> None:
    body = {"prompt": "import sys\n" * 40, "max_tokens": 4, "temperature": 0}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    request_id = headers["x-baton-request-id"]
    explained = json.loads(cluster.baton("explain", request_id, "--json").stdout)
    assert explained["prefill"]["id"] == headers["x-baton-prefill"]
    assert explained["decode"]["id"] == headers["x-baton-decode"]


def test_the_cluster_equals_generate(cluster: LocalCluster) -> None:
    prompt = "def parse(text):\n    "
    done = cluster.baton("generate", "--prompt", prompt, "--max-tokens", "32", "--json",
                         "--temperature", "0")  # fmt: skip
    alone = json.loads(done.stdout)
    fields = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    choice = cluster.post("/v1/completions", fields)["choices"][0]
    assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
    assert choice["token_ids"] == alone["token_ids"]
    assert choice["text"] == alone["text"]
    assert choice["finish_reason"] == alone["finish_reason"]


def test_seeded_samples_are_the_same_alone_and_in_a_batch(cluster: LocalCluster) -> None:
    prompts = [[3 + n, 40 + n, 500 + 7 * n] for n in range(16)]
    fields = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    alone = [cluster.complete(prompt, 24, **fields) for prompt in prompts]
    together: list[list[int]] = [[] for _ in prompts]

    def run(index: int) -> None:
        together[index] = cluster.complete(prompts[index], 24, **fields)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_second_prefill_worker_finds_the_prefix_in_the_store(cluster: LocalCluster) -> None:
    """Every worker ends up with the same answer, and most of the prompt is never recomputed."""
    prompt = np.random.default_rng(5).integers(3, 4000, size=400).tolist()
    first = cluster.complete(prompt, 8, temperature=0)
    usages = []
    for tail in range(6):
        body = {
            "prompt": [*prompt, 10 + tail], "max_tokens": 8, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        usages.append(cluster.post("/v1/completions", body)["usage"])
    assert cluster.complete(prompt, 8, temperature=0) == first
    assert usages[-1]["prompt_tokens_details"]["cached_tokens"] >= 384


def test_cancelled_requests_leave_nothing_behind(cluster: LocalCluster) -> None:
    seed = 11
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)

    lengths = [int(length) for length in chance.integers(1, 700, size=60)]
    stops = [int(stop) if stop < 30 else None for stop in chance.integers(60, size=60)]
    prompts = {length: chance.integers(3, 4000, size=length).tolist() for length in lengths}

    def one(cancel_after: int | None, length: int) -> None:
        body = {
            "prompt": prompts[length],
            "max_tokens": 40, "stream": True, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        url = cluster.url + "/v1/completions"
        with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
            for number, _line in enumerate(answer.iter_lines()):
                if number == cancel_after:
                    return

    plans = list(zip(stops, lengths, strict=True))
    for start in range(0, len(plans), 10):
        threads = [threading.Thread(target=one, args=plan) for plan in plans[start : start + 10]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = wait_until_idle(cluster)
    for worker in report["workers"]:
        assert worker["violation"] == ""
        assert worker["referenced_blocks"] == worker["filling_blocks"] == 0
        assert worker["free_blocks"] + worker["idle_blocks"] == worker["num_blocks"]


def wait_until_idle(cluster: LocalCluster) -> dict:
    """What ``baton check`` says once nothing runs; a pool that stays busy fails the test."""
    for _ in range(20):
        report = json.loads(cluster.baton("check", "--json", check=False).stdout)
        busy = [w for w in report["workers"] if w["referenced_blocks"] or w["filling_blocks"]]
        if not busy:
            break
    return report


def test_metrics_and_readiness(cluster: LocalCluster) -> None:
    with urllib.request.urlopen(cluster.url + "/ready") as answer:
        assert answer.status == 200
    with urllib.request.urlopen(cluster.url + "/metrics") as answer:
        assert b"baton_" in answer.read()


def test_light_roles_import_no_torch(cluster: LocalCluster) -> None:
    for role in ("router", "conductor", "kvstore"):
        code = (
            f"import sys, {role}.program; "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, role
