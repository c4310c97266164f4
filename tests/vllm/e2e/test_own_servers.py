"""Tests a prefill and a decode worker that start an unmodified ``vllm serve`` each."""

from pathlib import Path

import pytest

from testkit.local_cluster import VLLM_PYTHON, VLLM_START_SECONDS, local_cluster
from tests.vllm.e2e.vllm_cluster import GREEDY, VllmAnswers

pytestmark = pytest.mark.timeout(600)


def test_answers_are_vllms(
    models: dict[str, Path], references: dict[str, VllmAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings: dict[str, object] = {
        "engine": "vllm-serve",
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
        references["llama"].check(cluster)
        assert "vllm 0.32.0" in cluster.baton("status").stdout
        body = {"prompt": [5] * 100, "max_tokens": 2, **GREEDY}
        _, headers = cluster.post_with_headers("/v1/completions", body)
        assert headers["x-baton-prefill"] == "prefill-0", headers
        sockets = cluster.baton("doctor", "--sockets", check=False)
        assert sockets.returncode == 0, sockets.stdout
