"""Tests requests to a real cluster of processes."""

import json
import subprocess
import sys
import urllib.request

import numpy as np
import openai
import pytest

from testkit.cancellation import ANSWER_TOKENS, CancellationStorm, idle_workers
from testkit.local_cluster import LocalCluster
from tests.sampling_equality import ask, generate_alone, make_requests

pytestmark = pytest.mark.timeout(300)
SEED = 11
GREEDY = {"temperature": 0, "ignore_eos": True}


def test_status_shows_every_process(cluster: LocalCluster) -> None:
    status = json.loads(cluster.baton("status", "--json").stdout)
    assert status == cluster.status()
    assert status["ready"] is True
    assert status["url"] == cluster.url
    roles = sorted(entry["role"] for entry in status["processes"])
    assert roles == [
        "conductor", "decode", "decode", "kvstore", "prefill", "prefill", "redis", "router",
    ]  # fmt: skip
    assert len({entry["pid"] for entry in status["processes"]}) == len(roles)


def test_a_streamed_chat_equals_the_whole_response(cluster: LocalCluster) -> None:
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
    body = {"prompt": "import os\n" * 40, "max_tokens": 8, **GREEDY}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    pids = {entry["id"]: entry["pid"] for entry in cluster.status()["processes"]}
    prefill, decode = headers["x-baton-prefill"], headers["x-baton-decode"]
    assert pids[prefill] != pids[decode]
    assert headers["x-baton-transport"] in {"shm", "nixl_local", "grpc"}
    assert int(headers["x-baton-kv-transfer-bytes"]) > 0


def test_explain_reports_the_workers_of_a_request(cluster: LocalCluster) -> None:
    body = {"prompt": "import sys\n" * 40, "max_tokens": 4, **GREEDY}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    request_id = headers["x-baton-request-id"]
    explained = json.loads(cluster.baton("explain", request_id, "--json").stdout)
    assert explained["prefill"]["id"] == headers["x-baton-prefill"]
    assert explained["decode"]["id"] == headers["x-baton-decode"]


def test_the_cluster_generates_the_tokens_of_baton_generate(cluster: LocalCluster) -> None:
    prompt = "def parse(text):\n    "
    done = cluster.baton("generate", "--prompt", prompt, "--max-tokens", "32", "--json",
                         "--temperature", "0")  # fmt: skip
    generate_alone = json.loads(done.stdout)
    fields = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    choice = cluster.post("/v1/completions", fields)["choices"][0]
    assert choice["prompt_token_ids"] == generate_alone["prompt_token_ids"]
    assert choice["token_ids"] == generate_alone["token_ids"]
    assert choice["text"] == generate_alone["text"]
    assert choice["finish_reason"] == generate_alone["finish_reason"]


def test_an_answer_that_repeats_the_prompt_is_that_of_baton_generate(cluster: LocalCluster) -> None:
    """Decode workers draft its tokens; ``baton generate`` computes them one by one."""
    prompt = "values = [1, 2, 3]\nfor value in values:\n    print(value)\n" * 12
    done = cluster.baton("generate", "--prompt", prompt, "--max-tokens", "96", "--json",
                         "--temperature", "0")  # fmt: skip
    fields = {"prompt": prompt, "max_tokens": 96, "temperature": 0, "return_token_ids": True}
    choice = cluster.post("/v1/completions", fields | {"logprobs": 2})["choices"][0]
    assert choice["token_ids"] == json.loads(done.stdout)["token_ids"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


def test_seeded_samples_equal_those_of_one_engine_at_any_concurrency(
    cluster: LocalCluster,
) -> None:
    prompts, samplings = make_requests(16, 24, SEED)
    expected = generate_alone(prompts, samplings)
    assert ask(cluster, prompts, samplings, at_once=1) == expected
    assert ask(cluster, prompts, samplings, at_once=16) == expected


def test_a_prefix_is_computed_at_most_once_by_each_prefill_worker(cluster: LocalCluster) -> None:
    """Whichever workers serve a prompt, its answer has the same tokens. The second worker may fetch
    the prefix from the store, or compute it if that is predicted to be faster."""
    prompt = np.random.default_rng(5).integers(3, 4000, size=400).tolist()
    first = cluster.complete(prompt, 8, **GREEDY)
    cached = []
    for tail in range(6):
        body = {
            "prompt": [*prompt, 10 + tail], "max_tokens": 8, "return_token_ids": True, **GREEDY,
        }  # fmt: skip
        usage = cluster.post("/v1/completions", body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cluster.complete(prompt, 8, **GREEDY) == first
    assert sum(tokens >= 384 for tokens in cached) >= 5, cached


def test_cancelled_requests_leak_no_blocks(cluster: LocalCluster) -> None:
    """Half of 200 requests are cancelled at random moments."""
    print(f"seed {SEED}")
    storm = CancellationStorm.make(200, SEED)
    finished = storm.run(cluster.url)
    assert finished == [None if stop is not None else ANSWER_TOKENS for stop in storm.cancel_after]
    for worker in idle_workers(cluster):
        assert worker["violation"] == ""
        assert worker["free_blocks"] + worker["idle_blocks"] == worker["num_blocks"]


def test_metrics_and_readiness_are_served(cluster: LocalCluster) -> None:
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
