"""Streams in a loop while servers, their engines and Baton's workers are killed and frozen."""

import argparse
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from testkit.machine import SYSTEM_CLOCK, pause
from testkit.streams import StreamedAnswer, traffic
from tests.vllm.chaos.answers import ask_greedily, make_prompts, summarize
from tests.vllm.chaos.hazards import HELD_SECONDS, next_clients
from tests.vllm.chaos.site import TRANSFERS, ChaosServer, Site, Violation, attached, running
from tests.vllm.e2e.stock_server import ARGUMENTS, frozen

PROMPTS, SHORTEST, LONGEST = 40, 5, 700
SHORTEST_FREEZE, LONGEST_FREEZE = 1.0, 40.0
DEEDS = ("server killed", "engine killed", "worker killed", "server frozen", "engine frozen")
SAMPLE_SECONDS = 1.0


class Villain:
    """Disturbs one server after the other, so that always one is left whose worker accepts
    requests. Disturbances last longer than the interval between them, so they overlap."""

    def __init__(self, site: Site, seed: int, interval_seconds: float) -> None:
        self._site = site
        self._chance = np.random.default_rng(seed)
        self._interval_seconds = interval_seconds
        self._disturbed: set[str] = set()
        self.deeds: Counter[str] = Counter()
        self.num_ended = 0
        """How many servers have ended although nothing was done to them."""

        self.num_transfers = 0.0
        """Read at short intervals, since a server that is started again counts from 0."""

        self._last_transfers: dict[str, float] = {}
        self._over = threading.Event()

    def run(self, seconds: float, answers: Sequence[StreamedAnswer]) -> None:
        began = SYSTEM_CLOCK()
        next_at = began + self._interval_seconds
        running: list[Future[None]] = []
        with ThreadPoolExecutor(len(self._site.servers)) as pool:
            while SYSTEM_CLOCK() < began + seconds:
                self._count_transfers()
                running += self._restart_ended(pool)
                if SYSTEM_CLOCK() >= next_at:
                    next_at += self._interval_seconds
                    running += self._disturb(pool, SYSTEM_CLOCK() - began, answers)
                pause(SAMPLE_SECONDS)
        for each in running:
            each.result()

    def _disturb(
        self, pool: ThreadPoolExecutor, at: float, answers: Sequence[StreamedAnswer]
    ) -> "list[Future[None]]":
        well = [each for each in self._site.well() if each.name not in self._disturbed]
        deed = str(self._chance.choice(DEEDS))
        pick = int(self._chance.integers(1 << 30))
        freeze = float(self._chance.uniform(SHORTEST_FREEZE, LONGEST_FREEZE))
        right = sum(each.is_right for each in answers)
        so_far = f"{at:.0f} s, {len(answers)} answers, {len(answers) - right} not equal"
        if len(well) < 2:
            self.deeds["none: only one server was left"] += 1
            print(f"{so_far}: only {[each.name for each in well]} left", flush=True)
            return []
        victim = well[pick % len(well)]
        self.deeds[deed] += 1
        lasts = f" for {freeze:.1f} s" if "frozen" in deed else ""
        print(f"{so_far}: {victim.name}: {deed}{lasts}", flush=True)
        self._disturbed.add(victim.name)
        return [pool.submit(self._do, deed, victim, freeze)]

    def _restart_ended(self, pool: ThreadPoolExecutor) -> "list[Future[None]]":
        """Start servers again that have ended although nothing was done to them."""
        ended = [
            each
            for each in self._site.servers
            if each.name not in self._disturbed and each.has_ended
        ]
        for each in ended:
            self.num_ended += 1
            print(f"{each.name} has ended by itself", flush=True)
            self._disturbed.add(each.name)
        return [pool.submit(self._start_again, each) for each in ended]

    def _start_again(self, server: ChaosServer) -> None:
        try:
            server.restart()
        finally:
            self._disturbed.discard(server.name)

    def _do(self, deed: str, victim: ChaosServer, freeze: float) -> None:
        server = victim.server
        try:
            if deed == "worker killed":
                self._site.kill_worker(victim)
            elif "killed" in deed:
                victim.kill(server.tree[0] if deed == "server killed" else server.engine)
                self._start_again(victim)
            else:
                with frozen(server.tree if deed == "server frozen" else server.engine_tree):
                    pause(freeze)
        finally:
            self._disturbed.discard(victim.name)

    def _count_transfers(self) -> None:
        for each in self._site.of_role("decode"):
            if each.name in self._disturbed:
                continue  # it might not respond
            count = each.metric(TRANSFERS)
            last = self._last_transfers.get(each.name, 0.0)
            self.num_transfers += count - last if count >= last else count
            self._last_transfers[each.name] = count


def run(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    arguments = (*ARGUMENTS, "--dtype=float32", "--num-gpu-blocks-override=256")
    roles = [*("prefill", "decode") * options.pairs, *["mixed"] * options.mixed]
    servers = [
        ChaosServer(f"{role}-{number}", role, model, folder, options.version, arguments)
        for number, role in enumerate(roles)
    ]
    with running(servers):
        prompts = make_prompts(PROMPTS, options.seed, SHORTEST, LONGEST)
        cases = ask_greedily(servers[-1].server, prompts, options.seed)
        with attached(model, servers, folder / "baton", "float32") as site:
            villain = Villain(site, options.seed, options.every)
            violation = ""
            with traffic(site.cluster.url, cases, options.streams) as answers:
                began = SYSTEM_CLOCK()
                try:
                    villain.run(60 * options.minutes, answers)
                    site.wait_until_well()
                except (Violation, OSError, psutil.Error) as error:
                    violation = repr(error)
                seconds = SYSTEM_CLOCK() - began
            held = site.wait_until_nothing_is_held(HELD_SECONDS)
            found = summarize(answers, servers[-1].server)
            found |= {
                "seconds": round(seconds),
                "servers": roles,
                "streams": options.streams,
                "kills": sum(count for deed, count in villain.deeds.items() if "killed" in deed),
                "freezes": sum(count for deed, count in villain.deeds.items() if "frozen" in deed),
                "deeds": dict(villain.deeds),
                "transfers_seen": int(villain.num_transfers),
                "ended_by_themselves": villain.num_ended,
                "orphans": sum(each.num_orphans for each in servers),
                "held": held,
                "next_clients": next_clients(site, cases),
                "violation": violation,
            }
    found["ok"] = (
        found["equal"] == found["answers"] > 0
        and not held
        and not violation
        and not found["ended_by_themselves"]
        and all(right == PROMPTS for right in found["next_clients"].values())
    )
    return found
