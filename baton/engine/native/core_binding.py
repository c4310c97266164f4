"""Runs the steps of an engine on the worker's share of the host's cores."""

from baton.engine.native.matrix import KernelThreadPool
from baton.system.core_shares import CoreShare, CoreShares
from baton.system.cpu_cores import bind_process


class CoreBinding:
    """A context manager for each step. If the worker's share has changed, it moves all threads of
    this process to the cores of the new share, and computes with a thread for each of them, as far
    as the pool has as many."""

    def __init__(self, thread_pool: KernelThreadPool, shares: CoreShares) -> None:
        self._thread_pool = thread_pool
        self._shares = shares
        self._share: CoreShare | None = None

    def __enter__(self) -> None:
        share = self._shares.begin_step()
        if share != self._share:
            self._share = share
            self._thread_pool.use(share.num_threads)
            bind_process(share.cores)

    def __exit__(self, *_: object) -> None:
        self._shares.end_step()

    def close(self) -> None:
        """Leave the cores to the other workers, and let this process use all of its cores again."""
        self._shares.leave()
        bind_process(self._shares.cores)
