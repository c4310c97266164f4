"""The contract between a worker and its runner, the software that computes the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.checkpoints.checkpoint import ModelLimits
from baton.engine.executor import PlanExecutor, TwoStageRunner
from baton.engine.kv_pool import KvMemory
from baton.engine.lora.table import AdapterTable, LoadedAdapter
from baton.engine.plan import Runner


class LoadedRunner(Runner, TwoStageRunner, Protocol):
    """A runner with a loaded model: Baton's own :class:`baton.engine.runner.ModelRunner`, or vLLM
    (:class:`baton.vllm_engine.runner.VllmRunner`).

    The rest of a worker (scheduling, prefix cache, KV transfer, sampling parameters, grammars) uses
    a runner only through this contract, and is the same for both.
    ``tests/contract/runner_contract.py`` tests the contract.

    Two workers can exchange KV blocks iff ``model_digest`` and ``kv_layout`` are equal.
    ``numerics_fingerprint`` is empty unless results are bit-identical in any batch. ``description``
    names the software that computes the model; ``is_fallback`` is set if that software is slower
    than the preferred one. ``supports_speculation`` says that plans may have drafts, and that a
    token's logits have the same bits whatever the batch and the number of a row's tokens, so that
    speculative decoding changes no answer. ``supports_attention_window`` says that rows may have an
    attention window. ``adapters`` are the LoRA adapters that plans may name;
    only the engine's thread may use them."""

    limits: ModelLimits
    model_digest: bytes
    numerics_fingerprint: str
    quantization: str
    description: str
    is_fallback: bool
    supports_speculation: bool
    supports_attention_window: bool
    adapters: AdapterTable

    @property
    def pool(self) -> KvMemory: ...

    @property
    def kv_dtype(self) -> str: ...

    @property
    def kv_layout(self) -> str: ...

    def leaves_core_free(self, num_cores: int) -> bool:
        """Whether the GIL and at least one of the machine's ``num_cores`` cores are free for other
        threads while a step is computed."""
        ...

    def make_executor(self) -> PlanExecutor:
        """Return an executor with which the next plan can be made while a plan is computed."""
        ...

    def load_adapter(self, path: Path) -> LoadedAdapter:
        """Read and prepare the LoRA adapter in the folder ``path``. Nothing uses it before it is
        added to ``adapters``. May be called in any thread, also while a step runs. Raises Invalid
        if the adapter does not fit the model, or is not supported."""
        ...

    def watch(
        self, on_failure: Callable[[BaseException], object], hang_timeout_seconds: float
    ) -> None:
        """Call ``on_failure``, in any thread, if one of the runner's processes dies, or is frozen
        for ``hang_timeout_seconds`` (0 turns this check off). If a step is running then,
        :meth:`run` raises, too. Call this method once, before the first step."""
        ...

    def close(self) -> None:
        """Release what :meth:`run` needs. Must be the last call."""
        ...
