"""Tests what several models in one cluster keep apart: members, placements, plans and pools."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config import load_settings
from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.member import Member
from baton.core.placement import PlacementQuery
from baton.core.pool_name import pool_name, pool_names
from baton.core.states import Role, WorkerState
from baton.errors import Invalid, NotFound, Unavailable
from baton.pools.base import PoolWorker
from baton.pools.model_pools import ModelPools
from baton.registry.member_list import MemberList
from baton.registry.membership import Membership
from command_line.common_options import model_settings
from conductor.conductor import ConductorConfig
from conductor.model_conductors import KEEP_SECONDS, ModelConductors
from conductor.store_mirror import StoreMirror
from orchestrator.cluster_state import ClusterFolder
from orchestrator.launch_specs import LaunchSpecs
from testkit.fakes.registry import MemoryRegistry

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def worker(name: str, role: Role, model: str, fingerprint: str = "", born: int = 1) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(born), WorkerState.READY,
        model=model, block_tokens=16, numerics_fingerprint=fingerprint,
    )  # fmt: skip


CONDUCTOR = Member(
    WorkerId("c"), Role.CONDUCTOR, "c:1", Incarnation(1), WorkerState.READY, model=""
)
MEMBERS = [
    worker("a-p", PREFILL, "a"),
    worker("a-d", DECODE, "a"),
    worker("b-p", PREFILL, "b"),
    worker("b-d", DECODE, "b"),
    CONDUCTOR,
]


def query(model: str, request: str = "r") -> PlacementQuery:
    return PlacementQuery(
        RequestId(request), Epoch(1), TenantId("t"), 40, 8, (), frozenset(), model
    )


async def conductors(
    *members: Member, clock: ManualClock | None = None
) -> tuple[ModelConductors, MemoryRegistry, Membership]:
    clock = clock or ManualClock()
    registry = MemoryRegistry(clock)
    membership = Membership(registry, clock)
    for each in members:
        await registry.announce(each, 60.0)
    await membership.refresh()
    made = ModelConductors(membership, StoreMirror(), clock, ConductorConfig())
    return made, registry, membership


# -- members ------------------------------------------------------------------------------------


def test_the_members_of_a_model_are_its_workers_and_all_that_are_no_workers() -> None:
    members = MemberList(MEMBERS)
    assert members.models == {"a", "b"}
    assert [each.id for each in members.of_model("b").members] == ["b-d", "b-p", "c"]
    assert [each.id for each in members.of_model("c").members] == ["c"]
    assert members.of_model("b") is members.of_model("b")


def test_only_workers_of_the_same_model_must_compute_the_same_bits() -> None:
    mixed = [
        worker("a0", DECODE, "a", "11"),
        worker("a1", DECODE, "a", "22", born=2),
        worker("b0", DECODE, "b", "33", born=3),
        worker("c0", DECODE, "c", born=4),
    ]
    assert MemberList(mixed).incompatible_ids == {"a1"}
    assert [each.id for each in MemberList(mixed).ready(DECODE)] == ["a0", "b0", "c0"]


# -- placement ----------------------------------------------------------------------------------


async def test_requests_are_placed_on_workers_of_their_model() -> None:
    made, _, _ = await conductors(*MEMBERS)
    for number in range(8):
        for model in "ab":
            placement = made.place(query(model, f"r{number}"))
            assert placement.prefill is not None
            assert (placement.prefill.id, placement.decode.id) == (f"{model}-p", f"{model}-d")
    with pytest.raises(Unavailable, match="no worker is ready for model 'c'"):
        made.place(query("c"))


async def test_a_model_whose_workers_join_later_is_placed_then() -> None:
    made, registry, membership = await conductors(*MEMBERS[:2])
    made.set_leaving_workers(frozenset({WorkerId("b-p2")}))
    with pytest.raises(Unavailable, match="model 'b'"):
        made.place(query("b"))
    for each in (*MEMBERS[2:4], worker("b-p2", PREFILL, "b")):
        await registry.announce(each, 60.0)
    await membership.refresh()
    placements = [made.place(query("b", f"r{number}")) for number in range(16)]
    assert {each.prefill.id for each in placements if each.prefill} == {"b-p"}


async def test_each_model_has_a_plan_of_its_own() -> None:
    clock = ManualClock()
    made, _, _ = await conductors(*MEMBERS, clock=clock)
    assert (made.pool_plan(), made.pool_plan("a")) == (None, None)
    made.place(query("a"))
    clock.advance(5.0)
    made.plan_pools()
    assert list(made.pool_plans()) == ["a"]
    assert made.pool_plan() is made.pool_plan("a") is not None
    made.place(query("b"))
    clock.advance(5.0)
    made.plan_pools()
    assert made.pool_plan() is None  # which of them is wanted must be said
    assert made.pool_plan("b") is not None


async def test_a_model_without_workers_is_forgotten_after_an_hour() -> None:
    clock = ManualClock()
    made, registry, membership = await conductors(clock=clock)

    async def plan() -> list[str]:
        await membership.refresh()
        made.plan_pools()
        return list(made.pool_plans())

    for each in MEMBERS:
        await registry.announce(each, 1e6)
    await membership.refresh()
    for model in "ab":
        made.place(query(model))
    clock.advance(5.0)
    assert await plan() == ["a", "b"]
    forgotten = weakref.ref(made._by_model["b"])
    for each in MEMBERS[2:4]:
        await registry.withdraw(each.id, each.generation)
    clock.advance(KEEP_SECONDS - 0.5)
    assert await plan() == ["a", "b"]
    clock.advance(0.5)
    assert await plan() == ["a"]
    gc.collect()
    assert forgotten() is None
    with pytest.raises(Unavailable, match="no worker is ready for model 'b'"):
        made.place(query("b"))
    for each in MEMBERS[2:4]:
        await registry.announce(each, 1e6)
    assert await plan() == ["a"]
    assert made.place(query("b")).decode.id == "b-d"
    clock.advance(KEEP_SECONDS)
    assert await plan() == ["a", "b"]


# -- pools --------------------------------------------------------------------------------------


class FakePools:
    """Pools of one model, which record how they are changed."""

    def __init__(self, *ids: str) -> None:
        self.wanted: dict[Role, int] = {PREFILL: 1, DECODE: 1}
        self.ids = list(ids)

    async def sizes(self) -> Mapping[Role, int]:
        return self.wanted

    async def workers(self) -> list[PoolWorker]:
        return [PoolWorker(WorkerId(name), DECODE, "serving") for name in self.ids]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        self.wanted = self.wanted | dict(wanted)

    async def remove(self, worker_id: WorkerId) -> None:
        self.ids.remove(worker_id)


def test_pools_are_named_by_role_unless_there_are_several_models() -> None:
    assert pool_names(["a"]) == {
        "prefill": ("a", PREFILL),
        "decode": ("a", DECODE),
        "mixed": ("a", Role.MIXED),
    }
    names = [f"{model}/{role}" for model in "ab" for role in ("prefill", "decode", "mixed")]
    assert list(pool_names(["a", "b"])) == names
    assert pool_name("a", DECODE, ["a", "b"]) == "a/decode"
    assert pool_name("a", DECODE, []) == "decode"


async def test_pools_of_one_model_are_resized_and_drained() -> None:
    first, second = FakePools("a-decode-0"), FakePools("b-decode-0")
    pools = ModelPools({"a": first, "b": second})
    await pools.scale({"b/decode": 3})
    assert await pools.sizes() == {
        "a/prefill": 1, "a/decode": 1, "b/prefill": 1, "b/decode": 3
    }  # fmt: skip
    assert [each.pool for each in await pools.workers()] == ["a/decode", "b/decode"]
    await pools.remove(WorkerId("b-decode-0"))
    assert (first.ids, second.ids) == (["a-decode-0"], [])
    with pytest.raises(NotFound, match="the workers are: a-decode-0"):
        await pools.remove(WorkerId("b-decode-0"))


@pytest.mark.parametrize("wrong", [{"decode": 2}, {"a/decode": 2, "c/decode": 1}, {"a/store": 1}])
async def test_an_unknown_pool_changes_nothing(wrong: dict[str, int]) -> None:
    pools = ModelPools({"a": FakePools(), "b": FakePools()})
    before = dict(await pools.sizes())
    with pytest.raises(Invalid, match="the pools are a/prefill, a/decode, a/mixed, b/prefill"):
        await pools.scale(wrong)
    assert await pools.sizes() == before


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {"model": None}),
        (["/models/x"], {"model": "/models/x", "models": {}}),
        (["chat=/models/x"], {"model": None, "models": {"chat": "/models/x"}}),
        (
            ["/models/x", "org/y", "chat=/z"],
            {"model": None, "models": {"x": "/models/x", "y": "org/y", "chat": "/z"}},
        ),
    ],
)
def test_models_are_named_on_the_command_line(
    given: list[str], settings: dict[str, object]
) -> None:
    assert model_settings(given) == settings


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(Invalid, match=r"two models are named 'x'.*--model NAME=/b/x"):
        model_settings(["/a/x", "/b/x"])


def test_a_model_name_that_no_pool_can_have_is_refused() -> None:
    with pytest.raises(Invalid, match="a model's name must be"):
        load_settings(models={"a/b": "/models/x"})


def test_workers_of_each_model_get_its_settings(tmp_path: Path) -> None:
    settings = load_settings(models={"a": "/models/x", "b": "/models/y"})
    specs = LaunchSpecs(settings, ClusterFolder(tmp_path, "test")).by_model()
    workers = {model: [each.worker(DECODE), each.worker(DECODE)] for model, each in specs.items()}
    assert [[each.id for each in pool] for pool in workers.values()] == [
        ["a-decode-0", "a-decode-1"],
        ["b-decode-0", "b-decode-1"],
    ]
    environment = workers["b"][0].environment
    assert environment["BATON_MODEL"] == "/models/y"
    assert environment["BATON_SERVED_MODEL_NAME"] == "b"


@pytest.mark.parametrize(
    ("given", "expected"), [([], "demo"), (["/x/y"], "y"), (["a=demo"], "a"), (["o/n@main"], "n")]
)
def test_workers_of_the_only_model_have_the_name_that_routers_expect(
    tmp_path: Path, given: list[str], expected: str
) -> None:
    settings = load_settings(**model_settings(given))
    ((name, specs),) = LaunchSpecs(settings, ClusterFolder(tmp_path, "test")).by_model().items()
    worker = specs.worker(DECODE)
    assert list(settings.served_models) == [name] == [expected]
    assert worker.environment["BATON_SERVED_MODEL_NAME"] == expected
    assert worker.id == "decode-0"


def test_model_on_the_command_line_replaces_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_MODELS", "a=/models/a,b=/models/b")
    assert load_settings(**model_settings([])).served_models == {"a": "/models/a", "b": "/models/b"}
    assert load_settings(**model_settings(["/models/c"])).served_models == {"c": "/models/c"}


def test_a_member_without_a_model_belongs_to_a_model_without_a_name() -> None:
    nameless = replace(MEMBERS[0], model="")
    assert MemberList([nameless]).of_model("").members == [nameless]
