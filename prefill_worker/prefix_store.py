"""A worker's interface to the KV store, to fetch prefixes before prefill and publish blocks
afterwards."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import BlockKey
from baton.core.request import RequestSpec
from baton.engine.result import StepResult
from prefill_worker.prefix_fetch import PrefixFetch


class PrefixStore(Protocol):
    """Fetches prefixes from the KV store, and publishes computed blocks to it."""

    async def find_prefix(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        """Look up how much of the prefix of ``spec`` the store has. ``keys`` are the keys of the
        full blocks of the prompt. This does not wait for the engine. A failure of the store is not
        raised, but counts as a miss."""
        ...

    async def fetch_prefix(self, fetch: PrefixFetch, num_cached: int) -> None:
        """Fetch the blocks found by :meth:`find_prefix` into the device's prefix cache, as far as
        that is faster than computing them. The device already has the first ``num_cached`` blocks.
        Failures of the store are not raised."""
        ...

    def start_split_fetch(self, fetch: PrefixFetch) -> None:
        """Start fetching the blocks that are to be fetched while the prompt is prefilled, now that
        the request is in the engine."""
        ...

    def record_step(self, result: StepResult) -> None:
        """Update the prefill cost model from a step, and publish the blocks that it completed."""
        ...

    async def publish_remaining(self) -> None:
        """Publish the blocks on this worker that the store does not have. This is called before the
        worker leaves the cluster. Failures of the store are not raised."""
        ...

    @property
    def bytes_per_second(self) -> float | None:
        """The moving average of the rate at which blocks are fetched from store nodes on other
        hosts; None until it has been measured."""
        ...

    async def run(self) -> None:
        """Publish blocks, and fetch the blocks for which :meth:`start_split_fetch` was called,
        until cancelled."""
        ...
