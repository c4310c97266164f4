"""Runs plans on vLLM's workers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.engine.core import register_all_kvcache_specs, resolve_kv_cache_layout
from vllm.v1.executor.abstract import Executor

from baton.checkpoint import ModelLimits, model_digest
from baton.core.request import TokenLogprob
from baton.engine.model import no_op
from baton.engine.plan import Plan, Row, SampledToken, StepOutput
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid
from baton.vllm_engine.arguments import vllm_config
from baton.vllm_engine.batch import WorkerBatch
from baton.vllm_engine.kv_layout import PackedLayout, pack_kv_cache
from baton.vllm_engine.kv_pool import VllmKvPool
from baton.vllm_engine.versions import check_vllm_version
from baton.vllm_engine.worker import SampledStep, memory_path


class VllmRunner:
    """Implements :class:`baton.engine.model_runner.LoadedRunner` with an embedded vLLM.

    vLLM's executor runs its workers in this process, or in one process per rank. If one of them
    dies, :meth:`run` raises."""

    def __init__(self, executor: Executor, config: VllmConfig, limits: ModelLimits, digest: bytes):
        self._executor = executor
        self._batch = WorkerBatch()
        layout = _initialize_kv_cache(executor, config)
        self.pool = VllmKvPool(
            layout.num_blocks, layout.block_bytes, layout.block_tokens, layout.name
        )
        self.limits = ModelLimits(
            limits.vocab_size, int(config.model_config.max_model_len), limits.eos_token_ids
        )
        self.model_digest = digest
        self.kv_dtype = layout.kv_dtype
        self.kv_layout = layout.name
        self.quantization = str(config.model_config.quantization or "none")
        self.numerics_fingerprint = ""
        self.description = f"vLLM {check_vllm_version()}"
        self.is_fallback = False
        executor.collective_rpc(
            "use_kv_memory", args=(memory_path(self.pool.file_descriptor), self.pool.size_bytes)
        )
        executor.initialize_from_config(layout.configs)
        executor.compile_or_warm_up_model()

    @classmethod
    def load(
        cls, path: Path, limits: ModelLimits, options: RunnerOptions, arguments: str
    ) -> "VllmRunner":
        """Load a model into vLLM's workers. ``arguments`` are vLLM's own command-line arguments.
        Raises Invalid if vLLM can't run the model or does not accept the arguments."""
        version = check_vllm_version()
        config = vllm_config(path, options, arguments)
        digest = hashlib.blake2b(model_digest(path), digest_size=16, person=b"baton.vllm.v1")
        digest.update(f"{version}:{config.model_config.dtype}".encode())
        digest.update(f":{config.model_config.quantization}".encode())
        try:
            executor = Executor.get_class(config)(config)
            return cls(executor, config, limits, digest.digest())
        except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
            raise Invalid(f"vLLM can't load {path}: {_last_line(error)}", param="model") from error

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    def leaves_core_free(self, num_cores: int) -> bool:
        return False

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def compute(self, prepared: Plan, on_start: Callable[[], None]) -> StepOutput:
        for source, target in prepared.copies:
            self.pool.tensor[target].copy_(self.pool.tensor[source])
        message = self._batch.messages(prepared)
        future = self._executor.execute_model(message, non_block=True)
        on_start()
        future.result()
        rows = {
            request_id: _with_computed_mask(row)
            for request_id, row in self._batch.rows_by_id(prepared).items()
        }
        step: SampledStep = self._executor.collective_rpc("sample_step", args=(rows,))[0]
        self._batch.record(prepared, step)
        return self._output(prepared, step)

    def run(self, plan: Plan) -> StepOutput:
        return self.compute(self.prepare(plan), no_op)

    def close(self) -> None:
        """Stop vLLM's workers."""
        self._executor.shutdown()

    def _output(self, plan: Plan, step: SampledStep) -> StepOutput:
        sampled: list[SampledToken | None] = [
            step.sampled.get(self._batch.id_of(row)) if row.sample else None for row in plan.rows
        ]
        scores: tuple[tuple[TokenLogprob, ...], ...] = ()
        if step.prompt_logprobs:
            scores = tuple(
                step.prompt_logprobs.get(self._batch.id_of(row), ()) for row in plan.rows
            )
        return StepOutput(tuple(sampled), scores)


@dataclass(frozen=True, slots=True)
class _ComputedMask:
    """A mask that was computed before the row is sent to another process."""

    mask: bytes

    def __call__(self) -> bytes:
        return self.mask


def _with_computed_mask(row: Row) -> Row:
    return row if row.mask is None else replace(row, mask=_ComputedMask(row.mask()))


def _initialize_kv_cache(executor: Executor, config: VllmConfig) -> PackedLayout:
    """Decide on the size and layout of the KV cache, as vLLM's engine core does."""
    register_all_kvcache_specs(config)
    specs = executor.get_kv_cache_specs()
    flat = [spec for each in specs for spec in each.values()]
    layout = resolve_kv_cache_layout(config, executor.get_supported_kv_cache_layouts(), flat)
    executor.set_kv_cache_layout(layout.name)
    available = executor.determine_available_memory()
    limit = config.model_config.max_model_len
    configs = get_kv_cache_configs(config, specs, available)
    for each in configs:
        each.kv_cache_layout = config.cache_config.kv_cache_layout
    if config.model_config.max_model_len != limit:
        executor.collective_rpc("update_max_model_len", args=(config.model_config.max_model_len,))
    return pack_kv_cache(configs, layout.name)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
