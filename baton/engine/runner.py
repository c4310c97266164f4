"""The model runner: loads the model onto a device and runs plans there."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from baton.checkpoints.adapter_checkpoint import read_adapter
from baton.checkpoints.checkpoint import ModelConfig, ModelLimits, load_model_config, model_digest
from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.core.attention_window import AttentionWindow
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import Attention, PackedBatch, pack_batch
from baton.engine.attention.block_tables import BlockTableCache
from baton.engine.attention.cpu import CpuAttention
from baton.engine.determinism import (
    deterministic_digest,
    numerics_fingerprint,
    require_deterministic,
)
from baton.engine.executor import LaunchingExecutor, PlanExecutor, ThreadedExecutor
from baton.engine.kv_pool import KvPool, block_bytes
from baton.engine.kv_scale import kv_scaled_digest
from baton.engine.launched_step import LaunchedModelStep, SampledBatch, SampledOnHost
from baton.engine.layer_groups import LayerGroups
from baton.engine.loader import CheckpointWeights, Weights
from baton.engine.lora.adapter import join_adapter
from baton.engine.lora.segments import LoraSegment, lora_segments
from baton.engine.lora.table import AdapterTable, LoadedAdapter
from baton.engine.model import DecoderModel, Model, OnStart, StepGraphs, no_op
from baton.engine.native.backend_choice import (
    TORCH_BACKEND,
    BackendChoice,
    choose_backend,
    choose_quantization,
)
from baton.engine.native.core_binding import CoreBinding
from baton.engine.native.decoder import NativeModel
from baton.engine.native.matrix import KernelThreadPool
from baton.engine.native.processor import limit_instruction_set
from baton.engine.native.sampler import NativeTokenChooser
from baton.engine.ops import LayerOps, TorchOps
from baton.engine.plan import Plan, Row, StepOutput
from baton.engine.prompt_logprobs import prompt_logprobs
from baton.engine.quantization import E4M3, check_fp8, quantized_digest
from baton.engine.rope import RotaryTables
from baton.engine.runner_options import DEFAULT_POOL_BYTES, RunnerOptions
from baton.engine.sampler import TokenChooser, sample
from baton.engine.shards import Progress
from baton.engine.speculation.verification import sampled_indices, verify
from baton.engine.step_tokens import StepTokens
from baton.engine.upload import upload
from baton.errors import Invalid
from baton.system.core_shares import CoreShares

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KV_DTYPES = ("auto", "fp8")
HOST = torch.device("cpu")
Sampler = Callable[[torch.Tensor, Sequence[Row]], SampledBatch]
WARM_UP_STEP_TOKENS = (8, 16, 32, 64, 128, 256, 512)
"""Sizes of the steps that :meth:`ModelRunner.warm_up` runs: all for which products with weights in
FP8 have tiles of their own, or another method."""

GPU_POOL_FRACTION = 0.85
"""After the weights are loaded, the KV pool takes this share of the GPU memory that is still free;
the rest is for activations."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan's rows as tensors on the host. ``sampling_rows`` are the indices of the rows that
    sample, and ``sampled_indices`` the indices of their tokens whose logits are needed in the
    packed batch: of each row the last one, and one more for each draft. ``lora`` says which tokens
    use an adapter."""

    plan: Plan
    batch: PackedBatch
    sampling_rows: list[int]
    sampled_indices: torch.Tensor
    lora: list[LoraSegment]


class ModelRunner:
    """A loaded model that computes plans. The rest of a worker (scheduling, prefix cache, KV
    transfer) knows it only by what is public here.

    Two workers can exchange KV blocks iff ``model_digest`` and ``kv_layout`` are equal.
    ``numerics_fingerprint`` is empty unless results are bit-identical in any batch. ``description``
    names the software that computes the model; ``is_fallback`` is set if that software is slower
    than the preferred one. ``supports_speculation`` says that plans may have drafts, and that a
    token's logits have the same bits whatever the batch and the number of a row's tokens, so that
    speculative decoding changes no answer. ``supports_attention_window`` says that rows may have an
    attention window. ``adapters`` are the LoRA adapters that plans may name; only the engine's
    thread may use them."""

    def __init__(
        self,
        config: ModelConfig,
        digest: bytes,
        model: DecoderModel,
        pool: KvPool,
        backend: BackendChoice = TORCH_BACKEND,
        numerics_fingerprint: str = "",
        graphs: StepGraphs | None = None,
        quantization: str = "none",
        options: RunnerOptions = RunnerOptions(),
    ) -> None:
        self.model_config = config
        self.adapters = AdapterTable(options.max_adapters)
        self._options = options
        groups = pool.groups
        self.limits = ModelLimits(
            config.vocab_size,
            config.max_position_embeddings,
            config.eos_token_ids,
            groups.window_tokens,
            groups.num_full,
            groups.num_windowed,
        )
        self.model_digest = digest
        self.pool = pool
        self.backend = backend
        self.numerics_fingerprint = numerics_fingerprint
        self.quantization = quantization
        self.description = backend.description
        self.is_fallback = backend.is_fallback
        self.supports_speculation = backend.is_native
        self.supports_attention_window = not any(config.traits.windows)
        self._model = model
        self._graphs = graphs
        self._device = pool.tensor.device
        self._core_binding: CoreBinding | None = None
        self._sample = make_sampler(self._device, model, config.vocab_size)
        self._block_tables = BlockTableCache(groups.num_groups)

    @classmethod
    def load(
        cls,
        path: Path,
        options: RunnerOptions = RunnerOptions(),
        progress: Progress | None = None,
    ) -> "ModelRunner":
        """Load a model from a checkpoint directory.

        Raises Invalid if the checkpoint is unsupported or there is too little memory."""
        if options.cpu_instruction_set == "auto":
            return cls._load(path, options, progress)
        with limit_instruction_set(options.cpu_instruction_set):
            return cls._load(path, options, progress)

    @classmethod
    def _load(cls, path: Path, options: RunnerOptions, progress: Progress | None) -> "ModelRunner":
        config = load_model_config(path)
        target = pick_device(options.device)
        if target.type == "cuda":
            torch.cuda.set_device(target)
        model_dtype = pick_dtype(options.dtype, target, config)
        pool_dtype = pick_kv_dtype(options.kv_dtype, target, model_dtype)
        quantized = choose_quantization(
            options.quantization, options.cpu_kernels, config, target, model_dtype, pool_dtype
        )
        choice = choose_backend(
            options.cpu_kernels, config, target, model_dtype, quantized, pool_dtype
        )
        if options.deterministic:
            choice = require_deterministic(choice, target)
        stored = CheckpointWeights(path, config, progress)
        weights = stored if choice.is_native else stored.to_torch(target, model_dtype, quantized)
        groups = LayerGroups.of(config)
        size = block_bytes(config, pool_dtype, options.block_tokens, groups)
        num_blocks = (options.num_blocks or 0) * groups.num_groups
        if not num_blocks:
            num_blocks = (options.pool_bytes or _default_pool_bytes(target)) // size
        pool = KvPool(
            config,
            num_blocks=num_blocks,
            block_tokens=options.block_tokens,
            dtype=pool_dtype,
            device=target,
            scales=stored.kv_scales if pool_dtype is E4M3 else None,
            groups=groups,
            staging_bytes=options.staging_bytes,
        )
        model = make_model(config, weights, pool, quantized, deterministic=options.deterministic)
        digest = quantized_digest(model_digest(path), quantized)
        digest = kv_scaled_digest(digest, pool.scales)
        if not options.deterministic:
            graphs = make_graphs(config, model, pool) if options.cuda_graphs else None
            return cls(
                config, digest, model, pool, choice,
                graphs=graphs, quantization=quantized, options=options,
            )  # fmt: skip
        fingerprint = numerics_fingerprint(model, pool, config.vocab_size)
        digest = deterministic_digest(digest, fingerprint)
        return cls(
            config, digest, model, pool, choice, fingerprint,
            quantization=quantized, options=options,
        )  # fmt: skip

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def num_groups(self) -> int:
        return self.pool.groups.num_groups

    @property
    def kv_dtype(self) -> str:
        """The dtype of KV, and the number of groups of layers if there are several: blocks with
        the KV of other layers need other keys."""
        dtype = str(self.pool.tensor.dtype).removeprefix("torch.")
        return dtype if self.num_groups == 1 else f"{dtype}/{self.num_groups}"

    @property
    def kv_layout(self) -> str:
        """The byte layout of a block, as text. Workers can exchange blocks only if their layouts
        are equal."""
        return self.pool.layout

    def leaves_core_free(self, num_cores: int) -> bool:
        """Whether the GIL and at least one of the machine's ``num_cores`` cores are free for other
        threads while a step is computed."""
        if self._device.type != "cpu":
            return True
        return self.backend.is_native and torch.get_num_threads() < num_cores

    def share_cores(self, shares: CoreShares) -> None:
        """Compute each step on this worker's share of the host's cores. Without the CPU kernels,
        whose threads can be bound, this changes nothing."""
        if isinstance(self._model, NativeModel):
            self._core_binding = CoreBinding(self._model.thread_pool, shares)

    def load_adapter(self, path: Path) -> LoadedAdapter:
        """Read and prepare the LoRA adapter in the folder ``path``. Nothing uses it before it is
        added to ``adapters``. May be called in any thread, also while a step runs. Raises Invalid
        if the adapter does not fit the model, or is not supported."""
        if self.numerics_fingerprint and self._device.type != "cpu":
            raise Invalid(
                "on a GPU, adapters are not supported with deterministic=true: their products "
                "depend on the batch"
            )
        stored = read_adapter(path, self.model_config, self._options.max_lora_rank)
        dtype = self._model.adapter_dtype
        with torch.inference_mode(), self._on_device():
            weights = join_adapter(stored, self.model_config, self._device, dtype)
            prepared = self._model.prepare_adapter(weights)
        return LoadedAdapter(stored.digest, prepared, stored.max_rank, prepared.size_bytes)

    def warm_up(self, num_rows: int) -> None:
        """Capture the CUDA graphs for steps of up to ``num_rows`` decodes, and compile the other
        kernels of a GPU. Without this call, the first requests would wait for that, seconds in
        all. It must be called before the pool is used."""
        with self._on_device():
            if self._graphs is not None:
                self._graphs.warm_up(num_rows)
            if self._device.type == "cuda":
                from baton.engine.checksum import block_checksums
                from baton.engine.cuda import sampler

                sampler.warm_up(self.model_config.vocab_size, self._device)
                self.run_warm_up_steps()
                block_checksums(self.pool, [BlockId(0)])

    def run_warm_up_steps(self) -> None:
        """Run steps with a decode and a prompt, of all sizes in ``WARM_UP_STEP_TOKENS`` that the
        pool has room for. They write to its first blocks."""
        greedy, block_tokens = SamplingParams(1, temperature=0.0), self.block_tokens
        windows = [None, AttentionWindow(1, 1)] if self.supports_attention_window else [None]
        num_groups = self.num_groups
        num_spans = self.num_blocks // num_groups
        most = min((num_spans - 1) * block_tokens, self.limits.max_position_embeddings)
        first = tuple(BlockId(n) for n in range(num_groups))
        decode = Row(RequestId(""), (TokenId(0),), 0, first, True, greedy)
        for size in WARM_UP_STEP_TOKENS:
            count = size - 1
            if count > most:
                return
            num_blocks = -(-count // block_tokens) * num_groups
            blocks = tuple(BlockId(num_groups + n) for n in range(num_blocks))
            prompt = Row(RequestId(""), (TokenId(0),) * count, 0, blocks, True, greedy)
            for window in windows:
                rows = [replace(each, attention_window=window) for each in (decode, prompt)]
                self.run(Plan(0, tuple(rows)))
            windows = [None]  # the kernels for windows are the same for all sizes

    def close(self) -> None:
        """Leave the cores to others. The model and the pool are freed with this object."""
        if self._core_binding is not None:
            self._core_binding.close()

    def run(self, plan: Plan) -> StepOutput:
        return self.compute(self.prepare(plan), no_op)

    @torch.inference_mode()
    def prepare(self, plan: Plan) -> PreparedStep:
        """Implement :meth:`baton.engine.executor.TwoStageRunner.prepare`. This may be called while
        another thread computes, since it uses only the host."""
        batch = pack_batch(plan.rows, self.block_tokens, HOST, self._block_tables)
        sampling = [index for index, row in enumerate(plan.rows) if row.sample]
        wanted = [
            token
            for index in sampling
            for token in sampled_indices(plan.rows[index], batch.offsets[index + 1])
        ]
        lora = lora_segments(plan.rows, self.adapters.prepared)
        return PreparedStep(plan, batch, sampling, torch.tensor(wanted, dtype=torch.int64), lora)

    def make_executor(self) -> PlanExecutor:
        """Return an executor with which the next plan can be made while a plan is computed."""
        if self._device.type == "cuda":
            return LaunchingExecutor(self)
        return ThreadedExecutor(self)

    def compute(self, prepared: PreparedStep, on_start: OnStart) -> StepOutput:
        with torch.inference_mode(), self._on_device(), self._core_binding or nullcontext():
            return self._launch(prepared, StepTokens.known(prepared.plan.rows), on_start).wait()

    def launch(
        self, prepared: PreparedStep, previous: LaunchedModelStep | None = None
    ) -> LaunchedModelStep:
        """Implement :meth:`baton.engine.executor.LaunchingRunner.launch`."""
        rows = prepared.plan.rows
        if previous is None:
            tokens = StepTokens.known(rows)
        else:
            tokens = StepTokens.following(rows, previous.sampled.tokens, previous.sampled_rows)
        with torch.inference_mode(), self._on_device():
            return self._launch(prepared, tokens, no_op)

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the model's device this thread's current device, because Triton launches kernels on
        the current device, whatever device their tensors are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _launch(
        self, prepared: PreparedStep, tokens: StepTokens, on_start: OnStart
    ) -> LaunchedModelStep:
        """Run a step; on a GPU, launch it. The end of its sampling is the end of the step, so that
        whoever has waited for it may read the KV, in any stream and process."""
        plan, batch, sampling = prepared.plan, prepared.batch, prepared.sampling_rows
        for source, target in plan.copies:
            self.pool.tensor[target].copy_(self.pool.tensor[source])
        logits, hidden = self._replay_graph(prepared, tokens), None
        if logits is None:
            token_ids = tokens.to_device(self._device)
            hidden = self._model.hidden(token_ids, batch, on_start, prepared.lora)
            wanted = upload(prepared.sampled_indices, self._device)
            logits = self._model.logits(hidden, wanted)
        else:
            on_start()
        scores = (
            prompt_logprobs(self._model, hidden, plan.rows, batch.offsets)
            if hidden is not None
            else ()
        )
        chosen = [plan.rows[index] for index in sampling]
        if not any(row.num_drafts for row in chosen):
            return LaunchedModelStep(len(plan.rows), sampling, self._sample(logits, chosen), scores)
        verified = verify(logits, chosen, lambda *part: self._sample(*part).wait())
        first = SampledOnHost([tokens[0] if tokens else None for tokens in verified])
        following = {
            row: tuple(tokens[1:])
            for row, tokens in zip(sampling, verified, strict=True)
            if len(tokens) > 1
        }
        return LaunchedModelStep(len(plan.rows), sampling, first, scores, following)

    def _replay_graph(self, prepared: PreparedStep, tokens: StepTokens) -> torch.Tensor | None:
        """Compute the logits by replaying a CUDA graph. Return None if there is no graph for the
        batch, if not every row samples, or if any row needs prompt logprobs or an adapter."""
        if self._graphs is None or prepared.lora:
            return None
        if not all(row.sample and not row.prompt_logprob_targets for row in prepared.plan.rows):
            return None
        return self._graphs.logits(tokens, prepared.batch)


def make_model(
    config: ModelConfig,
    weights: Weights | CheckpointWeights,
    pool: KvPool,
    quantization: str = "none",
    *,
    deterministic: bool = False,
) -> DecoderModel:
    """Return a model that runs on the native CPU kernels if ``weights`` are still in the checkpoint
    files. The kernels then read them from there and store them in the format ``quantization``.
    Otherwise return a model that runs on torch."""
    if isinstance(weights, CheckpointWeights):
        return NativeModel(
            config, weights, pool, KernelThreadPool(torch.get_num_threads()), quantization
        )
    ops = make_ops(config, pool, weights.norm.dtype, deterministic=deterministic)
    return Model(config, weights, ops)


def make_ops(
    config: ModelConfig, pool: KvPool, dtype: torch.dtype, *, deterministic: bool = False
) -> LayerOps:
    """Return the layer operations of a model that computes in ``dtype`` on ``pool``'s device."""
    rotary = RotaryTables(config, pool.tensor.device, dtype)
    if pool.tensor.device.type == "cpu":
        return TorchOps(config, CpuAttention(pool, config.traits), rotary)
    from baton.engine.cuda.ops import BatchInvariantOps, TritonOps

    return (BatchInvariantOps if deterministic else TritonOps)(config, pool, rotary)


def make_graphs(config: ModelConfig, model: DecoderModel, pool: KvPool) -> StepGraphs | None:
    """Return CUDA graphs on a GPU, else None. Also return None for a mixture of experts, because
    its routing is read on the host during the step, which a graph does not allow."""
    device = pool.tensor.device
    if device.type == "cpu" or config.moe is not None:
        return None
    from baton.engine.cuda.graphs import CudaCapture, DecodeCudaGraphs

    assert isinstance(model, Model)
    return DecodeCudaGraphs(model, config, pool, CudaCapture(device))


def make_sampler(device: torch.device, model: DecoderModel, vocab_size: int) -> Sampler:
    """Return the sampler. On a GPU it samples the whole batch at once, without waiting for the
    device."""
    if device.type == "cuda":
        from baton.engine.cuda.sampler import launch_sampling

        return launch_sampling
    chooser = (
        NativeTokenChooser(model.thread_pool, vocab_size)
        if isinstance(model, NativeModel)
        else None
    )
    return partial(_sample_on_host, chooser)


def _sample_on_host(
    chooser: TokenChooser | None, logits: torch.Tensor, rows: Sequence[Row]
) -> SampledOnHost:
    return SampledOnHost(sample(logits, rows, chooser))


def make_attention(pool: KvPool, traits: DecoderTraits = LLAMA_TRAITS) -> Attention:
    if pool.tensor.device.type == "cpu":
        return CpuAttention(pool, traits)
    from baton.engine.cuda.attention import TritonAttention

    return TritonAttention(pool, traits)


def pick_device(name: str) -> torch.device:
    """Return the device; a GPU always with its index, which ``torch.cuda.set_device`` needs.
    "auto" means the current GPU if there is one, and "cuda" the current GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise Invalid("device is cuda, but torch finds no GPU", param="device")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Return the dtype to compute in. "auto" means the checkpoint's dtype on a GPU. On the CPU it
    means FP32, so that tokens can be compared with those of the library ``transformers``; but BF16
    for a GGUF file that has it or is quantized."""
    if name == "auto":
        is_fast = device.type == "cuda" or (config.gguf_type and config.dtype == "bfloat16")
        name = config.dtype if is_fast else "float32"
    if name not in DTYPES:
        raise Invalid(
            f"unsupported dtype {name!r}; supported dtypes: {', '.join(DTYPES)}", param="dtype"
        )
    return DTYPES[name]


def pick_kv_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV pool; "auto" means the model's dtype."""
    if name not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        raise Invalid(f"kv_dtype is {name!r}, and must be one of {known}", param="kv_dtype")
    if name == "auto":
        return dtype
    check_fp8(device, "kv_dtype")
    return E4M3


def _default_pool_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return DEFAULT_POOL_BYTES
    return int(torch.cuda.mem_get_info(device)[0] * GPU_POOL_FRACTION)
