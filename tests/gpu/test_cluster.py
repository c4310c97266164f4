"""Tests a cluster whose prefill and decode workers share one GPU."""

import json
import os
import signal
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from testkit.local_cluster import LocalCluster, local_cluster
from tests.gpu.device import NEEDS_GPU, generated, load_runner

pytestmark = NEEDS_GPU

SEED = 20261126
SETTINGS: dict[str, object] = {"device": "cuda", "dtype": "float32", "pool_bytes": "512MiB"}
PROMPT_TOKENS = (5, 40, 300, 700)
ANSWER_TOKENS = 48
STREAM_TOKENS = 250
KILL_AFTER_TOKENS = 20
READY_SECONDS = "90"


def test_answers_equal_the_cpus_also_when_workers_are_killed() -> None:
    runner = load_runner("cpu")
    chance = np.random.default_rng(SEED)
    vocabulary = runner.model_config.vocab_size
    prompts = [chance.integers(3, vocabulary, size=size).tolist() for size in PROMPT_TOKENS]
    wanted = [generated(runner, prompt, num_tokens=ANSWER_TOKENS) for prompt in prompts]
    long_wanted = generated(runner, prompts[1], num_tokens=STREAM_TOKENS)
    with local_cluster(settings=SETTINGS) as running, ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(partial(complete, running), prompts)) == wanted
        body = {"prompt": [7, *prompts[-1]], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        _, headers = running.post_with_headers("/v1/completions", body)
        print(f"KV transfer over {headers.get('x-baton-transport', 'none')}")
        assert _stream_while_killing(running, prompts[1], "decode") == long_wanted
        running.baton("status", "--wait", READY_SECONDS)
        pid = int(running.processes("prefill")[0]["pid"])
        answers = pool.map(partial(complete, running), prompts)
        os.kill(pid, signal.SIGKILL)
        assert list(answers) == wanted
        running.baton("status", "--wait", READY_SECONDS)
        assert list(pool.map(partial(complete, running), prompts)) == wanted


def complete(running: LocalCluster, prompt: Sequence[int]) -> list[int]:
    return running.complete(prompt, ANSWER_TOKENS, temperature=0, ignore_eos=True)


def _stream_while_killing(running: LocalCluster, prompt: Sequence[int], role: str) -> list[int]:
    """Return the tokens of a streamed answer, during which a worker of ``role`` is killed."""
    pid = int(running.processes(role)[0]["pid"])
    body = {
        "prompt": list(prompt), "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        running.url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    tokens: list[int] = []
    is_alive = True
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                tokens += choice.get("token_ids") or []
            if is_alive and len(tokens) >= KILL_AFTER_TOKENS:
                os.kill(pid, signal.SIGKILL)
                is_alive = False
    return tokens
