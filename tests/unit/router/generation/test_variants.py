"""Tests that only workers of one variant of a model (weights, KV layout, lossy codec) serve a
request together, and how requests are divided among variants while new weights are rolled out."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock, SystemClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, TokenId, WorkerId
from baton.core.kv_codec import KvCodecName, KvCodecs
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import FinishReason, RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.variant import Variant
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.member_list import MemberList
from baton.registry.membership import Membership
from conductor.conductor import Conductor, ConductorConfig
from conductor.store_mirror import StoreMirror
from router.generation.block_key_hasher import block_key_hasher
from router.generation.cluster import Cluster
from router.generation.generation import Generation
from router.generation.generation_context import GenerationContext
from router.generation.model_workers import ModelWorkers, variant_capacities
from router.generation.record import GenerationRecord
from router.generation.ring_placer import RingPlacer
from router.openai.encoders.completion import CompletionEncoder
from router.openai.encoders.encoder import ResponseMetadata, system_fingerprint
from router.serving.answer_encoder import Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import ChoiceDelta
from testkit.fakes.registry import MemoryRegistry
from testkit.fakes.workers import FakeWorker, MemoryPlacer, MemoryWorkerConnections
from tests.sim.worker_cluster import cluster, collect, is_finished, request
from tests.unit.router.generation.test_generation import FAST, PROMPT, answer, settle

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
ROLES = {"p": PREFILL, "d": DECODE, "m": MIXED}
OLD, NEW = Variant("0a", "f32", 16), Variant("0b", "f32", 16)


def worker(name: str, variant: Variant = OLD, **fields: object) -> Member:
    """Return a ready worker; the first letter of its name says its role."""
    member = Member(
        WorkerId(name), ROLES[name[0]], f"{name}:1", Incarnation(1), WorkerState.READY,
        model_digest=variant.model_digest, kv_dtype=variant.kv_dtype,
        block_tokens=variant.block_tokens, kv_layout=variant.kv_layout,
    )  # fmt: skip
    return replace(member, **fields)  # type: ignore[arg-type]


# -- what a variant is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"model_digest": "0b"}, False),
        ({"kv_dtype": "bf16"}, False),
        ({"block_tokens": 32}, False),
        ({"kv_layout": "f32[1x2x16x1x1]"}, False),
        ({"kv_codecs": KvCodecs(store=KvCodecName.INT4)}, False),
        ({"kv_codecs": KvCodecs(wire=KvCodecName.LOSSLESS)}, True),
        ({"role": DECODE, "host": "h", "device": "cuda", "max_model_tokens": 7}, True),
    ],
)
def test_weights_layout_and_lossy_codec_make_a_variant(
    change: dict[str, object], is_same: bool
) -> None:
    before, after = worker("p0").variant, worker("p0", **change).variant
    assert (before == after, before.id == after.id) == (is_same, is_same)


def test_worker_that_announces_no_layout_is_of_another_variant() -> None:
    """Members of the previous version don't announce it."""
    new = worker("p0", replace(OLD, kv_layout="f32[1x2x16x1x1]"))
    assert member_from_json(member_to_json(new)) == new
    fields = orjson.loads(member_to_json(new))
    del fields["kv_layout"]
    assert member_from_json(orjson.dumps(fields)).variant == OLD


async def test_variants_of_a_model_are_logged_when_they_change() -> None:
    registry = MemoryRegistry(ManualClock())
    membership = Membership(registry, ManualClock())
    with capture_logs() as logs:
        for member in (worker("p0", NEW), worker("d0"), worker("d0", NEW)):
            await registry.announce(member, 60.0)
            await membership.refresh()
            await membership.refresh()
    mixed = {"": sorted([OLD.id, NEW.id])}
    assert [(each["event"], each["variants"]) for each in logs] == [
        ("model_variants", mixed),
        ("model_variants", {}),
    ]


def test_ready_workers_of_a_variant() -> None:
    members = MemberList([worker("p0"), worker("p1", NEW), worker("d0", NEW)])
    assert [each.id for each in members.ready(PREFILL)] == ["p0", "p1"]
    assert [each.id for each in members.ready(PREFILL, NEW.id)] == ["p1"]
    assert members.ready(DECODE, OLD.id) == []


# -- shares of the traffic -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "capacities"),
    [
        ([worker("p0"), worker("d0"), worker("d1")], {OLD: 3}),
        # Each pool of an unpaired variant serves alone.
        ([worker("p0", NEW), worker("d0"), worker("d1")], {OLD: 2, NEW: 1}),
        # The old variant has half of the prefill and a quarter of the decode workers.
        (
            [worker("p0"), worker("p1", NEW), worker("d0")] + [worker(f"d{n}", NEW) for n in "123"],
            {OLD: 1.5, NEW: 3},
        ),
        ([worker("m0"), worker("m1", NEW), worker("m2", NEW)], {OLD: 1, NEW: 2}),
        ([worker("p0"), worker("d0"), worker("d1", NEW), worker("m0", NEW)], {OLD: 1.5, NEW: 2}),
        ([worker("p0", replace(NEW, block_tokens=0)), worker("d0")], {OLD: 1}),
    ],
)
def test_capacity_of_a_variant(workers: list[Member], capacities: dict[Variant, float]) -> None:
    assert variant_capacities(workers) == capacities


async def ranking(*workers: Member) -> ModelWorkers:
    registry = MemoryRegistry(ManualClock())
    for each in workers:
        await registry.announce(each, 60.0)
    members = Cluster(registry, ManualClock())
    await members.refresh()
    return members.workers_of("", 4096)


async def test_requests_follow_the_capacity_and_move_only_to_the_variant_that_grows() -> None:
    """A request's key, such as its session, keeps its variant unless the other one grows."""
    keys = [f"session {number}" for number in range(2000)]
    decodes = [f"d{number}" for number in range(4)]
    before: dict[str, Variant] = {}
    for num_new in range(5):
        variants = [NEW if number < num_new else OLD for number in range(4)]
        workers = await ranking(*map(worker, decodes, variants))
        first = {key: workers.rank_variants(key)[0] for key in keys}
        share = Counter(first.values())[NEW] / len(keys)
        assert abs(share - num_new / 4) < 0.04
        assert all(first[key] == NEW for key, variant in before.items() if variant == NEW)
        before = first
    assert workers.rank_variants("any") == (NEW,)
    assert (await ranking()).rank_variants("any") == ()


# -- placement -----------------------------------------------------------------------------------

CLUSTERS = [
    # New prefill first, new decode first, both half-way, mixed workers beside them.
    [worker("p0", NEW), worker("p1", NEW), worker("d0"), worker("d1")],
    [worker("p0"), worker("p1"), worker("d0", NEW), worker("d1", NEW)],
    [worker("p0", NEW), worker("p1"), worker("d0"), worker("d1", NEW)],
    [worker("p0", NEW), worker("d0"), worker("m0", NEW), worker("m1")],
]


def query(name: str, variant: str, keys: tuple[BlockKey, ...] = ()) -> PlacementQuery:
    return PlacementQuery(
        RequestId(name), Epoch(1), TenantId(""), 64, 16, keys, frozenset(), "", variant=variant
    )


async def conductor_of(*workers: Member) -> Conductor:
    clock = ManualClock(1.0)
    registry = MemoryRegistry(clock)
    membership = Membership(registry, clock)
    for each in workers:
        await registry.announce(each, 60.0)
    await membership.refresh()
    return Conductor(membership, StoreMirror(), clock, ConductorConfig())


@pytest.mark.parametrize("workers", CLUSTERS)
async def test_conductor_and_ring_place_within_one_variant(workers: list[Member]) -> None:
    """Without a partner of its variant, a worker serves the whole request."""
    conductor, ring = await conductor_of(*workers), RingPlacer(await ranking(*workers))
    by_id = {each.id: each for each in workers}
    for variant in (OLD, NEW):
        own = [each for each in workers if each.variant == variant]
        is_pair = {each.role for each in own} == {PREFILL, DECODE}
        for number in range(20):
            asked = query(f"r{number}", variant.id)
            for placed in (conductor.place(asked), await ring.place(asked)):
                assert {by_id[each.id].variant for each in placed.workers} == {variant}
                assert (len(placed.workers) == 2) == is_pair


async def test_conductor_places_for_no_variant_that_it_does_not_know() -> None:
    conductor = await conductor_of(worker("p0"), worker("d0"))
    with pytest.raises(Unavailable):
        conductor.place(query("r", NEW.id))


async def test_conductor_chooses_the_variant_of_most_workers_for_routers_that_name_none() -> None:
    conductor = await conductor_of(worker("p0"), worker("p1", NEW), worker("d0"), worker("m0", NEW))
    placed = conductor.place(query("r", ""))
    assert {each.id for each in placed.workers} in ({"p0", "d0"}, {"m0"})


async def test_cached_blocks_count_by_the_block_size_of_the_variant() -> None:
    small = replace(NEW, block_tokens=8)
    conductor = await conductor_of(
        worker("d0", kv_bytes_per_token=2), worker("d1", small, kv_bytes_per_token=1)
    )
    conductor.snapshot()
    found = [conductor.snapshot(variant.id) for variant in (OLD, small)]
    assert [(each.block_tokens, each.kv_bytes_per_token) for each in found] == [(16, 2), (8, 1)]


# -- generations ---------------------------------------------------------------------------------


class VariantPlacer:
    """Places requests on the workers of each variant. ``errors`` are those of its placements."""

    def __init__(self, **by_variant: Sequence[FakeWorker]) -> None:
        self.placers = {
            variant.id: MemoryPlacer([], by_variant[name])
            for name, variant in (("old", OLD), ("new", NEW))
        }
        self.errors: dict[str, BatonError] = {}
        self.queries: list[PlacementQuery] = []

    async def place(self, query: PlacementQuery) -> Placement:
        self.queries.append(query)
        if query.variant in self.errors:
            raise self.errors[query.variant]
        return await self.placers[query.variant].place(query)


class Rollout:
    """A generation over two old workers and a new one. The new weights' next token is the old
    weights' plus 1."""

    def __init__(self, variant: Variant = OLD) -> None:
        def new_answer(tokens: Sequence[TokenId], spec: RequestSpec) -> TokenId:
            return TokenId(answer(tokens, spec) + 1)

        self.old = [FakeWorker(name, answer, automatic=False) for name in ("d0", "d1")]
        self.new = FakeWorker("d2", new_answer, automatic=False)
        self.placer = VariantPlacer(old=self.old, new=[self.new])
        self.record = GenerationRecord(RequestId("r"), 0.0, len(PROMPT))
        spec = RequestSpec(RequestId("r"), Epoch(1), PROMPT * 8, 24, SamplingParams(max_tokens=6))
        context = GenerationContext(
            self.placer, MemoryWorkerConnections(*self.old, self.new), SystemClock(), FAST,
            rank_variants=lambda key: (NEW, OLD),
        )  # fmt: skip
        keys = block_key_hasher(variant, b"").compute_keys(spec.token_ids)
        self._generation = Generation(context, spec, TenantId("t"), "m", variant, keys, self.record)
        self.tokens: list[TokenId] = []
        self.task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for output in self._generation.outputs():
            self.tokens += output.token_ids

    async def step_until(self, num_tokens: int) -> None:
        """Let the workers generate tokens until the answer has ``num_tokens``."""
        while len(self.tokens) < num_tokens:
            await settle()
            for each in (*self.old, self.new):
                each.step()
            await settle()

    async def finish(self) -> None:
        await self.step_until(6)
        await self.task

    def expected(self, num_old: int) -> list[TokenId]:
        """Return the answer if its first ``num_old`` tokens are those of the old weights."""
        tokens, spec = [*PROMPT * 8], self._generation._spec
        for index in range(6):
            tokens.append(TokenId(answer(tokens, spec) + (index >= num_old)))
        return tokens[24:]


def asked(rollout: Rollout) -> list[tuple[str, int]]:
    """Return the variant and the number of tokens of each query."""
    return [(each.variant, each.num_tokens) for each in rollout.placer.queries]


async def test_answer_that_has_begun_stays_with_its_variant_as_long_as_a_worker_is_left() -> None:
    rollout = Rollout()
    await rollout.step_until(2)
    rollout.old[0].kill()
    await rollout.finish()
    assert rollout.tokens == rollout.expected(num_old=6)
    assert asked(rollout) == [(OLD.id, 24), (OLD.id, 26)]
    assert [job.spec.variant for job in rollout.old[1].submitted] == [OLD.id]


async def test_answer_continues_with_other_weights_rather_than_fail() -> None:
    """Its keys, the tokens to compute and the record are then those of the other variant."""
    rollout = Rollout()
    await rollout.step_until(2)
    for each in rollout.old:
        each.kill()
        rollout.placer.placers[OLD.id].decode.remove(each)
    with capture_logs() as logs:
        await rollout.finish()
    assert rollout.tokens == rollout.expected(num_old=2)
    assert rollout.record.variant == NEW and rollout.placer.queries[-1].variant == NEW.id
    [job] = rollout.new.submitted
    assert (job.spec.variant, job.task) == (NEW.id, Task.PREFILL_AND_DECODE)
    keys = block_key_hasher(NEW, b"").compute_keys(job.spec.token_ids)
    assert len(keys) == 1 and rollout.placer.queries[-1].block_keys == keys
    [changed] = [each for each in logs if each["event"] == "answer_changes_variant"]
    assert changed["num_tokens"] == 2


async def test_kv_of_a_draining_worker_is_not_given_to_another_variant() -> None:
    rollout = Rollout()
    await rollout.step_until(3)
    rollout.placer.placers[OLD.id].decode.clear()
    rollout.old[0].drain(FinishReason.MIGRATED)
    with capture_logs() as logs:
        await rollout.finish()
    assert [each["event"] for each in logs] == ["request_migrates", "answer_changes_variant"]
    assert rollout.tokens == rollout.expected(num_old=3)
    [job] = rollout.new.submitted
    assert (job.source, len(job.spec.token_ids)) == (None, 24 + 3)


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after_seconds=3.0), Unavailable("gone"), Invalid("too long")]
)
async def test_request_that_has_no_token_yet_takes_any_variant(error: BatonError) -> None:
    rollout = Rollout()
    rollout.placer.errors[OLD.id] = error
    await rollout.finish()
    assert rollout.tokens == rollout.expected(num_old=0)
    assert asked(rollout) == [(OLD.id, 24), (NEW.id, 24)]


@pytest.mark.parametrize(
    ("old", "new", "raised"),
    [
        (Overloaded("full", retry_after_seconds=3.0), Unavailable("gone"), Overloaded),
        (Invalid("too long"), Unavailable("gone"), Unavailable),
        (Invalid("too long"), Invalid("too long"), Invalid),
    ],
)
async def test_error_of_several_variants(
    old: BatonError, new: BatonError, raised: type[BatonError]
) -> None:
    rollout = Rollout()
    rollout.placer.errors = {OLD.id: old, NEW.id: new}
    with pytest.raises(raised):
        await rollout.task


# -- workers -------------------------------------------------------------------------------------


async def test_worker_turns_away_requests_that_were_placed_for_another_variant() -> None:
    """It may have restarted with other weights, at the same address."""
    async with cluster() as running:
        node = running.decode
        for number, variant in enumerate(("", node.worker._variant_id, NEW.id)):
            stream = node.worker.open_stream()
            spec = replace(request(f"r{number}", [1, 2, 3], 2), variant=variant)
            stream.submit(spec, Task.PREFILL_AND_DECODE, None)
            [*_, last] = await collect(stream, is_finished)
            is_other = variant == NEW.id
            assert last.finish_reason is (
                FinishReason.REROUTED if is_other else FinishReason.LENGTH
            )


# -- the API -------------------------------------------------------------------------------------


def test_chunks_name_the_fingerprint_of_the_weights_that_generated_them() -> None:
    """An answer that isn't streamed names the last one."""
    record = GenerationRecord(RequestId("r"), 0.0, 1, variant=OLD)
    metadata = ResponseMetadata("r", 1, "m", False, False, records=[record])
    encoder = CompletionEncoder(metadata, None, with_logprobs=False)  # type: ignore[arg-type]

    def named(data: bytes) -> str:
        return str(orjson.loads(data.removeprefix(b"data: "))["system_fingerprint"])

    delta = ChoiceDelta(0, "a", (), (), None)
    found = []
    for variant in (OLD, NEW):
        record.variant = variant
        found += [named(encoder.encode_text(0, "a")), named(encoder.encode_chunk(delta))]
    found.append(named(encoder.encode_response([ChoiceResult(0, ())], Usage(1, 1, 0))))
    old, new = map(system_fingerprint, (OLD, NEW))
    assert old != new and found == [old, old, new, new, new]
