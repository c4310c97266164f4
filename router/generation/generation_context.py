"""The components and settings that all generations of a router share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.variant import Variant
from router.generation.attempt import TokenTimeouts
from router.generation.circuit_breaker import WorkerCircuitBreakers
from router.generation.output_validation import UNKNOWN_VOCAB_SIZE
from router.generation.placement import Placer
from router.generation.quarantine import Quarantine
from router.generation.worker_connection_pool import WorkerConnections


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """The timeouts of placements and attempts, and the number of retries. After a failure, and
    while a worker is known that may soon be ready, a request waits up to
    ``max_worker_wait_seconds`` for one. ``retry_pause_seconds`` leaves time for broken connections
    to be noticed, so that the worker that died can be distinguished from the worker that reported
    the failure."""

    placement_timeout_seconds: float = 5.0
    max_worker_wait_seconds: float = 15.0
    retry_pause_seconds: float = 0.05
    max_retries: int = 3
    timeouts: TokenTimeouts = field(default_factory=TokenTimeouts)


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """The components and settings that all generations of a router share. A worker that sends a
    token id outside the model's vocabulary (``vocab_size``) is treated as faulty.
    ``rank_variants`` returns the variants of the model that are served now, in the order in which a
    request should try them; see :meth:`router.generation.model_workers.ModelWorkers.rank_variants`.
    ``expects_workers`` tells whether a worker that is not ready may soon be.
    """

    placer: Placer
    connections: WorkerConnections
    clock: Clock
    config: FailoverConfig = field(default_factory=FailoverConfig)
    breakers: WorkerCircuitBreakers = field(default_factory=WorkerCircuitBreakers)
    vocab_size: int = UNKNOWN_VOCAB_SIZE
    quarantine: Quarantine = field(default_factory=Quarantine)
    rank_variants: Callable[[str], Sequence[Variant]] = lambda key: ()
    expects_workers: Callable[[], bool] = lambda: False

    def avoided_workers(self) -> frozenset[WorkerId]:
        """Return the workers to avoid: those whose connection broke recently, whose circuit breaker
        is open, or that run a request in isolation."""
        failing = self.connections.recently_broken() | self.breakers.open_workers(
            self.clock.monotonic()
        )
        return failing | self.quarantine.workers_in_isolation()
