"""Tests that requests go to the attached server that has their prefix cached, as the servers' KV
events say: also after evictions, for prompts that others sent, and when events were lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.fakes.kv_events import FakeKvEvents
from testkit.fakes.vllm_server import FakeVllm, FakeVllmThread, vllm_servers
from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(240)
NUM_BLOCKS = 200


@pytest.fixture
def servers() -> Iterator[FakeVllmThread]:
    with vllm_servers() as thread:
        yield thread


def conversation(number: int, blocks: int = 4) -> list[int]:
    return [200 + number] * 16 * blocks


def explained(cluster: LocalCluster, prompt: list[int]) -> tuple[str, dict[str, int]]:
    """Send a request. Return the worker that was chosen, and each worker's local blocks as the
    conductor knew them."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    found = cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
    workers = {each["worker"]: each["local_blocks"] for each in found["alternatives"]["mixed"]}
    return found["decode"]["id"], workers


class Servers:
    """Two fakes with prefix caches, in the order of their workers."""

    def __init__(self, thread: FakeVllmThread, fakes: list[FakeVllm]) -> None:
        self._thread = thread
        self.fakes = fakes
        self.workers = ["mixed-0", "mixed-1"]
        self.salt = ""
        """What the servers get as the salt of this cluster's requests."""

        self._num_markers = 0

    def learn_salt(self, cluster: LocalCluster) -> None:
        """Send requests until each server has had one, so that its worker knows the salt, too."""
        while not all(fake.requests for fake in self.fakes):
            self._num_markers += 1
            explained(cluster, [900 + self._num_markers] * 16)
        (self.salt,) = {each["cache_salt"] for fake in self.fakes for each in fake.requests}

    def use(self, number: int, prompt: list[int]) -> int:
        """Use a server as another cluster would. Return how many tokens it had cached."""
        events = self.fakes[number].events
        assert events is not None
        return self._thread.run(events.use(prompt, self.salt))

    def wait_until_known(self, cluster: LocalCluster, number: int) -> None:
        """Wait until the conductor knows what a server has cached by now. It does once it knows, at
        the first request for it, a prompt that the server had afterwards."""
        is_known = False
        while not is_known:
            self._num_markers += 1
            marker = [900 + self._num_markers] * 16
            self.use(number, marker)
            is_known = explained(cluster, [*marker, 1])[1].get(self.workers[number]) == 1


def test_prompts_go_where_their_prefix_is(servers: FakeVllmThread, tmp_path: Path) -> None:
    caches: list[FakeKvEvents] = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        caches.append(FakeKvEvents(tmp_path / str(number), NUM_BLOCKS))
    fakes = [servers.start("hub/model", events=cache) for cache in caches]
    attach = ",".join(f"mixed={fake.url}" for fake in fakes)
    settings: dict[str, Any] = {"attach": attach, "admission": "off", "slo_itl_seconds": 10}
    with local_cluster(prefill=0, decode=0, mixed=2, settings=settings) as cluster:
        both = Servers(servers, fakes)
        both.learn_salt(cluster)
        # Others have sent these prompts to one server each.
        for number in range(6):
            both.use(number % 2, conversation(number))
        for server in range(2):
            both.wait_until_known(cluster, server)
        for number in range(6):
            prompt = [*conversation(number), 7, 8]
            server = number % 2
            before = len(fakes[server].requests)
            chosen, local = explained(cluster, prompt)
            assert (chosen, local[chosen]) == (both.workers[server], 4)
            assert [each["prompt"] for each in fakes[server].requests[before:]] == [prompt]
        # The second server evicts all of them.
        both.use(1, conversation(50, NUM_BLOCKS))
        both.wait_until_known(cluster, 1)
        _, local = explained(cluster, [*conversation(1), 7, 8])
        assert local.get(both.workers[1], 0) == 0
        # The conductor learns of a prompt although its event was lost.
        caches[0].lose = True
        both.use(0, conversation(70))
        caches[0].lose = False
        both.wait_until_known(cluster, 0)
        chosen, local = explained(cluster, [*conversation(70), 7, 8])
        assert (chosen, local[chosen]) == (both.workers[0], 4)
