"""One fault at a time under hand-overs, and what each server holds afterwards."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

from testkit.machine import SYSTEM_CLOCK, pause
from testkit.streams import CompletionCase, traffic
from tests.vllm.chaos.answers import ask_greedily, make_prompts, summarize
from tests.vllm.chaos.site import (
    EXPIRED,
    ChaosServer,
    Site,
    Violation,
    attached,
    running,
    wait_until,
)
from tests.vllm.e2e.stock_server import ARGUMENTS, LEASE_SECONDS, frozen

PROMPTS, SHORTEST, LONGEST = 24, 5, 700
STREAMS = 8
CLIENTS = 4
HELD_SECONDS = 60.0
CATCH_SECONDS = 0.6
"""How long the decode server may be frozen without that its worker gives it up."""

MOST_ATTEMPTS = 10
BLOCKS = "--num-gpu-blocks-override=128"
"""So few that those of KV that was lent are soon used for other prompts."""

OTHER_PROMPTS, OTHER_TOKENS = 40, 900
"""More than all blocks."""

ARGUMENTS_OF_ALL = (*ARGUMENTS, "--dtype=float32", BLOCKS)


@dataclass(frozen=True)
class Scene:
    """A cluster with one prefill and one decode server, under traffic."""

    site: Site
    prefill: ChaosServer
    decode: ChaosServer
    cases: Sequence[CompletionCase]

    def wait_for_hand_over(self) -> None:
        """Wait until the decode server reads the KV of a prompt."""
        before = self.site.num_transfers()
        wait_until(lambda: self.site.num_transfers() > before, "a hand-over")

    def is_kv_lent(self) -> bool:
        """Whether the prefill server soon lends KV, and computes nothing: a hand-over is in flight
        to a decode server that is frozen, and whose worker has not noticed it."""
        give_up_at = SYSTEM_CLOCK() + CATCH_SECONDS
        while SYSTEM_CLOCK() < give_up_at:
            held = self.prefill.held()
            if held["kv_cache_usage_perc"] > 0 and held["num_requests_running"] == 0:
                return True
        return False


Hazard = Callable[[Scene], dict[str, Any]]
"""Does its deed under traffic and undoes it; returns what it has seen. Raises Violation."""

HAZARDS: dict[str, Hazard] = {}


def hazard(happen: Hazard) -> Hazard:
    HAZARDS[happen.__name__] = happen
    return happen


@hazard
def decode_engine_frozen_beyond_the_lease(scene: Scene) -> dict[str, Any]:
    """Until the prefill server has ended the lease of KV that the decode server was to read, and
    has used its blocks for others."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        scene.wait_for_hand_over()
        before = scene.prefill.metric(EXPIRED)
        with frozen(scene.decode.server.engine_tree):
            if not scene.is_kv_lent():
                continue
            give_up_at = SYSTEM_CLOCK() + LEASE_SECONDS + 15
            while scene.prefill.metric(EXPIRED) == before and SYSTEM_CLOCK() < give_up_at:
                pause(0.5)
            expired = scene.prefill.metric(EXPIRED) - before
            overwrite(scene.prefill)
        if expired:
            return {"expired_leases": int(expired), "attempts": attempt}
        scene.site.wait_until_well()
    raise Violation("no lease of KV has expired: nothing was in flight")


def overwrite(server: ChaosServer) -> None:
    """Have other prompts computed in all blocks that are free."""
    for prompt in make_prompts(OTHER_PROMPTS, OTHER_PROMPTS, OTHER_TOKENS, OTHER_TOKENS):
        server.server.complete(prompt, max_tokens=1)


@hazard
def prefill_engine_frozen(scene: Scene) -> dict[str, Any]:
    return _freeze_prefill(scene, 8.0)


@hazard
def prefill_engine_frozen_beyond_the_lease(scene: Scene) -> dict[str, Any]:
    return _freeze_prefill(scene, LEASE_SECONDS + 10.0)


def _freeze_prefill(scene: Scene, seconds: float) -> dict[str, Any]:
    scene.wait_for_hand_over()
    with frozen(scene.prefill.server.engine_tree):
        pause(seconds)
    return {"seconds": seconds}


def _kill(scene: Scene, server: ChaosServer, *, engine: bool) -> dict[str, Any]:
    scene.wait_for_hand_over()
    before = server.num_orphans
    server.kill(server.server.engine if engine else server.server.tree[0])
    server.restart()
    return {"processes_that_outlived_it": server.num_orphans - before}


@hazard
def decode_server_killed(scene: Scene) -> dict[str, Any]:
    return _kill(scene, scene.decode, engine=False)


@hazard
def prefill_server_killed(scene: Scene) -> dict[str, Any]:
    return _kill(scene, scene.prefill, engine=False)


@hazard
def decode_engine_killed(scene: Scene) -> dict[str, Any]:
    return _kill(scene, scene.decode, engine=True)


@hazard
def prefill_engine_killed(scene: Scene) -> dict[str, Any]:
    return _kill(scene, scene.prefill, engine=True)


@hazard
def prefill_server_killed_between_answer_and_read(scene: Scene) -> dict[str, Any]:
    """The decode server is frozen for the moment in which the prefill server answers and dies."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        scene.wait_for_hand_over()
        with frozen(scene.decode.server.engine_tree):
            if not scene.is_kv_lent():
                continue
            scene.prefill.server.kill()
        scene.prefill.restart()
        return {"attempts": attempt}
    raise Violation("no KV was lent while the decode server was frozen")


@hazard
def decode_worker_killed(scene: Scene) -> dict[str, Any]:
    return _kill_worker(scene, scene.decode)


@hazard
def prefill_worker_killed(scene: Scene) -> dict[str, Any]:
    return _kill_worker(scene, scene.prefill)


def _kill_worker(scene: Scene, server: ChaosServer) -> dict[str, Any]:
    times = 3
    for _ in range(times):
        scene.wait_for_hand_over()
        scene.site.kill_worker(server)
        scene.site.wait_until_well()
    return {"times": times}


@hazard
def parameters_of_a_client(scene: Scene) -> dict[str, Any]:
    """A client sends transfer parameters: such that ask for KV, some that have gone stale, and
    those of a prompt of somebody else's."""
    prompt = scene.cases[0].body["prompt"]
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": "served", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted}
    foreign = json.loads(scene.prefill.server.ask("/v1/completions", body))["kv_transfer_params"]
    stale = {**foreign, "remote_engine_id": "of-a-server-that-is-gone"}
    parameters = (wanted, foreign, stale)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    refusals = [
        _refusal(scene, path, {**fields, "kv_transfer_params": each})
        for each in parameters
        for path, fields in (
            ("/v1/completions", {"prompt": prompt, "max_tokens": 4}),
            ("/v1/chat/completions", chat),
        )
    ]
    unnamed = [each for each in refusals if not each.startswith("400: ") or "kv_tr" not in each]
    if unnamed:
        raise Violation(f"transfer parameters of a client are not refused by name: {unnamed[0]}")
    return {"refused": len(refusals)}


def _refusal(scene: Scene, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        scene.site.cluster.url + path,
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            ignored = response.headers.get("x-baton-ignored-fields")
            return f"{response.status}: ignored fields: {ignored}"
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"


OTHER_BLOCKS = "pair_with_other_block_size"


def run(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    names = options.only or [*HAZARDS, OTHER_BLOCKS]
    prefill = _server("prefill", model, folder, options)
    decode = _server("decode", model, folder, options)
    found: dict[str, Any] = {}
    with running([prefill]):
        prompts = make_prompts(PROMPTS, options.seed, SHORTEST, LONGEST)
        cases = ask_greedily(prefill.server, prompts, options.seed)
        if set(names) & set(HAZARDS):
            with (
                running([decode]),
                attached(model, [prefill, decode], folder / "baton", "float32") as site,
            ):
                scene = Scene(site, prefill, decode, cases)
                for name in names:
                    if name in HAZARDS:
                        found[name] = run_hazard(scene, name)
        if OTHER_BLOCKS in names:
            with other_block_size(prefill, model, folder, options, cases) as scene:
                found[OTHER_BLOCKS] = exchange_nothing(scene)
    return {"ok": all(each["ok"] for each in found.values()), **found}


def _server(
    role: str, model: Path, folder: Path, options: argparse.Namespace, *more: str
) -> ChaosServer:
    arguments = (*ARGUMENTS_OF_ALL, *more)
    return ChaosServer(f"{role}-0", role, model, folder, options.version, arguments)


def run_hazard(scene: Scene, name: str) -> dict[str, Any]:
    """Run a hazard under traffic. Every answer must be whole and equal, also those that the next
    clients get of the cluster and of each server, and nothing may be held a minute later."""
    began, violation, seen = SYSTEM_CLOCK(), "", {}
    with traffic(scene.site.cluster.url, scene.cases, STREAMS) as answers:
        try:
            scene.wait_for_hand_over()
            seen = HAZARDS[name](scene)
            scene.site.wait_until_well()
            scene.wait_for_hand_over()
        except (Violation, OSError, psutil.Error) as error:
            violation = repr(error)
    for each in scene.site.servers:
        if each.has_ended:
            violation += f" {each.name} has ended by itself"
            each.restart()
    held = scene.site.wait_until_nothing_is_held(HELD_SECONDS)
    found = summarize(answers, scene.prefill.server)
    found |= {"held": held, "next_clients": next_clients(scene.site, scene.cases), "seen": seen}
    found["violation"] = violation
    found["seconds"] = round(SYSTEM_CLOCK() - began)
    found["ok"] = (
        found["equal"] == found["answers"] > 0
        and not held
        and not violation
        and all(right == len(scene.cases) for right in found["next_clients"].values())
    )
    print(f"{name}: {found}", flush=True)
    return found


def next_clients(site: Site, cases: Sequence[CompletionCase]) -> dict[str, int]:
    """Return how many prompts are answered right by the cluster, and by each server alone, which
    would go on with wrong KV if it had kept some."""
    asked: dict[str, Callable[..., list[int]]] = {"cluster": site.cluster.complete}
    asked |= {each.name: each.server.complete for each in site.servers}
    with ThreadPoolExecutor(CLIENTS) as pool:
        return {name: sum(pool.map(_is_right, repeat(ask), cases)) for name, ask in asked.items()}


def _is_right(ask: Callable[..., list[int]], case: CompletionCase) -> bool:
    fields = {key: case.body[key] for key in ("max_tokens", "temperature", "ignore_eos")}
    try:
        return ask(case.body["prompt"], **fields) == list(case.tokens)
    except (OSError, RuntimeError) as error:
        print(f"the next client got an error: {error}", flush=True)
        return False


@contextmanager
def other_block_size(
    prefill: ChaosServer,
    model: Path,
    folder: Path,
    options: argparse.Namespace,
    cases: Sequence[CompletionCase],
) -> Iterator[Scene]:
    """Attach a prefill and a decode server that have blocks of different sizes."""
    decode = _server("decode", model, folder, options, "--block-size=64")
    decode.name = "decode-other"
    with running([decode]):
        logs = folder / "baton-other"
        with attached(model, [prefill, decode], logs, "float32") as site:
            yield Scene(site, prefill, decode, cases)


def exchange_nothing(scene: Scene) -> dict[str, Any]:
    """Send requests to servers that must not exchange KV."""
    before = scene.site.num_transfers()
    with traffic(scene.site.cluster.url, scene.cases, STREAMS) as answers:
        wait_until(lambda: len(answers) >= 2 * PROMPTS, "answers")
    held = scene.site.wait_until_nothing_is_held(HELD_SECONDS)
    found = summarize(answers, scene.prefill.server)
    transfers = int(scene.site.num_transfers() - before)
    found |= {
        "held": held,
        "next_clients": next_clients(scene.site, scene.cases),
        "transfers": transfers,
    }
    found["ok"] = (
        found["equal"] == found["answers"]
        and not held
        and transfers == 0
        and all(right == len(scene.cases) for right in found["next_clients"].values())
    )
    print(f"{OTHER_BLOCKS}: {found}", flush=True)
    return found
