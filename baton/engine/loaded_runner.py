"""What a worker needs of a runner: the contract between a worker and the software that computes."""

from collections.abc import Callable
from typing import Protocol

from baton.checkpoint import ModelLimits
from baton.engine.executor import TwoStageRunner
from baton.engine.kv_pool import KvMemory
from baton.engine.plan import Runner


class LoadedRunner(Runner, TwoStageRunner, Protocol):
    """A runner with a loaded model: Baton's own :class:`baton.engine.runner.ModelRunner`, or vLLM
    (:class:`baton.vllm_engine.runner.VllmRunner`).

    Everything else of a worker (scheduling, prefix cache, KV transfer, sampling's parameters,
    grammars) lies above this contract and is the same for both. What is tested of it is in
    ``tests/contract/runner_contract.py``.

    Two workers can exchange KV blocks iff ``model_digest`` and ``kv_layout`` are equal.
    ``numerics_fingerprint`` is empty unless results are bit-identical in any batch. ``is_fallback``
    says that something slower computes than was wanted; ``description`` names what computes."""

    limits: ModelLimits
    model_digest: bytes
    numerics_fingerprint: str
    quantization: str
    description: str
    is_fallback: bool

    @property
    def pool(self) -> KvMemory: ...

    @property
    def kv_dtype(self) -> str: ...

    @property
    def kv_layout(self) -> str: ...

    def leaves_core_free(self, num_cores: int) -> bool:
        """Whether computing a step leaves the GIL, and at least one of ``num_cores``, free for
        other threads."""
        ...

    def watch(self, on_failure: Callable[[BaseException], object]) -> None:
        """Call ``on_failure``, in any thread, if a process that computes dies while no step runs.
        During a step, :meth:`run` raises."""
        ...

    def close(self) -> None:
        """Release what :meth:`run` needs. Must be the last call."""
        ...
