"""Placement decisions as a script: scenarios told in prose, and what was decided.

    pytest tests/golden --rewrite

writes ``placement.txt`` anew; the diff is for review.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.core.ids import WorkerId
from baton.errors import BatonError
from conductor.policy.decision import ScoredWorker
from conductor.policy.policies import DEFAULT_POLICY, PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import (
    AdmissionRates,
    DecodeView,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
)
from tests.fleet import FakeCache, decode, prefill, query, snapshot

SCRIPT = Path(__file__).with_name("placement.txt")


@dataclass
class Scene:
    """Two prefill and two decode workers, idle and empty, unless a scenario says otherwise. The
    request has eight blocks and five tokens; a worker reads a hundred tokens a second."""

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
    yield Scene("All workers are idle and empty: the ring decides.")
    yield Scene(
        "p0 holds six of eight blocks, p1 two: the cache decides.",
        cache=FakeCache({"p0": 6, "p1": 2}),
    )
    yield Scene(
        "p0 holds six blocks, and three seconds of work that may wait: reuse is still the cheaper.",
        prefills=[prefill("p0", (9.0, 3.0)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "With five seconds of work it no longer is.",
        prefills=[prefill("p0", (9.0, 5.0)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "p0 holds six blocks, but work is due there first, and it would be late: p1 reads.",
        prefills=[prefill("p0", (2.95, 2.9)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
    )
    yield Scene(
        "p0 holds six blocks, but somebody there has no time to lose: p1 reads.",
        prefills=[prefill("p0", (2.4, 2.2)), prefill("p1")],
        cache=FakeCache({"p0": 6}),
        query=query(first_token_seconds=1.0),
    )
    yield Scene(
        "The whole prompt is cached; its last tokens are computed all the same.",
        cache=FakeCache({"p1": 8}),
    )
    yield Scene(
        "Another host's store has seven blocks: they are fetched, which is quicker.",
        cache=FakeCache({"p0": 2}, StoredPrefix("s9", 7)),
    )
    yield Scene(
        "Of nine workers, the ring's three, two holders and one of the least loaded are scored.",
        prefills=[prefill(f"p{n}", (30.0, 1.0 * n + 0.5)) for n in range(9)],
        cache=FakeCache({"p7": 3, "p8": 1}),
        query=query(first_token_seconds=30.0),
    )
    yield Scene(
        "Everybody shares four blocks: the fifth is the key to the ring.",
        prefills=[prefill(f"p{n}") for n in range(8)],
        cache=FakeCache(shares=[0.9] * 4),
    )
    yield Scene(
        "d0 has promised more of its memory: d1 writes.",
        decodes=[decode("d0", 3000), decode("d1", 1000)],
    )
    yield Scene(
        "d1 has promised less, but its steps take too long: d0 writes.",
        decodes=[decode("d0", 3000), decode("d1", 1000, num_requests=40)],
    )
    yield Scene(
        "Both would write too slowly: nobody is made to wait for each word.",
        decodes=[decode(name, 1000, num_requests=40) for name in ("d0", "d1")],
    )
    yield Scene(
        "No decode worker will have memory in time.",
        decodes=[decode(name, 9950, num_requests=38) for name in ("d0", "d1")],
        query=query("large", 5000, first_token_seconds=60.0),
    )
    yield Scene(
        "The same, but it was let in before, and its worker died.",
        decodes=[decode(name, 9950, num_requests=38) for name in ("d0", "d1")],
        query=query("large", 5000, first_token_seconds=60.0, promised=True),
    )
    yield Scene(
        "Both prefill workers have too much that is due: it is refused at once.",
        prefills=[prefill(name, (2.2, 2.0), (2.9, 0.9)) for name in ("p0", "p1")],
    )
    yield Scene(
        "The same, but nobody has measured anything yet: a guess refuses nobody.",
        prefills=[prefill(name, (2.2, 2.0), (2.9, 0.9), measured=False) for name in ("p0", "p1")],
    )
    yield Scene(
        "Long prompts were refused more often than short ones: this short one leaves them room.",
        decodes=[decode(name, 9000, num_requests=38) for name in ("d0", "d1")],
        admitted=AdmissionRates((200, 400, 800), (1.0, 1.0, 1.0, 0.9), large_tokens=4000),
    )
    yield Scene(
        "Both prefill workers have failed this request: a decode worker does it alone.",
        query=excluding("p0", "p1"),
    )
    yield Scene("There is no decode worker: a prefill worker does it alone.", decodes=[])
    yield Scene("There is nobody.", prefills=[], decodes=[])
    yield Scene(
        "It is larger than any worker's memory.",
        decodes=[decode("d0", 0, 100), decode("d1", 0, 120)],
    )
    for policy in PLACEMENT_POLICIES[1:]:
        yield Scene(
            f"{policy}: p0 holds six blocks and has work, p1 two; d1 has more to do.",
            prefills=[prefill("p0", (9.0, 1.0), queued_tokens=100), prefill("p1")],
            decodes=[decode("d0", 1000), decode("d1", 3000)],
            cache=FakeCache({"p0": 6, "p1": 2}),
            policy=policy,
        )


def told(scene: Scene) -> str:
    try:
        decision = get_policy(scene.policy)(scene.snapshot(), scene.query)
    except BatonError as error:
        return f"  refused: {type(error).__name__}: {error}\n"
    first = decision.prefill or "none"
    lines = [
        f"  prefill {first}, decode {decision.decode}: {decision.reason}",
        f"    first token after {decision.ttft_seconds:.3f} s, then every "
        f"{decision.tbt_seconds:.3f} s",
    ]
    if decision.reuse is not None:
        lines.append(f"    fetches {decision.reuse.num_blocks} blocks from {decision.reuse.node}")
    lines += [f"    {_reader(scored)}" for scored in decision.prefill_scores]
    lines += [f"    {_writer(scored)}" for scored in decision.decode_scores]
    return "\n".join(lines) + "\n"


def _reader(scored: ScoredWorker) -> str:
    return (
        f"{scored.worker} scores {scored.score:.3f}: {scored.local_blocks} blocks at hand, "
        f"{scored.fetched_blocks} to fetch, starts in {scored.queue_seconds:.3f} s, "
        f"computes {scored.service_seconds:.3f} s{_late(scored)}"
    )


def _writer(scored: ScoredWorker) -> str:
    step = f"a token every {scored.service_seconds:.3f} s"
    return f"{scored.worker} scores {scored.score:.3f}: {step}{_late(scored)}"


def _late(scored: ScoredWorker) -> str:
    return f", {scored.late_seconds:.3f} s late" if scored.late_seconds else ""


def test_placement_script(request: pytest.FixtureRequest) -> None:
    script = "\n".join(f"{scene.prose}\n{told(scene)}" for scene in scenarios())
    if request.config.getoption("--rewrite"):
        SCRIPT.write_text(script)
    assert script == SCRIPT.read_text()


def test_decisions_are_repeatable() -> None:
    """A policy is pure: the same snapshot gives the same decision, however often."""
    for scene in scenarios():
        seen, place = scene.snapshot(), get_policy(scene.policy)
        outcomes = []
        for _ in range(2):
            try:
                outcomes.append(repr(place(seen, scene.query)))
            except BatonError as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]
