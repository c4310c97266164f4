"""Tests families with sliding windows, sinks and experts: a cluster's answers must equal those of
vLLM alone."""

from pathlib import Path

import pytest

from testkit.model_zoo import SLIDING_WINDOW, make_model
from tests.vllm.e2e.vllm_cluster import GREEDY, VllmAnswers, ask_vllm_alone, prompt, vllm_cluster

pytestmark = pytest.mark.timeout(600)
FAMILIES = ("gemma3", "gpt-oss")
LENGTHS = (20, SLIDING_WINDOW, SLIDING_WINDOW + 1, 300, 700)
DTYPE = "bfloat16"
"""vLLM's kernels for gpt-oss on CPUs need BF16."""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, VllmAnswers]]:
    """Return, for each family, a model and the answers of vLLM alone."""
    folder = tmp_path_factory.mktemp("others")
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    result = {}
    for name in FAMILIES:
        model = make_model(folder / name, name)
        # Each model gets its own process, because vLLM can't load a mixture of experts after
        # another kind of model.
        result[name] = (model, ask_vllm_alone({model: prompts}, folder, DTYPE)[model])
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_vllm_alone(
    family: str, others: dict[str, tuple[Path, VllmAnswers]]
) -> None:
    model, expected = others[family]
    with vllm_cluster(model, 1, 1, dtype=DTYPE, transports="shm") as cluster:
        expected.check(cluster)
        _, headers = cluster.post_with_headers(
            "/v1/completions", {"prompt": prompt(90, 100), "max_tokens": 3, **GREEDY}
        )
        assert int(headers["x-baton-kv-transfer-bytes"]) > 0
        assert cluster.baton("check").returncode == 0
