"""Tests that a new kind of worker is a role, a row in the table and a program: a made-up one is
placed, resized and shown by what its row says. And no code compares roles where it could ask the
table."""

import re
from collections.abc import MutableMapping
from dataclasses import fields, replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.config import Settings
from baton.config.setting_scopes import Reader
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.pool_name import pool_names
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS, WorkerKind, can_serve, list_kinds
from baton.errors import Invalid
from baton.pools.base import PoolWorker, check_can_serve, parse_pool_sizes
from baton.pools.scaling_policy import PoolObservation, ScalingConfig, wanted_sizes
from baton.registry.member_codec import member_from_json, member_to_json
from baton.worker.role_state import RoleState
from command_line.scale import ScaleProgress, parse_pool_counts
from command_line.serve import _build_program
from command_line.status import _table
from conductor.metrics import ClusterGauges, placement_kind
from orchestrator.cluster_state import ClusterState, ProcessState
from orchestrator.launch_specs import serve_command
from router.console.worker_rows import pool_rows, worker_rows
from router.generation.model_workers import variant_capacities
from tests.unit.conductor.policy.test_conductor_mixed import mixed_member
from tests.unit.conductor.test_conductor import (
    ConductorHarness,
    decode_member,
    keys,
    prefill_member,
)
from tests.unit.router.generation.test_ring_mixed import cluster_of, place
from tools.chart_settings import worker_kinds

ROOT = Path(__file__).parents[4]

COMPUTES, ANSWERS, ALONE = (True, False), (False, True), (True, True)


def add_kind(monkeypatch: pytest.MonkeyPatch, can: tuple[bool, bool]) -> Role:
    """Add a kind of worker, ``attached``, that computes prompts and writes answers as ``can``
    says."""
    role = str.__new__(Role, "attached")
    role._name_, role._value_ = "ATTACHED", "attached"
    monkeypatch.setitem(Role._value2member_map_, "attached", role)
    kinds = cast(MutableMapping[Role, WorkerKind], WORKER_KINDS)
    program = f"{__name__}:build_attached"
    row = WorkerKind(role=role, computes_prompts=can[0], writes_answers=can[1], program=program)
    monkeypatch.setitem(kinds, role, row)
    return role


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Role:
    """A kind of worker that serves whole requests."""
    return add_kind(monkeypatch, ALONE)


def build_attached(settings: Settings, role: Role) -> tuple[Settings, Role]:
    return settings, role


def member(name: str, role: Role) -> Member:
    return replace(mixed_member(name), role=role)


# -- placement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("can", "place_of"), [(COMPUTES, 0), (ANSWERS, 1), (ALONE, 2)])
async def test_conductor_has_a_worker_in_the_pool_of_what_it_does(
    monkeypatch: pytest.MonkeyPatch, can: tuple[bool, bool], place_of: int
) -> None:
    role = add_kind(monkeypatch, can)
    cluster = ConductorHarness()
    await cluster.announce(member("a", role), prefill_member("p"), decode_member("d"))
    snapshot = cluster.conductor.snapshot()
    pools = (snapshot.prefills, snapshot.decodes, snapshot.mixed)
    assert [("a" in pool) for pool in pools] == [place == place_of for place in range(3)]
    assert sum(map(len, pools)) == 3


@pytest.mark.parametrize(
    ("can", "other", "placed"),
    [(COMPUTES, decode_member, ("a", "x")), (ANSWERS, prefill_member, ("x", "a"))],
)
async def test_half_of_a_request_goes_to_a_worker_that_does_that(
    monkeypatch: pytest.MonkeyPatch, can: tuple[bool, bool], other: Any, placed: tuple[str, str]
) -> None:
    role = add_kind(monkeypatch, can)
    cluster = ConductorHarness()
    await cluster.announce(member("a", role), other("x"))
    placement = cluster.place("r", 64, keys(1, 2, 3, 4))
    assert tuple(worker.id for worker in placement.workers) == placed
    assert placement_kind(placement) == "pair"


async def test_whole_request_goes_to_a_worker_that_serves_alone(attached: Role) -> None:
    cluster = ConductorHarness()
    await cluster.announce(member("a", attached))
    placement = cluster.place("r", 64, keys(1, 2, 3, 4))
    assert (placement.prefill, placement.decode.id) == (None, "a")
    assert placement_kind(placement) == "mixed"
    await cluster.announce(member("a", Role.DECODE))
    assert cluster.conductor.snapshot().decodes.ids == ("a",)


async def test_ring_has_the_worker(attached: Role) -> None:
    cluster = await cluster_of("a0", "p0", "d0")
    placements = [await place(cluster, number) for number in range(60)]
    found = {tuple(worker.id for worker in placement.workers) for placement in placements}
    assert found == {("p0", "d0"), ("a0",)}


def test_capacity_of_a_variant_counts_the_worker(attached: Role) -> None:
    worker = replace(member("a", attached), block_tokens=16)
    assert variant_capacities([worker]) == {worker.variant: 1}


# -- pools ---------------------------------------------------------------------------------------


def test_sizes_with_the_pool_are_parsed_and_judged(attached: Role) -> None:
    assert parse_pool_counts(["attached=2"]) == {"attached": 2}
    assert parse_pool_sizes({"attached": 2}) == {attached: 2}
    with pytest.raises(Invalid, match="takes prefill=N, decode=N, mixed=N and attached=N"):
        parse_pool_sizes({"other": 2})
    assert can_serve({attached: 1}) and not can_serve({attached: 1, Role.PREFILL: 1})
    with pytest.raises(Invalid, match="or mixed or attached workers"):
        check_can_serve({Role.PREFILL: 1})
    assert pool_names(["a", "b"])["a/attached"] == ("a", attached)


def test_worker_needs_workers_that_do_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    role = add_kind(monkeypatch, COMPUTES)
    assert can_serve({role: 1, Role.DECODE: 1}) and not can_serve({role: 1})


def test_autoscaler_leaves_the_pool_alone(attached: Role) -> None:
    plan = PoolPlan(2, 3, "", 1, 1, 1.0, 100.0, 100.0, 0.0)
    workers = [PoolWorker(WorkerId("a"), attached, "serving")]
    alone = PoolObservation(0.0, plan, {attached: 1, Role.PREFILL: 0, Role.DECODE: 0}, workers)
    assert wanted_sizes(alone, ScalingConfig()) == {}
    beside = replace(alone, sizes={attached: 1, Role.PREFILL: 1, Role.DECODE: 1})
    assert wanted_sizes(beside, ScalingConfig()) == {Role.PREFILL: 2, Role.DECODE: 3}
    assert beside.num_budgeted_workers == 2


def test_only_workers_with_the_engine_change_their_role(attached: Role) -> None:
    with pytest.raises(Invalid, match="its role must be prefill, decode or mixed"):
        RoleState(Role.DECODE).convert(attached, 0.0)
    assert "attached" not in list_kinds(can=lambda kind: kind.runs_engine)


def test_progress_of_resizing_names_the_pool(attached: Role) -> None:
    progress = ScaleProgress({"attached": 2}, {"attached": 1})
    workers = [PoolWorker(WorkerId("attached-1"), attached, "starting")]
    assert progress.describe_progress(workers, {}) == "attached 1 → 2: 1 starting"


# -- programs and commands -----------------------------------------------------------------------


def test_program_is_that_of_the_row(attached: Role) -> None:
    settings = Settings()
    assert _build_program(attached, settings) == (settings, attached)
    assert serve_command(attached)[-2:] == ("serve", "attached")
    assert Reader.of_role(attached) is Reader.WORKER


def test_commands_have_an_option_for_the_number_of_workers(attached: Role) -> None:
    up, simulate = fresh("command_line.lifecycle_commands"), fresh("command_line.simulate_options")
    assert [each.name for each in fields(up.PoolOptions)] == [*WORKER_KINDS]
    assert simulate.PoolOptions(mixed=1, attached=2).sizes == (0, 0, 3)
    assert simulate.PoolOptions(prefill=3).sizes == (3, 2, 0)


def fresh(name: str) -> ModuleType:
    """Return a new copy of a module, whose options depend on the table as it is now."""
    spec = find_spec(name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what is shown -------------------------------------------------------------------------------


def test_registry_console_and_status_show_the_worker(attached: Role) -> None:
    worker = member("attached-0", attached)
    assert member_from_json(member_to_json(worker)) == worker
    (pool,) = pool_rows([worker], {"attached": 2}).values()
    assert (pool["role"], pool["desired"]) == ("attached", 2)
    assert (pool["computes_prompts"], pool["writes_answers"]) == ALONE
    assert worker_rows([worker], [], [])["attached-0"]["role"] == "attached"
    process = ProcessState("attached-0", "attached", 1, "serving")
    table = _table(ClusterState(1, "", "", "", processes=[process]), {worker.id: worker})
    assert [*table.columns[-1].cells] == [str(worker.load.free_blocks)]


async def test_conductor_exports_the_number_of_workers(attached: Role) -> None:
    cluster = ConductorHarness()
    await cluster.announce(member("a", attached))
    registry = CollectorRegistry()
    registry.register(ClusterGauges(cluster.membership, cluster.mirror, dict, ManualClock()))
    labels = {"role": "attached", "state": WorkerState.READY.value}
    assert registry.get_sample_value("baton_conductor_members", labels) == 1


def test_chart_knows_the_kind(attached: Role) -> None:
    row = "{role: attached, computes_prompts: true, writes_answers: true, runs_engine: false}"
    assert f"- {row}\n" in worker_kinds()


# -- no comparisons of roles ---------------------------------------------------------------------

ROOMS = (
    "baton", "command_line", "conductor", "decode_worker", "kvstore", "orchestrator",
    "prefill_worker", "router", "simulator",
)  # fmt: skip

FILES_WITH_ROLES = {
    "baton/core/worker_kinds.py": "the table",
    "baton/core/pool_plan.py": "the pools that are planned",
    "baton/pools/scaling_policy.py": "their bounds and budget",
    "baton/pools/kubernetes/open.py": "their settings",
}
"""The files that name a worker's role, each with the reason. Others ask ``WORKER_KINDS`` what a
worker does."""


def test_only_few_files_name_a_role_of_workers() -> None:
    naming = re.compile(r"\bRole\.(" + "|".join(role.name for role in WORKER_KINDS) + r")\b")
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if naming.search(path.read_text())
    }
    assert found == FILES_WITH_ROLES.keys()
