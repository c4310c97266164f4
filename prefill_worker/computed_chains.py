"""The chains of blocks that this worker has computed recently, which may exist nowhere else."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from baton.core.ids import BlockKey
from baton.engine.result import SealedRun
from baton.worker.limits import MAX_CHAINED_KEYS


class ComputedChains:
    """Keeps the chains of blocks that were computed last. A chain replaces the chain that it
    continues. While the chains have more than ``max_keys`` keys in total, the least recently added
    chain is dropped."""

    def __init__(self, max_keys: int = MAX_CHAINED_KEYS) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._chains: OrderedDict[BlockKey, SealedRun] = OrderedDict()
        """Each chain, by the key of its last block."""

    def add(self, run: SealedRun) -> None:
        if not run.keys:
            return
        self._forget(run.keys[-1])
        if run.first_new_block:
            self._forget(run.keys[run.first_new_block - 1])  # the chain that this run continues
        self._chains[run.keys[-1]] = replace(run, first_new_block=0)
        self._num_keys += len(run.keys)
        while self._num_keys > self._max_keys:
            self._forget(next(iter(self._chains)))

    def newest_first(self) -> Iterator[SealedRun]:
        """Iterate over a copy of the chains, most recently added first."""
        return iter(list(reversed(self._chains.values())))

    def __len__(self) -> int:
        return len(self._chains)

    def _forget(self, last: BlockKey) -> None:
        chain = self._chains.pop(last, None)
        if chain is not None:
            self._num_keys -= len(chain.keys)
