"""Chains of blocks that this worker has computed, as far as it remembers them: what it may be the
only one to hold."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from baton.core.ids import BlockKey
from baton.engine.result import SealedRun

MAX_KEYS = 2**18
"""Of all chains together; some tens of megabytes, and more blocks than most devices have."""


class ComputedChains:
    """Each chain once, at its longest. Those that were told of longest ago are forgotten first."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._chains: OrderedDict[BlockKey, SealedRun] = OrderedDict()
        """By the last block."""

    def add(self, run: SealedRun) -> None:
        if not run.keys:
            return
        self._forget(run.keys[-1])
        if run.first:
            self._forget(run.keys[run.first - 1])  # what it goes on from
        self._chains[run.keys[-1]] = replace(run, first=0)
        self._num_keys += len(run.keys)
        while self._num_keys > self._max_keys:
            self._forget(next(iter(self._chains)))

    def newest_first(self) -> Iterator[SealedRun]:
        """As of now."""
        return iter(list(reversed(self._chains.values())))

    def __len__(self) -> int:
        return len(self._chains)

    def _forget(self, last: BlockKey) -> None:
        chain = self._chains.pop(last, None)
        if chain is not None:
            self._num_keys -= len(chain.keys)
