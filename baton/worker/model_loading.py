"""Loads a worker's model and builds the engine that runs it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import structlog

from baton.checkpoints.checkpoint import ModelLimits, load_model_limits
from baton.checkpoints.hub import resolve_model
from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.core.ids import TokenId
from baton.core.kv_codec import KvCodecName, KvCodecs
from baton.engine.checksum import block_checksums, checksum_algorithm, range_checksums
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv_codecs import open_pool_codecs
from baton.engine.runner import ModelRunner
from baton.engine.speculation.draft_source import DraftSource
from baton.errors import Invalid
from baton.kv_codec.base import BlockCodec
from baton.serve.status_pipe import report_progress
from baton.system.core_shares import CoreShares
from baton.system.cpu_cores import bindable_cores, usable_cores
from baton.system.private_folder import create_private_folder, private_folder
from baton.text.grammar.checker import GrammarChecker
from baton.text.grammar.matcher import GrammarCompiler
from baton.transport.base import Region
from baton.worker.engine_settings import runner_options
from baton.worker.kv_layout import KvLayout
from baton.worker.speculation_setup import check_speculation, load_draft_source, uses_speculation
from baton.worker.staging_area import StagingArea

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. ``grammars`` is None if the model's tokenizer does not support grammars, in
    which case requests with a grammar are rejected. Otherwise, ``grammar_checker`` runs the helper
    processes that try to compile a grammar before this process does; the caller must close it.
    ``draft_source`` is the draft model, if there is one."""

    runner: ModelRunner
    grammars: GrammarCompiler | None
    grammar_checker: GrammarChecker | None
    draft_source: DraftSource | None = None

    @property
    def kv_layout(self) -> KvLayout:
        pool = self.runner.pool
        return KvLayout(
            name=self.runner.kv_layout,
            block_bytes=pool.block_bytes,
            checksum_algorithm=checksum_algorithm(pool),
            compute_checksums=partial(block_checksums, pool),
            address=pool.address,
            compute_range_checksums=partial(range_checksums, pool),
        )

    @property
    def kv_region(self) -> Region:
        """The memory of the KV pool with its staging area, as transports register it."""
        pool = self.runner.pool
        return Region(pool.address, len(pool.memory), pool.device, pool.file_descriptor)

    def open_codecs(self) -> Mapping[KvCodecName, BlockCodec]:
        """Return the codecs for blocks of the KV pool; none if the pool has no staging area."""
        pool = self.runner.pool
        if not pool.staging_bytes:
            return {}
        codecs = open_pool_codecs(pool)
        if not codecs:
            log.warning("kv_codecs_unavailable", layout=pool.layout, device=pool.device)
        return codecs

    def open_staging(self) -> StagingArea | None:
        """Return an allocator of the KV pool's staging area; None if the pool has none."""
        pool = self.runner.pool
        if not pool.staging_bytes:
            return None
        return StagingArea(len(pool.memory) - pool.staging_bytes, pool.staging_bytes)


def load_model(settings: Settings) -> LoadedModel:
    """Load the weights and, concurrently, the vocabulary for grammars, which takes a second if it
    is large. Blocks for seconds to minutes; raises Invalid."""
    check_speculation(settings)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load_grammars, settings)
        runner = _load_runner(settings)
        grammars = loading.result()
    checker = None if grammars is None else _start_checker(settings)
    return LoadedModel(runner, grammars, checker, load_draft_source(settings, runner))


def engine_config(settings: Settings, limits: ModelLimits) -> EngineConfig:
    """Return the engine's configuration for a model with ``limits``."""
    limit = limits.max_position_embeddings
    return EngineConfig(
        block_tokens=settings.block_tokens,
        max_batched_tokens=settings.max_batched_tokens,
        chunk_tokens=settings.chunk_tokens or settings.max_batched_tokens,
        target_inter_token_latency_seconds=settings.slo_itl_seconds,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        order=settings.prefill_order,
        fairness=settings.tenant_fairness,
        speculation_tokens=settings.speculation_tokens,
        max_model_tokens=min(settings.max_model_tokens or limit, limit),
        vocab_size=limits.vocab_size,
        window_tokens=limits.kv_window_tokens,
        num_full_groups=limits.num_full_groups,
        num_windowed_groups=limits.num_windowed_groups,
    )


def build_engine(
    settings: Settings,
    runner: ModelRunner,
    config: EngineConfig,
    clock: Clock,
    draft_source: DraftSource | None = None,
) -> Engine:
    config = replace(
        config,
        speculation=uses_speculation(settings, runner),
        supports_attention_window=runner.supports_attention_window,
    )
    return Engine(
        runner,
        config,
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(TokenId(t) for t in runner.limits.eos_token_ids),
        clock=clock,
        executor=runner.make_executor() if _uses_async_scheduling(settings, runner) else None,
        adapters=runner.adapters,
        draft_source=draft_source,
        lossy_codec=configured_codecs(settings).lossy,
    )


def configured_codecs(settings: Settings) -> KvCodecs:
    """Return the KV codecs that the worker's settings allow."""
    return KvCodecs(settings.kv_codec_wire, settings.kv_codec_store, settings.kv_codec_disk)


def _load_runner(settings: Settings) -> ModelRunner:
    runner = ModelRunner.load(
        resolve_model(settings.model),
        runner_options(settings),
        progress=partial(report_progress, "weights"),
    )
    if settings.share_cores:
        _share_cores(runner)
    runner.warm_up(settings.max_sequences)
    log_level = log.warning if runner.is_fallback else log.info
    log_level("model_loaded", computed_by=runner.description, quantization=runner.quantization)
    return runner


def _share_cores(runner: ModelRunner) -> None:
    """Let the runner divide the host's cores with this user's other workers, where that is
    possible."""
    cores, folder = bindable_cores(), private_folder()
    if len(cores) > 1 and create_private_folder(folder):
        shares = CoreShares.join(folder, cores, SystemClock().monotonic)
        if shares is not None:
            runner.share_cores(shares)


def _load_grammars(settings: Settings) -> GrammarCompiler | None:
    path = resolve_model(settings.model)
    model = load_model_limits(path)
    tokens = [TokenId(token) for token in model.eos_token_ids]
    try:
        return GrammarCompiler.load(path, model.vocab_size, tokens)
    except Invalid as error:
        log.warning("grammars_unavailable", error=str(error))
        return None


def _start_checker(settings: Settings) -> GrammarChecker:
    path = resolve_model(settings.model)
    model = load_model_limits(path)
    checker = GrammarChecker.for_model(path, model.vocab_size, model.eos_token_ids)
    checker.start_helper()
    return checker


def _uses_async_scheduling(settings: Settings, runner: ModelRunner) -> bool:
    """Whether to use async scheduling: the model runs in its own thread while the engine schedules
    the next step."""
    if settings.async_scheduling == "auto":
        return runner.leaves_core_free(usable_cores())
    return settings.async_scheduling == "on"
