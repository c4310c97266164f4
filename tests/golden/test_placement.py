"""Tests that each placement scenario, described in prose, gets the decision in ``placement.txt``.

    pytest tests/golden --rewrite

rewrites the file, so that changed decisions can be reviewed as a diff.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.core.ids import WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.core.placement import ScoredCodec, ScoredWorker
from baton.errors import BatonError
from conductor.policy.policies import DEFAULT_POLICY, PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import (
    AdmissionRates,
    DecodeView,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
)
from tests.cluster_snapshots import FakeCache, decode, prefill, query, snapshot

SCRIPT = Path(__file__).with_name("placement.txt")


@dataclass
class Scene:
    """A scenario. Unless it says otherwise, there are two prefill and two decode workers, idle and
    with empty caches; the request has eight blocks and five tokens; and a worker prefills 100
    tokens per second."""

    prose: str
    prefills: list[PrefillView] = field(default_factory=lambda: [prefill("p0"), prefill("p1")])
    decodes: list[DecodeView] = field(default_factory=lambda: [decode("d0"), decode("d1")])
    cache: FakeCache = field(default_factory=FakeCache)
    admitted: AdmissionRates = field(default_factory=AdmissionRates)
    query: PolicyQuery = field(default_factory=query)
    policy: str = DEFAULT_POLICY

    def snapshot(self) -> Snapshot:
        return snapshot(self.prefills, self.decodes, self.cache, admitted=self.admitted)


def excluding(*names: str) -> PolicyQuery:
    return query(excluded=frozenset(WorkerId(name) for name in names))


def scenarios() -> Iterator[Scene]:
    yield Scene("All workers are idle, with empty caches: the hash ring decides.")
    yield Scene(
        "p0 has cached six of eight blocks, p1 two: the cache decides.",
        cache=FakeCache({"p0": 6, "p1": 2}),
    )
    yield Scene(
        "p0 has cached six blocks, and three seconds of work that may wait: reuse is faster.",
        prefills=[prefill("p0", (9.0, 3.0)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "p0 has cached six blocks, and five seconds of work that may wait: reuse is slower.",
        prefills=[prefill("p0", (9.0, 5.0)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "p0 has cached six blocks, but its queued work would be late: p1 prefills.",
        prefills=[prefill("p0", (2.95, 2.9)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "p0 has cached six blocks, but a request in its queue has no slack: p1 prefills.",
        prefills=[prefill("p0", (2.4, 2.2)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
        query=query(ttft_slo_seconds=1.0),
    )
    yield Scene(
        "The whole prompt is cached; its last tokens are computed anyway.",
        cache=FakeCache({"p1": 8}),
    )
    yield Scene(
        "Another host's store has seven blocks: they are fetched, which is faster.",
        cache=FakeCache({"p0": 2}, StoredPrefix("s9", 7)),
    )
    yield Scene(
        "Of nine workers, few are scored: from the ring, with cached blocks, and with little load.",
        prefills=[prefill(f"p{n}", (30.0, 1.0 * n + 0.5)) for n in range(9)],
        cache=FakeCache({"p7": 3, "p8": 1}),
        query=query(ttft_slo_seconds=30.0),
    )
    yield Scene(
        "All requests share four blocks: the fifth is the key for the ring.",
        prefills=[prefill(f"p{n}") for n in range(8)],
        cache=FakeCache(shares=[0.9] * 4),
    )
    yield Scene(
        "d0 has reserved more of its memory: d1 decodes.",
        decodes=[decode("d0", 3000), decode("d1", 1000)],
    )
    yield Scene(
        "d1 has reserved less, but its steps take too long: d0 decodes.",
        decodes=[decode("d0", 3000), decode("d1", 1000, num_requests=40)],
    )
    yield Scene(
        "Both decode workers would exceed the inter-token latency SLO: the request is refused.",
        decodes=[decode(name, 1000, num_requests=40) for name in ("d0", "d1")],
    )
    yield Scene(
        "No decode worker will have memory in time.",
        decodes=[decode(name, 9950, num_requests=38) for name in ("d0", "d1")],
        query=query("large", 5000, ttft_slo_seconds=60.0),
    )
    yield Scene(
        "No decode worker will have memory in time, but the request has already been admitted.",
        decodes=[decode(name, 9950, num_requests=38) for name in ("d0", "d1")],
        query=query("large", 5000, ttft_slo_seconds=60.0, must_admit=True),
    )
    yield Scene(
        "Both prefill workers have too much due work: the request is refused at once.",
        prefills=[prefill(name, (2.2, 2.0), (2.9, 0.9)) for name in ("p0", "p1")],
    )
    yield Scene(
        "Both have too much due work, but only by an estimate: the request is not refused.",
        prefills=[
            prefill(name, (2.2, 2.0), (2.9, 0.9), is_measured=False) for name in ("p0", "p1")
        ],
    )
    yield Scene(
        "Long prompts were refused more often than short ones: some memory is kept for them.",
        decodes=[decode(name, 9000, num_requests=38) for name in ("d0", "d1")],
        admitted=AdmissionRates((200, 400, 800), (1.0, 1.0, 1.0, 0.9), large_tokens=4000),
    )
    yield Scene(
        "Both prefill workers have failed this request: a decode worker also prefills.",
        query=excluding("p0", "p1"),
    )
    yield Scene("There is no decode worker: a prefill worker also decodes.", decodes=[])
    yield Scene("There is no worker.", prefills=[], decodes=[])
    yield Scene(
        "The request is larger than any worker's memory.",
        decodes=[decode("d0", 0, 100), decode("d1", 0, 120)],
    )
    for policy in PLACEMENT_POLICIES[1:]:
        yield Scene(
            f"{policy}: p0 has cached six blocks and has work, p1 two; d1 has more work.",
            prefills=[prefill("p0", (9.0, 1.0), queued_tokens=100), prefill("p1")],
            decodes=[decode("d0", 1000), decode("d1", 3000)],
            cache=FakeCache({"p0": 6, "p1": 2}),
            policy=policy,
        )


def codec_scenarios() -> Iterator[Scene]:
    """Scenarios of workers with codecs: the link has 1,000 tokens per second, or twice as many in
    lossless, and four times as many in int4. Encoding and decoding is ten times as fast as the
    link, unless it says otherwise."""
    codecs = (
        CodecSpeed(KvCodecName.LOSSLESS, 0.5, 1e7, 1e7),
        CodecSpeed(KvCodecName.INT4, 0.25, 1e7, 1e7),
    )
    slow = tuple(replace(each, encode_bytes_per_second=5e5) for each in codecs)

    def workers(
        encoders: tuple[CodecSpeed, ...], *hosts: str
    ) -> tuple[list[PrefillView], list[DecodeView]]:
        return (
            [prefill("p0", wire_codecs=encoders, host=hosts[0])],
            [decode("d0", wire_codecs=codecs, host=hosts[1])],
        )

    yield Scene("KV may travel in int4, which is fastest.", *workers(codecs, "a", "b"))
    yield Scene(
        "KV may travel in int4, but the request wants exact KV: it travels in lossless.",
        *workers(codecs, "a", "b"),
        query=query(exact_kv=True),
    )
    yield Scene(
        "Encoding is slower than the link: KV travels raw.",
        *workers(slow, "a", "b"),
    )
    yield Scene("Both workers are on one host: KV travels raw.", *workers(codecs, "a", "a"))
    yield Scene(
        "Another host's store has seven blocks in int4: fetching them takes a quarter of the time.",
        prefills=[prefill("p0", store_codec=codecs[1])],
        decodes=[decode("d0")],
        cache=FakeCache(stored_prefix=StoredPrefix("s9", 7)),
    )


def render(scene: Scene) -> str:
    """Return the decision for a scenario, as text."""
    try:
        decision = get_policy(scene.policy)(scene.snapshot(), scene.query)
    except BatonError as error:
        return f"  refused: {type(error).__name__}: {error}\n"
    first = decision.prefill or "none"
    lines = [
        f"  prefill {first}, decode {decision.decode}: {decision.reason}",
        f"    first token after {decision.ttft_seconds:.3f} s, then every "
        f"{decision.itl_seconds:.3f} s",
    ]
    if decision.fetch_source is not None:
        lines.append(
            f"    fetches {decision.fetch_source.num_blocks} blocks "
            f"from {decision.fetch_source.node}"
        )
    lines += [f"    {_prefill_score(scored)}" for scored in decision.prefill_scores]
    lines += [f"    {_decode_score(scored)}" for scored in decision.decode_scores]
    lines += [f"    {_codec_score(scored)}" for scored in decision.codec_scores]
    return "\n".join(lines) + "\n"


def _prefill_score(scored: ScoredWorker) -> str:
    return (
        f"{scored.worker} scores {scored.score:.3f}: {scored.local_blocks} blocks cached, "
        f"{scored.fetched_blocks} to fetch, starts in {scored.queue_seconds:.3f} s, "
        f"prefill takes {scored.service_seconds:.3f} s{_late(scored)}"
    )


def _decode_score(scored: ScoredWorker) -> str:
    step = f"a token every {scored.service_seconds:.3f} s"
    return f"{scored.worker} scores {scored.score:.3f}: {step}{_late(scored)}"


def _codec_score(scored: ScoredCodec) -> str:
    return f"{scored.codec}: decoding can start after {scored.decode_start_seconds:.3f} s"


def _late(scored: ScoredWorker) -> str:
    return f", {scored.late_seconds:.3f} s late" if scored.late_seconds else ""


def test_placement_decisions_equal_the_golden_script(request: pytest.FixtureRequest) -> None:
    scenes = (*scenarios(), *codec_scenarios())
    script = "\n".join(f"{scene.prose}\n{render(scene)}" for scene in scenes)
    if request.config.getoption("--rewrite"):
        SCRIPT.write_text(script)
    assert script == SCRIPT.read_text(), "pytest tests/golden --rewrite, and look at the diff"


def test_decisions_are_repeatable() -> None:
    """A policy is pure: the same snapshot always gives the same decision."""
    for scene in (*scenarios(), *codec_scenarios()):
        cluster_snapshot, place = scene.snapshot(), get_policy(scene.policy)
        outcomes = []
        for _ in range(2):
            try:
                outcomes.append(repr(place(cluster_snapshot, scene.query)))
            except BatonError as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]
