"""What a worker asks of a KV store: prefixes come in before a prompt, and go out after it."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import BlockKey
from baton.core.request import RequestSpec
from baton.engine.result import StepResult
from baton.worker.prefix_fetch import PrefixFetch


class PrefixStore(Protocol):
    async def find(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        """Asks how much of the prefix of ``spec`` the store holds. ``keys`` are those of its full
        blocks. Does not wait for the engine, and never raises for what the store does: a miss is a
        miss."""
        ...

    async def extend(self, extension: PrefixFetch, num_cached: int) -> None:
        """Brings what :meth:`find` found, and this worker doesn't hold, into the device's prefix
        cache, as far as that is faster than to compute it. The device has ``num_cached`` blocks.
        Never raises for what the store does."""
        ...

    def follow(self, extension: PrefixFetch) -> None:
        """The request is in the engine: what is better fetched beside its computation is."""
        ...

    def note_step(self, result: StepResult) -> None:
        """Learns from what the step took, and offers what it sealed to the store."""
        ...

    async def hand_over(self) -> None:
        """Of what this worker still holds, what the store does not is offered to it once more: this
        worker leaves. Never raises for what the store does."""
        ...

    @property
    def bytes_per_second(self) -> float | None:
        """Of what came from other hosts lately; None before anything did."""
        ...

    async def run(self) -> None:
        """Works in the background until cancelled."""
        ...
