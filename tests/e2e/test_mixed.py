"""Tests clusters with mixed workers: alone, and beside a prefill and a decode worker."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.e2e.test_failures import FIELDS, PROMPT, TOKENS, stream_and_kill
from tests.e2e.test_role_change import pool, stream_and_scale

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> list[int]:
    """The answer of a cluster with prefill and decode workers."""
    return cluster.complete(PROMPT, TOKENS, **FIELDS)


@pytest.fixture(scope="module")
def only_mixed() -> Iterator[LocalCluster]:
    with local_cluster(prefill=0, decode=0, mixed=2) as running:
        yield running


def complete(cluster: LocalCluster, prompt: list[int]) -> tuple[dict[str, int], dict[str, object]]:
    """Send a request for two tokens; return its usage, and the explanation of its placement."""
    body = {"prompt": prompt, "max_tokens": 2, **FIELDS}
    answer, headers = cluster.post_with_headers("/v1/completions", body)
    return answer["usage"], cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")


def test_tokens_equal_those_of_a_pair(only_mixed: LocalCluster, expected: list[int]) -> None:
    roles = [entry["role"] for entry in only_mixed.status()["processes"]]
    assert roles.count("mixed") == 2
    assert not {"prefill", "decode"} & set(roles)
    assert only_mixed.complete(PROMPT, TOKENS, **FIELDS) == expected
    message = {"role": "user", "content": "hello"}
    body = {"messages": [message], "max_tokens": 5, **FIELDS}
    answer = only_mixed.post("/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 5


def test_prefix_is_used_again_and_the_explanation_says_so(only_mixed: LocalCluster) -> None:
    """Either worker may serve the second request, since both read the store of their host."""
    start = list(range(200, 680))
    complete(only_mixed, [*start, 1])
    usage, second = complete(only_mixed, [*start, 2])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 480  # type: ignore[index]
    assert second["prefill"] is None
    found = re.match(
        r"mixed worker: (\d+) of 30 blocks cached, (\d+) to fetch", str(second["reason"])
    )
    assert found is not None and int(found[1]) + int(found[2]) == 30
    shown = only_mixed.baton("explain", str(second["request_id"])).stdout
    assert found[0] in " ".join(shown.split())


def test_stream_survives_a_killed_mixed_worker(
    only_mixed: LocalCluster, expected: list[int]
) -> None:
    """A placement on a mixed worker names it as its decode worker."""
    assert stream_and_kill(only_mixed, "decode") == expected
    only_mixed.wait_until_ready()
    assert any(entry["restarts"] for entry in only_mixed.processes("mixed"))
    assert only_mixed.baton("check").returncode == 0


def test_hybrid_changes_into_two_pools_during_a_stream(expected: list[int]) -> None:
    with local_cluster(prefill=1, decode=1, mixed=1) as hybrid:
        assert hybrid.complete(PROMPT, TOKENS, **FIELDS) == expected
        tokens, printed = stream_and_scale(hybrid, "prefill=2", "mixed=0")
        assert tokens[:TOKENS] == expected
        assert printed.splitlines()[-1] == "prefill 1 → 2, mixed 1 → 0: done"
        assert sorted(pool(hybrid, "prefill")) == ["mixed-0", "prefill-0"]
        tokens, printed = stream_and_scale(hybrid, "decode=0", "prefill=0", "mixed=3")
        assert tokens[:TOKENS] == expected
        assert len(pool(hybrid, "mixed")) == 3
        assert hybrid.baton("check").returncode == 0


def test_hybrid_of_mock_workers_uses_pair_and_mixed_worker_under_load() -> None:
    settings: dict[str, object] = {"mock": True, "mock_prefill_tokens_per_second": 4000}
    with local_cluster(prefill=1, decode=1, mixed=1, settings=settings) as hybrid:

        def place(number: int) -> tuple[object, str]:
            _, explained = complete(hybrid, [number] * 1500)
            return explained["prefill"], explained["decode"]["id"]  # type: ignore[index]

        assert place(100)[1] == "mock-decode-0"
        with ThreadPoolExecutor(8) as threads:
            placed = list(threads.map(place, range(101, 117)))
    assert {worker for _, worker in placed} == {"mock-decode-0", "mock-mixed-0"}
    assert all((prefill is None) == (worker == "mock-mixed-0") for prefill, worker in placed)
