"""The autoscaler's policy: a pure function from the pools' state, the plan and the history to the
next step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.pool_plan import PLANNED_ROLES, PoolPlan
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.pools.base import PoolWorker

STARTING_STATES = ("pending", "starting", "converting")
ENDED_STATES = ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class PoolBounds:
    minimum: int = 1
    maximum: int = 64

    def clamp(self, count: int) -> int:
        return min(max(count, self.minimum), self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """The limits of the autoscaler. ``max_workers`` is the budget of the prefill and the decode
    pool, including workers that are being removed. A change is made once it has been wanted for
    ``stable_seconds``, and at least ``cooldown_seconds`` after the last change; it adds or removes
    at most ``max_step_workers`` workers. A pool that has grown keeps its new workers until they
    have served for ``shrink_seconds``. New workers that do not serve after ``pending_seconds``
    are removed again, and their pool does not grow for another ``pending_seconds``.
    ``can_convert`` says whether workers can move from pool to pool."""

    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    max_workers: int = 128
    max_step_workers: int = 1
    stable_seconds: float = 10.0
    cooldown_seconds: float = 30.0
    shrink_seconds: float = 300.0
    pending_seconds: float = 900.0
    can_convert: bool = False

    def bounds(self, role: Role) -> PoolBounds:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """The state of the pools at one check. ``sizes`` are the sizes that were requested last;
    ``plan`` is None while no conductor has a plan."""

    now_seconds: float
    plan: PoolPlan | None
    sizes: Mapping[Role, int]
    workers: Sequence[PoolWorker]

    def has_pool(self, role: Role) -> bool:
        """Whether the cluster is meant to have workers of this role."""
        alone = (size for each, size in self.sizes.items() if WORKER_KINDS[each].serves_alone)
        return role in self.sizes and bool(self.sizes[role] or not any(alone))

    def num_serving(self, role: Role) -> int:
        return sum(each.role is role and each.state == "serving" for each in self.workers)

    def num_planned_from(self, role: Role) -> int:
        """Return how many workers of a role served when the plan was made, as far as the conductor
        knew; 0 without a plan."""
        return self.plan.num_serving[role] if self.plan is not None else 0

    def num_not_serving_yet(self, role: Role) -> int:
        """Return the number of workers of a role that were requested and do not serve yet."""
        mine = [each for each in self.workers if each.role is role]
        staying = sum(each.is_staying for each in mine)
        starting = sum(each.state in STARTING_STATES for each in mine)
        return max(self.sizes[role] - staying, 0) + starting

    @property
    def num_budgeted_workers(self) -> int:
        """Number of workers that count against the budget, including draining ones: those of the
        planned pools."""
        present = Counter(each.role for each in self.workers if each.state not in ENDED_STATES)
        leaving = Counter(each.role for each in self.workers if each.state == "draining")
        return sum(
            max(present[role], size + leaving[role])
            for role, size in self.sizes.items()
            if role in PLANNED_ROLES
        )


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of one pool that has been wanted since ``since_seconds``. ``nearest_size`` is the
    wanted size that came closest to the current size in that time."""

    since_seconds: float
    is_growth: bool
    nearest_size: int


@dataclass(frozen=True, slots=True)
class PendingGrowth:
    """The growth of a pool whose new workers do not all serve yet."""

    role: Role
    old_size: int
    new_size: int
    at_seconds: float


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """The state that the autoscaler keeps from one check to the next."""

    last_change_seconds: float = float("-inf")
    pending_changes: Mapping[Role, PendingChange] = field(default_factory=dict)
    pending_growths: tuple[PendingGrowth, ...] = ()
    growth_blocked_until: Mapping[Role, float] = field(default_factory=dict)
    """For each pool, when it may grow again."""
    grown_seconds: Mapping[Role, float] = field(default_factory=dict)
    """For each pool that has grown, when the last of its new workers began to serve, or the present
    time while they are starting."""


@dataclass(frozen=True, slots=True)
class ScalingStep:
    """A change of one pool's size. If workers move from one pool to the other,
    ``simultaneous_step`` is the opposite change of the other pool."""

    role: Role
    old_size: int
    new_size: int
    reason: str
    simultaneous_step: "ScalingStep | None" = None

    @property
    def sizes(self) -> dict[Role, int]:
        return {self.role: self.new_size} | (
            self.simultaneous_step.sizes if self.simultaneous_step else {}
        )

    def __str__(self) -> str:
        own = f"{self.role.value} {self.old_size} to {self.new_size}: {self.reason}"
        return f"{own}; {self.simultaneous_step}" if self.simultaneous_step else own


def decide_scaling(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> tuple[ScalingStep | None, ScalingHistory]:
    """Return the next step, if any, and the history to keep once that step has been taken."""
    wanted = wanted_sizes(observation, config)
    history = _updated_history(observation, history, wanted)
    taken_back = _take_back(observation, history, config)
    if taken_back is not None:
        return taken_back, _after_taking_back(observation, history, taken_back, config)
    if observation.now_seconds - history.last_change_seconds < config.cooldown_seconds:
        return None, history
    step = (
        _exchange(observation, history, config)
        or _growth(observation, history, config)
        or _shrinkage(observation, history, config)
    )
    if step is None:
        return None, history
    return step, _after(observation, history, step)


def wanted_sizes(observation: PoolObservation, config: ScalingConfig) -> dict[Role, int]:
    """Return the sizes of the plan, limited to the bounds of each pool. Beside
    workers that serve alone, an empty pool stays empty. If together the
    sizes exceed the budget ``max_workers``, the budget is divided in proportion to them."""
    if observation.plan is None:
        return {}
    sizes = {
        role: config.bounds(role).clamp(count)
        for role, count in observation.plan.sizes.items()
        if observation.has_pool(role)
    }
    total = sum(sizes.values())
    if len(sizes) < 2 or total <= config.max_workers:
        return sizes
    share = round(config.max_workers * sizes[Role.PREFILL] / total)
    least = max(config.prefill.minimum, config.max_workers - sizes[Role.DECODE])
    most = min(sizes[Role.PREFILL], config.max_workers - config.decode.minimum)
    prefill = max(min(share, most), least)
    return {Role.PREFILL: prefill, Role.DECODE: config.max_workers - prefill}


def _updated_history(
    observation: PoolObservation, history: ScalingHistory, wanted: Mapping[Role, int]
) -> ScalingHistory:
    """Return the history with its pending changes and growths updated. A pending change is dropped
    when its pool has the wanted size, or when the opposite change is wanted. A pending growth is
    dropped when all workers serve, or when another caller has made the pool smaller."""
    wishes = {}
    for role, count in wanted.items():
        size, before = observation.sizes[role], history.pending_changes.get(role)
        if count == size:
            continue
        grows = count > size
        wish = PendingChange(observation.now_seconds, grows, count)
        if before is not None and before.is_growth is grows:
            nearest = min(before.nearest_size, count) if grows else max(before.nearest_size, count)
            wish = PendingChange(before.since_seconds, grows, nearest)
        wishes[role] = wish
    growths = tuple(
        each
        for each in history.pending_growths
        if observation.sizes.get(each.role, 0) >= each.new_size > observation.num_serving(each.role)
    )
    grown = {each.role: observation.now_seconds for each in history.pending_growths}
    return replace(
        history,
        pending_changes=wishes,
        pending_growths=growths,
        grown_seconds={**history.grown_seconds, **grown},
    )


def _take_back(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    for growth in history.pending_growths:
        waited = observation.now_seconds - growth.at_seconds
        size, serving = observation.sizes[growth.role], observation.num_serving(growth.role)
        kept = max(growth.old_size, serving, config.bounds(growth.role).minimum)
        if waited >= config.pending_seconds and kept < size:
            why = f"taken back, {size - serving} not serving after {waited:.0f} s"
            return ScalingStep(
                growth.role, size, kept, why + _not_serving_message(observation, growth.role)
            )
    return None


def _not_serving_message(observation: PoolObservation, role: Role) -> str:
    """Return ": " and the message of a worker that does not serve yet, to be appended to the reason
    of a scaling step. Return an empty string if no such worker has a message."""
    coming = [each for each in observation.workers if each.role is role and each.state != "serving"]
    messages = [each.message for each in coming if each.is_staying and each.message]
    return f": {messages[0]}" if messages else ""


def _after_taking_back(
    observation: PoolObservation, history: ScalingHistory, step: ScalingStep, config: ScalingConfig
) -> ScalingHistory:
    until = observation.now_seconds + config.pending_seconds
    growths = tuple(each for each in history.pending_growths if each.role is not step.role)
    held = {**history.growth_blocked_until, step.role: until}
    return replace(
        _after(observation, history, step), pending_growths=growths, growth_blocked_until=held
    )


def _after(
    observation: PoolObservation, history: ScalingHistory, step: ScalingStep
) -> ScalingHistory:
    wishes = {
        role: wish for role, wish in history.pending_changes.items() if role not in step.sizes
    }
    growths = history.pending_growths
    for each in (step, step.simultaneous_step):
        if each is not None and each.new_size > each.old_size:
            growths = (
                *growths,
                PendingGrowth(each.role, each.old_size, each.new_size, observation.now_seconds),
            )
    return replace(
        history,
        last_change_seconds=observation.now_seconds,
        pending_changes=wishes,
        pending_growths=growths,
    )


def _exchange(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """Return the step that moves workers from a pool whose shrinkage is due to a pool whose growth
    is due, if there are such pools and workers can convert. This needs no budget."""
    shrinking = _shrinkage(observation, history, config) if config.can_convert else None
    lacking = _growing_roles(observation, history, config)
    if shrinking is None or not lacking:
        return None
    role, size = lacking[0], observation.sizes[lacking[0]]
    count = min(
        shrinking.old_size - shrinking.new_size, history.pending_changes[role].nearest_size - size
    )
    growing = ScalingStep(role, size, size + count, _plan_reason(observation, role))
    return replace(shrinking, new_size=shrinking.old_size - count, simultaneous_step=growing)


def _growth(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """Return the step that grows the pool which lacks the most workers relative to its size, as far
    as the budget allows."""
    budget = config.max_workers - observation.num_budgeted_workers
    lacking = _growing_roles(observation, history, config)
    if not lacking or budget <= 0:
        return None
    role = max(
        lacking,
        key=lambda role: (
            history.pending_changes[role].nearest_size / max(observation.sizes[role], 1)
        ),
    )
    size = observation.sizes[role]
    count = min(history.pending_changes[role].nearest_size - size, config.max_step_workers, budget)
    return ScalingStep(role, size, size + count, _plan_reason(observation, role))


def _growing_roles(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> list[Role]:
    """Return the roles of the pools whose growth is due and not blocked."""
    due, now = _due(observation, history, config, grows=True), observation.now_seconds
    return [role for role in due if now >= history.growth_blocked_until.get(role, float("-inf"))]


def _shrinkage(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig
) -> ScalingStep | None:
    """Return the step that shrinks a pool, if one may shrink. No pool shrinks while workers of
    either pool are still starting, nor does a pool whose new workers have not served for
    ``shrink_seconds`` yet. A pool shrinks only if it has more serving workers than the plan wants,
    and the plan counts all of them: a plan says little about a pool whose workers are down, and one
    that was made while a worker was starting does not mean that this worker is not needed."""
    if any(observation.num_not_serving_yet(role) for role in observation.sizes):
        return None
    for role in _due(observation, history, config, grows=False):
        size, serving = observation.sizes[role], observation.num_serving(role)
        served = observation.now_seconds - history.grown_seconds.get(role, float("-inf"))
        is_known = observation.num_planned_from(role) >= serving
        if history.pending_changes[role].nearest_size >= serving or not is_known:
            continue
        if served < config.shrink_seconds:
            continue
        count = min(size - history.pending_changes[role].nearest_size, config.max_step_workers)
        return ScalingStep(role, size, size - count, _plan_reason(observation, role))
    return None


def _due(
    observation: PoolObservation, history: ScalingHistory, config: ScalingConfig, grows: bool
) -> list[Role]:
    """Return the roles of pools for which growth (if ``grows``) or shrinkage has been wanted for
    long enough."""
    return [
        role
        for role, wish in history.pending_changes.items()
        if wish.is_growth is grows
        and observation.now_seconds - wish.since_seconds >= config.stable_seconds
    ]


def _plan_reason(observation: PoolObservation, role: Role) -> str:
    """Return the part of the plan's reason that concerns this pool."""
    reason = observation.plan.reason if observation.plan is not None else ""
    own = [part for part in reason.split("; ") if part.startswith(role.value)]
    return own[0].partition(": ")[2] if own else reason
