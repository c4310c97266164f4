"""Runs plans on vLLM's workers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.engine.core import register_all_kvcache_specs, resolve_kv_cache_layout
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_layout import KVCacheLayout

from baton.checkpoints.checkpoint import ModelLimits, model_digest
from baton.core.request import TokenLogprob
from baton.engine.executor import PlanExecutor, ThreadedExecutor
from baton.engine.kv_pool import staging_size
from baton.engine.lora.table import AdapterTable, LoadedAdapter
from baton.engine.model import no_op
from baton.engine.plan import Plan, Row, SampledToken, StepOutput
from baton.engine.runner_options import RunnerOptions
from baton.errors import BatonError, Invalid, Unavailable
from baton.vllm_engine.arguments import VllmArguments, read_arguments
from baton.vllm_engine.batch import WorkerBatch
from baton.vllm_engine.kv_layout import PackedLayout, pack_kv_cache
from baton.vllm_engine.kv_pool import VllmKvPool, create_host_pool
from baton.vllm_engine.memory_path import memory_path
from baton.vllm_engine.rank_monitor import RankHeartbeats, RankMonitor
from baton.vllm_engine.versions import check_vllm_version
from baton.vllm_engine.worker import SampledStep


class VllmRunner:
    """Implements :class:`baton.engine.loaded_runner.LoadedRunner` with an embedded vLLM.

    vLLM's executor runs its workers in this process, or in one process per rank. If one of these
    processes dies, :meth:`run` raises."""

    def __init__(
        self,
        executor: Executor,
        arguments: VllmArguments,
        limits: ModelLimits,
        checkpoint: bytes,
        staging_bytes: int | None = 0,
    ) -> None:
        """``checkpoint`` is the digest of the model's files. ``staging_bytes`` is the size of the
        KV pool's staging area: see :func:`baton.engine.kv_pool.staging_size`."""
        config = arguments.config
        if lacking := executor.collective_rpc("unsupported_feature")[0]:
            raise Invalid(f"{lacking}, which engine vllm does not support", param="model")
        self._executor = executor
        self._monitor: RankMonitor | None = None
        self._runs_here = isinstance(executor, UniProcExecutor) and current_platform.is_cpu()
        self._batch = WorkerBatch()
        layout = _initialize_kv_cache(executor, config)
        staging = staging_size(staging_bytes, layout.num_blocks, layout.block_bytes)
        self.pool = _allocate(executor, layout, staging)
        self.limits = ModelLimits(
            limits.vocab_size, int(config.model_config.max_model_len), limits.eos_token_ids
        )
        self.kv_dtype = str(config.cache_config.cache_dtype).replace("auto", layout.kv_dtype)
        self.kv_layout = f"{layout.name}@{_attention_identity(executor)}"
        self.quantization = str(config.model_config.quantization or "none")
        self.numerics_fingerprint = ""
        version = check_vllm_version()
        self.description = f"vLLM {version}"
        self.is_fallback = False
        self.supports_speculation = False
        self.supports_attention_window = False  # vLLM has no attention window per request
        self.adapters = AdapterTable(0)
        digest = hashlib.blake2b(checkpoint, digest_size=16, person=b"baton.vllm.v1")
        for part in (version, arguments.kv_identity, self.kv_dtype, self.kv_layout):
            digest.update(f"{part}\n".encode())
        self.model_digest = digest.digest()
        executor.compile_or_warm_up_model()

    @classmethod
    def load(
        cls, path: Path, limits: ModelLimits, options: RunnerOptions, arguments: str
    ) -> "VllmRunner":
        """Load a model into vLLM's workers. ``arguments`` are vLLM's own command-line arguments.
        Raises Invalid if vLLM can't run the model or does not accept the arguments, Unavailable if
        there is too little device memory."""
        given, checkpoint = read_arguments(path, options, arguments), model_digest(path)
        executor: Executor | None = None
        try:
            executor = Executor.get_class(given.config)(given.config)
            return cls(executor, given, limits, checkpoint, options.staging_bytes)
        except BaseException as error:
            if executor is not None:
                executor.shutdown()
            if isinstance(error, BatonError) or not isinstance(error, Exception):
                raise
            message = f"vLLM can't load {path}: {_last_line(error)}"
            if isinstance(error, torch.OutOfMemoryError):
                raise Unavailable(message) from error
            raise Invalid(message, param="model") from error

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def num_groups(self) -> int:
        return 1

    def leaves_core_free(self, num_cores: int) -> bool:
        return not current_platform.is_cpu()

    def make_executor(self) -> PlanExecutor:
        """Implement :meth:`baton.engine.loaded_runner.LoadedRunner.make_executor`."""
        return ThreadedExecutor(self)

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def compute(self, prepared: Plan, on_start: Callable[[], None]) -> StepOutput:
        for source, target in prepared.copies:
            self.pool.tensor[target].copy_(self.pool.tensor[source])
        message = self._batch.messages(prepared)
        if self._runs_here:
            on_start()  # execute_model() returns when the step is computed
        future = self._executor.execute_model(message, non_block=True)
        if not self._runs_here:
            on_start()
        rows = {  # masks are computed here while the ranks compute the step
            request_id: _with_computed_mask(row)
            for request_id, row in self._batch.rows_by_id(prepared).items()
        }
        future.result()
        timeout = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        step: SampledStep = self._executor.collective_rpc(
            "sample_step", timeout=timeout, args=(rows,)
        )[0]
        self._batch.record(prepared, step)
        return self._output(prepared, step)

    def run(self, plan: Plan) -> StepOutput:
        return self.compute(self.prepare(plan), no_op)

    def load_adapter(self, path: Path) -> LoadedAdapter:
        """Raise Invalid: engine vllm does not support adapters."""
        raise Invalid("adapters are not supported with engine vllm", param="adapters")

    def watch(
        self, on_failure: Callable[[BaseException], object], hang_timeout_seconds: float
    ) -> None:
        def report() -> None:
            on_failure(RuntimeError("a process of vLLM's workers died"))

        self._executor.register_failure_callback(report)
        if isinstance(self._executor, MultiprocExecutor):
            ranks = [worker.proc for worker in self._executor.workers]
            heartbeats = RankHeartbeats(len(ranks))
            self._executor.collective_rpc("send_heartbeats", args=(heartbeats.path,))
            self._monitor = RankMonitor(ranks, heartbeats, hang_timeout_seconds)
            self._monitor.start()

    def close(self) -> None:
        """Stop vLLM's workers."""
        if self._monitor is not None:
            self._monitor.stop()
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
    """A mask of allowed tokens that has been computed already. It replaces the row's mask function
    before the row is sent to vLLM's workers, because the grammar exists only in this process."""

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
    supported = executor.get_supported_kv_cache_layouts()
    _prefer_contiguous_blocks(supported[0], config)
    layout = resolve_kv_cache_layout(config, supported, flat)
    executor.set_kv_cache_layout(layout.name)
    available = executor.determine_available_memory()
    limit = config.model_config.max_model_len
    configs = get_kv_cache_configs(config, specs, available)
    for each in configs:
        each.kv_cache_layout = config.cache_config.kv_cache_layout
    if config.model_config.max_model_len != limit:
        executor.collective_rpc("update_max_model_len", args=(config.model_config.max_model_len,))
    return pack_kv_cache(configs, layout)


def _prefer_contiguous_blocks(supported: list[str], config: VllmConfig) -> None:
    """Choose a KV cache layout in which blocks are contiguous, if the attention supports one."""
    for name in supported:
        if KVCacheLayout[name].is_block_outermost and KVCacheLayout[name].is_block_compact:
            config.cache_config.kv_cache_layout = name
            return


def _attention_identity(executor: Executor) -> str:
    """Return the names of the attention backends, which determine the order of the bytes within a
    page. Raises Invalid if the ranks have different backends."""
    kinds = set(executor.collective_rpc("attention_identity"))
    if len(kinds) > 1:
        raise Invalid(
            "all of vLLM's ranks must have the same attention kernels, but they have different "
            f"ones: {', '.join(sorted(kinds))}"
        )
    return str(kinds.pop())


def _allocate(executor: Executor, layout: PackedLayout, staging_bytes: int) -> VllmKvPool:
    """Let vLLM's workers allocate the KV cache, and return it as a pool."""
    if not current_platform.is_cpu():
        executor.collective_rpc("reserve_staging", args=(staging_bytes,))
        executor.initialize_from_config(layout.configs)
        assert isinstance(executor, UniProcExecutor), "one rank: see read_arguments()"
        return VllmKvPool(
            executor.driver_worker.worker.kv_memory,
            layout.block_bytes,
            layout.block_tokens,
            layout.name,
            staging_bytes=staging_bytes,
        )
    pool = create_host_pool(
        layout.num_blocks, layout.block_bytes, layout.block_tokens, layout.name, staging_bytes
    )
    path = memory_path(pool.file_descriptor)
    executor.collective_rpc("use_kv_memory", args=(path, pool.size_bytes))
    executor.initialize_from_config(layout.configs)
    return pool


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
