"""Tests a cluster of mock workers under load, also with ``baton bench`` and locust."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from baton.config import DEMO_MODEL
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.worker.mock.model import MockModel, build_mock_model
from testkit.local_cluster import LocalCluster, local_cluster

SETTINGS: dict[str, object] = {"mock": True, "mock_step_seconds": 0.005}
LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
NUM_STREAMS, ANSWER_TOKENS = 50, 24


@pytest.fixture(scope="module")
def mocks() -> Iterator[LocalCluster]:
    """Four prefill and four decode mock workers in one process."""
    with local_cluster(prefill=4, decode=4, settings=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def mock_model() -> MockModel:
    return build_mock_model(Tokenizer.load(DEMO_MODEL), 4096)


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 37 + place) % 4000 for place in range(100 + number)]


def test_fifty_concurrent_streams_get_their_own_tokens(
    mocks: LocalCluster, mock_model: MockModel
) -> None:
    def ask(number: int) -> list[int]:
        return mocks.complete(prompt_of(number), ANSWER_TOKENS, temperature=0)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(ask, range(NUM_STREAMS)))
    sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
    for number, answer in enumerate(answers):
        prompt = tuple(TokenId(token) for token in prompt_of(number))
        spec = RequestSpec(RequestId("r"), Epoch(1), prompt, len(prompt), sampling)
        assert answer == mock_model.expected_answer(spec)


def test_mock_workers_share_one_process_and_cannot_be_scaled(mocks: LocalCluster) -> None:
    roles = [process["role"] for process in mocks.status()["processes"]]
    assert sorted(roles) == ["conductor", "mock", "redis", "router"]
    refused = mocks.baton("scale", "decode=5", check=False)
    assert refused.returncode == 2 and "can't be changed after the start" in refused.stderr


def test_baton_bench_reports_exact_counts(mocks: LocalCluster) -> None:
    done = mocks.baton(
        "bench", "--url", mocks.url, "--concurrency", "8", "--requests", "60", "--warm-up", "0",
        "--input-tokens", "200", "--shared-tokens", "128", "--output-tokens", "8", "--json",
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["completed"], found["num_requests"], found["errors"]) == (60, 60, [])
    assert found["answer_tokens"]["mean"] == 8
    assert abs(found["prompt_tokens"]["mean"] - 200) < 20
    assert 0.2 < found["hit_ratio_tokens"] < 0.9


def test_locust_reports_all_kinds_of_requests_without_failures(
    mocks: LocalCluster, tmp_path: Path
) -> None:
    if find_spec("locust") is None:  # an import would monkey-patch this process
        pytest.skip("locust is not installed")
    report = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", mocks.url, "--headless",
         "--users", "12", "--spawn-rate", "12", "--run-time", "3s", "--think-scale", "0",
         "--length-scale", "0.01", "--json-file", str(report), "--only-summary"],
        env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        (row["method"], row["name"]): row
        for row in json.loads(report.with_suffix(".json").read_text())
    }
    for kind in ("chat", "completion", "rag", "agent", "reasoning"):
        for method in ("POST", "TTFT"):
            assert rows[method, kind]["num_requests"] > 0
            assert rows[method, kind]["num_failures"] == 0
    assert rows["TBT", "chat"]["num_requests"] > 0
