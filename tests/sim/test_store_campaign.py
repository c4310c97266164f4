"""Tests that random schedules of requests and store faults cause neither a wrong token nor a leaked
resource.

    FAULT_SCHEDULES=1000 python -m pytest tests/sim/test_store_campaign.py

runs a thousand schedules, and

    FAULT_SEED=17 python -m pytest tests/sim/test_store_campaign.py -k replay

replays one schedule and prints a line per event.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from baton.core.kv_transfer import Endpoint
from baton.core.request import RequestSpec
from baton.errors import Unavailable
from baton.transport.base import TransferRange
from kvstore.segment import BlockRecord, Segment
from prefill_worker.reload_policy import ReloadMode
from testkit.fakes.runner import reference_answer
from tests.sim.store_cluster import CLOCK, Node, SimStoreNode, StoreCluster, store_cluster, tokens
from tests.sim.virtual_time import simulate
from tests.sim.worker_cluster import request, tokens_of

NUM_SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "200"))
BATCHES = 20
NUM_REQUESTS = 8


class Schedule:
    """The requests and faults of one run, which are drawn from one seed."""

    def __init__(self, seed: int, folder: Path, verbose: bool = False) -> None:
        self.chance = np.random.default_rng(seed)
        self.folder = folder
        self.verbose = verbose
        self.disk_fails = False
        self.reads = "sound"
        self.specs: list[RequestSpec] = []

    def draw(self, *options: str) -> str:
        return options[int(self.chance.integers(len(options)))]

    def log(self, event: str) -> None:
        if self.verbose:
            print(f"{CLOCK.monotonic():8.3f} {event}")

    async def run(self) -> None:
        async with store_cluster() as cluster:
            cluster.fabric.fault = self.fault
            for number in range(1 + int(self.chance.integers(2))):
                await self.start(cluster, f"s{number}")
            modes = (None, ReloadMode.FETCH, ReloadMode.SPLIT)
            for name in ("one", "two"):
                mode = modes[int(self.chance.integers(3))]
                cluster.add_worker(name, num_blocks=40 + int(self.chance.integers(40)), prefer=mode)
            faults = cluster.tasks.create_task(self.inject_faults(cluster))
            requests = [
                cluster.tasks.create_task(self.send_request(cluster, number))
                for number in range(NUM_REQUESTS)
            ]
            for task in requests:
                await task
            faults.cancel()
            await self.end_faults(cluster)
            cluster.check_integrity()

    async def start(self, cluster: StoreCluster, name: str) -> None:
        room = 8 + int(self.chance.integers(40))
        await cluster.start_store(name, self.folder / name, room)

    async def send_request(self, cluster: StoreCluster, number: int) -> None:
        """Wait for a random time of up to four seconds and send request ``number`` to one of the
        workers. Check the response's tokens, and that it took less than 20 s."""
        await CLOCK.sleep(float(self.chance.uniform(0, 4)))
        spec = self.spec(number)
        node: Node = cluster.nodes[int(self.chance.integers(2))]
        self.log(f"request r{number}: {len(spec.token_ids)} tokens")
        began_at = CLOCK.monotonic()
        outputs = await node.generate(spec)
        expected = reference_answer(spec)[0]
        self.log(f"response r{number}: {outputs[0].details}")
        assert tokens_of(outputs) == expected, (
            f"wrong tokens for r{number}, whose prompt is {spec.token_ids}"
        )
        assert CLOCK.monotonic() - began_at < 20.0

    def spec(self, number: int) -> RequestSpec:
        """Return request ``number``. Requests of one prompt family share the beginning of their
        prompts."""
        family = int(self.chance.integers(3))
        shared = 4 * int(self.chance.integers(1, 25))
        own = tokens(50 + number, int(self.chance.integers(1, 30)))
        return request(f"r{number}", [*tokens(family, shared), *own], 1 + number)

    # -- faults ------------------------------------------------------------------------------

    def fault(self, endpoint: Endpoint, span: TransferRange) -> str:
        if self.reads == "sound" or self.chance.random() > 0.5:
            return ""
        return self.reads

    async def inject_faults(self, cluster: StoreCluster) -> None:
        while True:
            await CLOCK.sleep(float(self.chance.uniform(0.05, 1.0)))
            name = self.draw(*cluster.stores)
            kind = self.draw("kill", "kill", "hang", "reads", "dram", "disk", "full", "index")
            self.log(f"{kind} {name}")
            await self.inject(cluster, kind, cluster.stores[name])

    async def inject(self, cluster: StoreCluster, kind: str, store: SimStoreNode) -> None:
        if kind == "kill":
            if not store.is_dead:
                cluster.kill_store(store.name)
            if self.chance.random() < 0.7:
                await self.start(cluster, store.name)
        elif kind == "hang":
            store.is_hung = not store.is_hung
        elif kind == "reads":
            self.reads = self.draw("sound", "lost", "corrupt")
        elif kind == "dram":
            store.arena.view[int(self.chance.integers(len(store.arena.view)))] ^= 1
        elif kind == "disk":
            self.damage_disk(store)
        elif kind == "full":
            self.disk_fails = not self.disk_fails
        else:
            cluster.index.is_reachable = not cluster.index.is_reachable

    def damage_disk(self, store: SimStoreNode) -> None:
        files = sorted((self.folder / store.name).glob("segment-*.kv"))
        if not files:
            return
        path = files[int(self.chance.integers(len(files)))]
        if self.chance.random() < 0.2:
            os.truncate(path, int(self.chance.integers(path.stat().st_size + 1)))
            return
        with path.open("r+b") as file:
            file.seek(int(self.chance.integers(max(path.stat().st_size, 1))))
            byte = file.read(1)
            if byte:
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ (1 << int(self.chance.integers(8)))]))

    def write(self, segment: Segment, slot: int, record: BlockRecord, data: memoryview) -> None:
        if self.disk_fails:
            raise Unavailable("no space left on device")
        WRITE(segment, slot, record, data)

    async def end_faults(self, cluster: StoreCluster) -> None:
        self.reads, self.disk_fails, cluster.index.is_reachable = "sound", False, True
        for store in cluster.stores.values():
            store.is_hung = False
        await cluster.run_for(120.0)


WRITE = Segment.write


def run_seed(seed: int, monkeypatch: pytest.MonkeyPatch, verbose: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(seed, Path(folder), verbose)
        monkeypatch.setattr(Segment, "write", lambda segment, *rest: schedule.write(segment, *rest))
        try:
            simulate(schedule.run())
        except BaseException:
            print(f"seed {seed}")
            raise


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_schedule_serves_a_wrong_block(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    share = NUM_SCHEDULES // BATCHES
    for seed in range(batch * share, (batch + 1) * share):
        run_seed(seed, monkeypatch)


@pytest.mark.skipif("FAULT_SEED" not in os.environ, reason="set FAULT_SEED to replay a seed")
def test_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    run_seed(int(os.environ["FAULT_SEED"]), monkeypatch, verbose=True)
