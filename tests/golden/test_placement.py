"""Placement decisions as a script: scenarios told in prose, and what was decided.

    pytest tests/golden --rewrite

writes ``placement.txt`` anew; the diff is for review.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.ids import BlockKey, Generation, RequestId, WorkerId
from baton.core.load import Load
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import BatonError
from conductor.policy.placement import PlacementConfig, place
from conductor.policy.snapshot import Decision, Query, Scored, Snapshot, WorkerView

SCRIPT = Path(__file__).with_name("placement.txt")
CHAIN = tuple(BlockKey(bytes([number]) * 16) for number in range(8))


class Scene:
    """Two prefill and two decode workers, idle and empty, unless a scenario says otherwise."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.cached: dict[str, int] = {}
        self.shares: dict[BlockKey, float] = {}
        self.prefills = ["p0", "p1"]
        self.decodes = ["d0", "d1"]
        self.excluded: frozenset[WorkerId] = frozenset()
        self.config = PlacementConfig()
        self.request = "request"
        self.num_tokens = 8 * 16 + 5

    def snapshot(self) -> Snapshot:
        return Snapshot(
            tuple(self._view(name, Role.PREFILL) for name in self.prefills),
            tuple(self._view(name, Role.DECODE) for name in self.decodes),
            lambda worker, keys: min(self.cached.get(worker, 0), len(keys)),
            lambda key: self.shares.get(key, 0.0),
        )

    def _view(self, name: str, role: Role) -> WorkerView:
        load = self.loads.get(name, Load(free_blocks=1000, num_blocks=1000))
        return WorkerView(
            Member(
                WorkerId(name), role, f"{name}:1", Generation(1), WorkerState.READY,
                block_tokens=16, load=load,
            )
        )  # fmt: skip

    def decide(self) -> Decision:
        query = Query(RequestId(self.request), self.num_tokens, 64, CHAIN, self.excluded)
        return place(self.snapshot(), query, self.config)


def scenarios() -> Iterator[tuple[str, Scene]]:
    scene = Scene()
    yield "All workers are idle and empty: the ring decides.", scene

    scene = Scene()
    scene.cached = {"p0": 6, "p1": 2}
    yield "p0 holds six of eight blocks, p1 two: the cache decides.", scene

    scene = Scene()
    scene.cached = {"p0": 6}
    scene.loads = {"p0": Load(queued_tokens=300, free_blocks=1000, num_blocks=1000)}
    yield "p0 holds six blocks, and 300 tokens wait there: reuse is still the cheaper.", scene

    scene = Scene()
    scene.cached = {"p0": 6}
    scene.loads = {"p0": Load(queued_tokens=500, free_blocks=1000, num_blocks=1000)}
    yield "With 500 tokens waiting it no longer is.", scene

    scene = Scene()
    scene.cached = {"p1": 8}
    yield "The whole prompt is cached; the last token is computed all the same.", scene

    scene = Scene()
    scene.prefills = [f"p{number}" for number in range(9)]
    scene.cached = {"p7": 3, "p8": 1}
    scene.loads = {
        f"p{n}": Load(queued_tokens=100 * n, free_blocks=1000, num_blocks=1000) for n in range(1, 9)
    }
    yield "Of nine workers, the ring's three, two holders and the least busy are scored.", scene

    scene = Scene()
    scene.prefills = [f"p{number}" for number in range(8)]
    scene.shares = dict.fromkeys(CHAIN[:4], 0.9)
    yield "Everybody shares four blocks: the fifth is the key to the ring.", scene

    scene = Scene()
    scene.loads = {"d0": Load(running=3, free_blocks=1000, num_blocks=1000)}
    yield "d0 has three requests: d1 decodes.", scene

    scene = Scene()
    scene.loads = {
        "d0": Load(running=3, free_blocks=1000, num_blocks=1000),
        "d1": Load(running=1, free_blocks=5, num_blocks=1000),
    }
    yield "d1 has fewer requests but no room for this one: d0 decodes.", scene

    scene = Scene()
    scene.excluded = frozenset({WorkerId("p0"), WorkerId("p1")})
    yield "Both prefill workers have failed this request: a decode worker does it alone.", scene

    scene = Scene()
    scene.decodes = []
    yield "There is no decode worker: a prefill worker does it alone.", scene

    scene = Scene()
    scene.prefills, scene.decodes = [], []
    yield "There is nobody.", scene

    scene = Scene()
    scene.config = PlacementConfig(max_requests_per_worker=2)
    scene.loads = {
        name: Load(running=1, waiting=1, free_blocks=1000, num_blocks=1000) for name in ("p0", "p1")
    }
    yield "Every prefill worker has as many requests as it may have.", scene


def told(scene: Scene) -> str:
    try:
        decision = scene.decide()
    except BatonError as error:
        return f"  refused: {type(error).__name__}: {error}\n"
    prefill = decision.prefill.id if decision.prefill else "none"
    lines = [f"  prefill {prefill}, decode {decision.decode.id}: {decision.reason}"]
    for name, scores in (("prefill", decision.prefill_scores), ("decode", decision.decode_scores)):
        lines += [f"    {name} {line(scored)}" for scored in scores]
    return "\n".join(lines) + "\n"


def line(scored: Scored) -> str:
    return (
        f"{scored.worker} scores {scored.score:.3f}: {scored.cached_blocks} blocks cached, "
        f"{scored.queued_tokens} tokens queued"
    )


def test_placement_script(request: pytest.FixtureRequest) -> None:
    script = "\n".join(f"{prose}\n{told(scene)}" for prose, scene in scenarios())
    if request.config.getoption("--rewrite"):
        SCRIPT.write_text(script)
    assert script == SCRIPT.read_text()


def test_decisions_are_repeatable() -> None:
    assert [told(scene) for _, scene in scenarios()] == [told(scene) for _, scene in scenarios()]
