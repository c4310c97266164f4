"""What the autoscaler does next: one pure decision from what is there, what is planned, and what
was done before."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.pools.base import WORKER_ROLES, PoolWorker

STARTING_STATES = ("pending", "starting", "converting")
ENDED_STATES = ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class PoolBounds:
    least: int = 1
    most: int = 64

    def clamp(self, count: int) -> int:
        return min(max(count, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """``max_workers`` is the budget of both pools, those included that are leaving. A change must
    have been wanted for ``stable_seconds``, comes ``cooldown_seconds`` after the last one, and is
    of ``step`` workers at most. Growth that does not serve after ``pending_seconds`` is taken back,
    and not tried again for as long. ``can_convert``: a worker can change from pool to pool."""

    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    max_workers: int = 128
    step: int = 1
    stable_seconds: float = 10.0
    cooldown_seconds: float = 30.0
    pending_seconds: float = 900.0
    can_convert: bool = False

    def bounds(self, role: Role) -> PoolBounds:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """One look. ``sizes`` were wanted last; ``plan`` is None while nobody tells."""

    now_seconds: float
    plan: PoolPlan | None
    sizes: Mapping[Role, int]
    workers: Sequence[PoolWorker]

    def serving(self, role: Role) -> int:
        return sum(each.role is role and each.state == "serving" for each in self.workers)

    def coming(self, role: Role) -> int:
        """Asked for, and not serving yet."""
        mine = [each for each in self.workers if each.role is role]
        staying = sum(each.stays for each in mine)
        starting = sum(each.state in STARTING_STATES for each in mine)
        return max(self.sizes[role] - staying, 0) + starting

    @property
    def occupied(self) -> int:
        """Places that are taken: by those that leave, too."""
        there = Counter(each.role for each in self.workers if each.state not in ENDED_STATES)
        leaving = Counter(each.role for each in self.workers if each.state == "draining")
        return sum(max(there[role], self.sizes[role] + leaving[role]) for role in self.sizes)


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of one pool has been wanted since then; never less than to ``nearest``."""

    since_seconds: float
    grows: bool
    nearest: int


@dataclass(frozen=True, slots=True)
class PendingGrowth:
    """What was asked for, and does not serve yet."""

    role: Role
    old: int
    new: int
    at_seconds: float


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """What is remembered between two looks."""

    changed_seconds: float = float("-inf")
    wishes: Mapping[Role, PendingChange] = field(default_factory=dict)
    growths: tuple[PendingGrowth, ...] = ()
    held_until: Mapping[Role, float] = field(default_factory=dict)
    """Who is not to grow before."""


@dataclass(frozen=True, slots=True)
class ScalingStep:
    """``other`` is at the same time: who leaves the one pool goes to the other."""

    role: Role
    old: int
    new: int
    reason: str
    other: "ScalingStep | None" = None

    @property
    def sizes(self) -> dict[Role, int]:
        return {self.role: self.new} | (self.other.sizes if self.other else {})

    def __str__(self) -> str:
        own = f"{self.role.value} {self.old} to {self.new}: {self.reason}"
        return f"{own}; {self.other}" if self.other else own


def decide_scaling(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig
) -> tuple[ScalingStep | None, ScalingHistory]:
    """The next step, if any, and what is to be remembered once it was taken."""
    wanted = wanted_sizes(sight, config)
    past = _observed(sight, past, wanted)
    taken_back = _take_back(sight, past, config)
    if taken_back is not None:
        return taken_back, _after_taking_back(sight, past, taken_back, config)
    if sight.now_seconds - past.changed_seconds < config.cooldown_seconds:
        return None, past
    step = (
        _exchange(sight, past, config)
        or _growth(sight, past, config)
        or _shrinkage(sight, past, config)
    )
    if step is None:
        return None, past
    return step, _after(sight, past, step)


def wanted_sizes(sight: PoolObservation, config: ScalingConfig) -> dict[Role, int]:
    """The plan, within all bounds; when it is beyond the budget, each pool gets its share."""
    if sight.plan is None:
        return {}
    asked = {Role.PREFILL: sight.plan.prefill, Role.DECODE: sight.plan.decode}
    sizes = {
        role: config.bounds(role).clamp(asked[role]) for role in WORKER_ROLES if role in sight.sizes
    }
    total = sum(sizes.values())
    if len(sizes) < 2 or total <= config.max_workers:
        return sizes
    share = round(config.max_workers * sizes[Role.PREFILL] / total)
    least = max(config.prefill.least, config.max_workers - sizes[Role.DECODE])
    most = min(sizes[Role.PREFILL], config.max_workers - config.decode.least)
    prefill = max(min(share, most), least)
    return {Role.PREFILL: prefill, Role.DECODE: config.max_workers - prefill}


def _observed(
    sight: PoolObservation, past: ScalingHistory, wanted: Mapping[Role, int]
) -> ScalingHistory:
    """A wish ends when it is no more wanted, or the opposite is. Growth has ended when all serve,
    or somebody else has changed the pool."""
    wishes = {}
    for role, count in wanted.items():
        size, before = sight.sizes[role], past.wishes.get(role)
        if count == size:
            continue
        grows = count > size
        wish = PendingChange(sight.now_seconds, grows, count)
        if before is not None and before.grows is grows:
            nearest = min(before.nearest, count) if grows else max(before.nearest, count)
            wish = PendingChange(before.since_seconds, grows, nearest)
        wishes[role] = wish
    growths = tuple(
        each
        for each in past.growths
        if sight.sizes.get(each.role, 0) >= each.new > sight.serving(each.role)
    )
    return replace(past, wishes=wishes, growths=growths)


def _take_back(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    for growth in past.growths:
        waited = sight.now_seconds - growth.at_seconds
        size, serving = sight.sizes[growth.role], sight.serving(growth.role)
        kept = max(growth.old, serving, config.bounds(growth.role).least)
        if waited >= config.pending_seconds and kept < size:
            why = f"taken back, {size - serving} do not serve after {waited:.0f} s"
            return ScalingStep(growth.role, size, kept, why + _waits_for(sight, growth.role))
    return None


def _waits_for(sight: PoolObservation, role: Role) -> str:
    """What one of those that come says, if any does."""
    coming = [each for each in sight.workers if each.role is role and each.state != "serving"]
    told = [each.message for each in coming if each.stays and each.message]
    return f": {told[0]}" if told else ""


def _after_taking_back(
    sight: PoolObservation, past: ScalingHistory, step: ScalingStep, config: ScalingConfig
) -> ScalingHistory:
    until = sight.now_seconds + config.pending_seconds
    growths = tuple(each for each in past.growths if each.role is not step.role)
    held = {**past.held_until, step.role: until}
    return replace(_after(sight, past, step), growths=growths, held_until=held)


def _after(sight: PoolObservation, past: ScalingHistory, step: ScalingStep) -> ScalingHistory:
    wishes = {role: wish for role, wish in past.wishes.items() if role not in step.sizes}
    growths = past.growths
    for each in (step, step.other):
        if each is not None and each.new > each.old:
            growths = (*growths, PendingGrowth(each.role, each.old, each.new, sight.now_seconds))
    return replace(past, changed_seconds=sight.now_seconds, wishes=wishes, growths=growths)


def _exchange(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """One pool gives the other what that lacks. It needs no place, even at the budget."""
    given = _shrinkage(sight, past, config) if config.can_convert else None
    lacking = _lacking(sight, past, config)
    if given is None or not lacking:
        return None
    role, size = lacking[0], sight.sizes[lacking[0]]
    count = min(given.old - given.new, past.wishes[role].nearest - size)
    taken = ScalingStep(role, size, size + count, _why(sight, role))
    return replace(given, new=given.old - count, other=taken)


def _growth(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """Of the pool that lacks most; where there is no place for it, another must leave first."""
    room = config.max_workers - sight.occupied
    lacking = _lacking(sight, past, config)
    if not lacking or room <= 0:
        return None
    role = max(lacking, key=lambda role: past.wishes[role].nearest / max(sight.sizes[role], 1))
    size = sight.sizes[role]
    count = min(past.wishes[role].nearest - size, config.step, room)
    return ScalingStep(role, size, size + count, _why(sight, role))


def _lacking(sight: PoolObservation, past: ScalingHistory, config: ScalingConfig) -> list[Role]:
    """Who is to grow, and may."""
    due, now = _due(sight, past, config, grows=True), sight.now_seconds
    return [role for role in due if now >= past.held_until.get(role, float("-inf"))]


def _shrinkage(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """Nobody goes while somebody is still to come: the plan counts only on those that serve. Nor
    from a pool of which no more serve than are needed: of one that is down, a plan says little."""
    if any(sight.coming(role) for role in sight.sizes):
        return None
    for role in _due(sight, past, config, grows=False):
        size = sight.sizes[role]
        if past.wishes[role].nearest >= sight.serving(role):
            continue
        count = min(size - past.wishes[role].nearest, config.step)
        return ScalingStep(role, size, size - count, _why(sight, role))
    return None


def _due(
    sight: PoolObservation, past: ScalingHistory, config: ScalingConfig, grows: bool
) -> list[Role]:
    """Whose change has been wanted for long enough."""
    return [
        role
        for role, wish in past.wishes.items()
        if wish.grows is grows and sight.now_seconds - wish.since_seconds >= config.stable_seconds
    ]


def _why(sight: PoolObservation, role: Role) -> str:
    """What the plan says of this pool, beside the sizes."""
    reason = sight.plan.reason if sight.plan is not None else ""
    own = [part for part in reason.split("; ") if part.startswith(role.value)]
    return own[0].partition(": ")[2] if own else reason
