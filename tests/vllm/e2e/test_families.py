"""Tests one server of each family of models, with experts, sliding windows and sinks: they need
nothing of Baton."""

from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import local_cluster
from tests.vllm.e2e.stock_server import ARGUMENTS, prompt, vllm_serve

pytestmark = pytest.mark.timeout(600)
TOKENS = 24
LENGTHS = (5, 40, 300)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WITHOUT_FLOAT32 = {"gpt-oss"}
"""vLLM's kernels for this family on CPUs need BF16."""


@pytest.mark.parametrize("family", ["qwen3-moe", "gemma3", "gpt-oss"])
def test_answers_are_the_servers(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    arguments = tuple(
        "--dtype=bfloat16" if each == "--dtype=float32" and family in WITHOUT_FLOAT32 else each
        for each in ARGUMENTS
    )
    with vllm_serve(models[family], tmp_path / "log", "0.32.0", 0, arguments) as server:
        settings: dict[str, object] = {"attach": f"mixed={server.url}", "admission": "off"}
        with local_cluster(
            models[family], 0, 0, settings, mixed=1, timeout_seconds=400.0
        ) as cluster:
            for seed, length in enumerate(LENGTHS):
                tokens = prompt(seed, length)
                expected = server.complete(tokens, max_tokens=TOKENS, **GREEDY)
                assert cluster.complete(tokens, TOKENS, **GREEDY) == expected, length
