"""Tests a prefill and a decode worker that start an unmodified ``vllm serve`` each."""

from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import VLLM_PYTHON, VLLM_START_SECONDS, local_cluster
from tests.vllm.e2e.stock_server import ARGUMENTS, prompt, vllm_serve

pytestmark = pytest.mark.timeout(600)
TOKENS = 24
PROMPTS = [prompt(seed, length) for seed, length in enumerate((1, 127, 128, 129, 300, 700))]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def test_answers_are_vllms(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vllm_serve(models["llama"], tmp_path / "alone.log", "0.32.0", 0, ARGUMENTS) as alone:
        alone.wait_until_ready()
        expected = [alone.complete(each, max_tokens=TOKENS, **GREEDY) for each in PROMPTS]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings: dict[str, object] = {
        "engine": "vllm",
        "engine_python": VLLM_PYTHON,
        "engine_args": "--enforce-eager --max-model-len=1024",
        "dtype": "float32",
        "threads": 1,
        "admission": "off",
        "local_prefill": False,  # however short a prompt is, the prefill server computes it
    }
    with local_cluster(
        models["llama"], 1, 1, settings, timeout_seconds=VLLM_START_SECONDS
    ) as cluster:
        assert [cluster.complete(each, TOKENS, **GREEDY) for each in PROMPTS] == expected
        assert "vllm 0.32.0" in cluster.baton("status").stdout
        body = {"prompt": [5] * 100, "max_tokens": 2, **GREEDY}
        headers: dict[str, str] = {}
        while "x-baton-prefill" not in headers:  # on a busy machine, a server may count as frozen
            _, headers = cluster.post_with_headers("/v1/completions", body)
        assert headers["x-baton-prefill"] == "prefill-0", headers
        sockets = cluster.baton("doctor", "--sockets", check=False)
        assert sockets.returncode == 0, sockets.stdout
