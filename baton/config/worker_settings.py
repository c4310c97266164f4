"""Settings of workers, of placement on them, and of the KV store."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from baton.checkpoints.checkpoint import DEMO_MODEL
from baton.config.values import (
    Adapters,
    AsSwitch,
    Count,
    KvCodec,
    ModelPaths,
    Names,
    PrefillOrderName,
    Size,
    SizeOrZero,
    Transports,
)
from baton.core.adapter import MAX_ADAPTERS
from baton.core.kv_codec import KvCodecName


class WorkerSettings(BaseModel):
    """Settings that conductors, workers and store nodes read."""

    # The model
    model: str = str(DEMO_MODEL)
    served_model_name: str | None = None
    models: ModelPaths = Field(default_factory=dict)
    """The models of a cluster that serves several, as NAME=PATH,NAME2=PATH2: a router serves all of
    them, and ``baton up`` starts workers for each. Requests that name no model go to the first. If
    this is set, ``model`` and ``served_model_name`` are for workers only."""
    engine: Literal["baton", "vllm"] = "baton"
    """The software that computes for a worker (docs/vllm.md). ``baton``: Baton's own engine;
    ``vllm``: an unmodified ``vllm serve``, 0.28 or newer, which the worker starts."""
    attach: Names = ()
    """Servers that run already, and serve as the engines of workers (docs/vllm.md), as
    mixed=http://HOST:PORT: one for each worker. Requests to them are neither authenticated nor
    encrypted. A server's KV events follow as ?kv_events=ipc:///PATH&kv_replay=ipc:///PATH unless it
    says itself where they are (vLLM 0.32)."""
    engine_python: str | None = None
    """Python interpreter of an environment that has vLLM, with which workers start their servers.
    None: the one that runs Baton."""
    engine_args: str = ""
    """vLLM's own arguments, as for ``vllm serve``: ``--tensor-parallel-size 2``."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto"
    """Quantization of the model's weights at load (docs/engine.md, docs/cuda.md). ``none``: keep
    them in ``dtype``. ``auto``: the same, but the 4-bit weights of a GGUF file stay as they are
    where the CPU kernels multiply them. An FP8 checkpoint stays in FP8. Workers with different
    values share no KV."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache (docs/cuda.md). ``auto``: ``dtype``; ``fp8`` takes half of the
    memory. Workers with different values share no KV."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Number of threads that a worker computes with. 0: one per core that it may use."""
    share_cores: bool = True
    """Divide the cores of a host between its workers that compute at the same time
    (docs/engine.md). This has an effect on Linux only, with Baton's own kernels."""
    cpu_kernels: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Whether a CPU computes with Baton's own kernels (docs/engine.md). ``auto``: use them where
    they run, else torch; ``on``: refuse to start without them."""
    cpu_instruction_set: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "amx_emulated"] = (
        "auto"
    )
    """The best instruction set that Baton's kernels use (docs/engine.md). ``auto``: the best that
    the processor has. In BF16, AMX gives other bits than the rest; ``amx_emulated`` gives its bits
    on other processors, slowly. So workers on different processors can be ``deterministic``."""
    cuda_graphs: bool = True
    """Whether a GPU runs decode steps from CUDA graphs (docs/cuda.md)."""
    adapters: Adapters = Field(default_factory=dict)
    """LoRA adapters to load at the start, name → folder (docs/adapters.md). If there are several
    ``models``, MODEL:FOLDER names the adapter's; without it, that is the first. Other adapters can
    be loaded and unloaded at run time."""
    max_adapters: Annotated[int, Field(ge=0, le=MAX_ADAPTERS)] = 16
    """Maximum number of LoRA adapters that a worker has in memory."""
    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 64
    """Maximum rank of a LoRA adapter. Adapters of a higher rank are refused."""
    deterministic: bool = False
    """Make a request's logits bit-identical in any batch, chunking and placement
    (docs/engine.md). A worker that can't guarantee this refuses to start, and workers with
    different arithmetic are not mixed."""

    # The engine
    async_scheduling: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Async scheduling: plan the next decode step while the current one is computed
    (docs/engine.md). ``auto``: on for a GPU, and for a CPU if the kernels leave one of its cores
    free."""
    speculation: Annotated[Literal["auto", "ngram", "draft", "off"], AsSwitch] = "off"
    """Speculative decoding (docs/speculation.md): it changes no answer, and is used where it is
    measured to be faster. ``ngram``: draft tokens from what prompt and answer have already said;
    ``draft``: draft them with ``draft_model``; ``auto``: the latter if that is set, else the
    former, with Baton's own CPU kernels."""
    draft_model: str | None = None
    """A smaller model with the same tokenizer, a directory or a hub id, which drafts tokens."""
    draft_pool_bytes: Size = 256 * 2**20
    """Size of the draft model's KV pool."""
    speculation_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """Maximum number of tokens that are drafted for an answer in one step."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of tokens per KV block."""
    num_blocks: Count | None = None
    pool_bytes: Size | None = None
    max_batched_tokens: Count = 512
    chunk_tokens: Count | None = None
    max_sequences: Count = 64
    max_waiting: Count = 1024
    max_model_tokens: Count | None = None
    prefill_order: PrefillOrderName = "deadline"
    """The order in which waiting prompts are computed: a name in baton/core/prefill_order.py."""
    tenant_fairness: bool = True
    """Whether tenants share a worker equally, by weight (baton/core/fairness.py)."""

    # Service-level objectives (SLOs)
    slo_ttft_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """TTFT objective, on top of the time that the prompt itself takes to compute. 0: none."""
    slo_itl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    """Objective for a request's mean inter-token latency. A worker that mixes prefill with decode
    keeps its steps within this, if it can (docs/engine.md)."""

    # Placement
    placement_policy: str = "baton"
    """A name in conductor/policy/policies.py; the conductor checks it when it starts."""
    admission: bool | Literal["auto"] = "auto"
    """Whether to refuse (429) a request that can't meet its SLO, or for which no decode worker
    will have memory. ``auto``: on, unless a worker computes on a CPU. The default SLOs are meant
    for GPUs; on a laptop a late answer is better than none."""
    max_short_prompt_advantage: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Fairness of admission to long prompts. Once the share of prompts that are admitted is higher
    by more than this for short prompts than for long ones, the last memory is reserved for long
    ones. Less is fairer, and admits fewer requests in total (docs/placement.md). 1: no reserve."""
    local_prefill: bool | Literal["auto"] = "auto"
    """Local prefill: whether a decode worker may compute a prompt itself if that costs less than a
    prefill worker's time and the KV transfer. ``auto``: not on a CPU."""

    # KV transfer and storage
    transports: Transports = ()
    """KV transports to open, best first. Empty (or ``auto``): all that can start."""
    nixl_interfaces: Names = ()
    """Network devices that NIXL may use, by their UCX names (``eth1``, ``mlx5_0:1``). Empty: none,
    so that NIXL moves KV within a host only (docs/network.md)."""
    nixl_private_network: bool = False
    """Confirms that only this cluster is on the networks of ``nixl_interfaces``. Any machine there
    can read and write the memory of workers and stores: UCX and RDMA authenticate nobody."""
    kv_codec_wire: KvCodec = KvCodecName.NONE
    """The strongest codec in which KV may travel to a decode worker (docs/kv-codecs.md). ``none``
    and ``lossless`` change no answer; ``fp8``, ``int4`` and ``int2`` are lossy."""
    kv_codec_recent_tokens: Annotated[int, Field(ge=0)] = 128
    """With a lossy codec, the number of a prompt's last tokens whose KV stays exact, like that of
    its first block."""
    kv_staging_bytes: SizeOrZero | None = None
    """Size of the staging area of a KV pool, in which encoded blocks are placed, on top of
    ``pool_bytes``. None: none without a codec, otherwise an eighth of the pool, at most 256 MiB. 0:
    none, and no block is encoded."""
    store_bytes: Size = 256 * 2**20
    store_disk_bytes: SizeOrZero = 2**30
    """Size of the store's SSD tier. 0: no SSD tier."""
    store_folder: str | None = None
    """Folder of the SSD tier. None: one per cluster below BATON_HOME."""
    store_eviction: Literal["baton", "lru"] = "baton"
    store_tenant_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum share of the store's DRAM that one tenant may use."""
    kv_codec_store: KvCodec = KvCodecName.NONE
    """The codec in which workers put KV blocks into the store (docs/kv-codecs.md)."""
    kv_codec_disk: KvCodec = KvCodecName.NONE
    """The codec in which the store's SSD keeps KV blocks (docs/kv-codecs.md)."""
    store_timeout_seconds: Annotated[float, Field(ge=0.1)] = 0.2
    """Timeout of a store call that a request waits for."""
    store_reload: Literal["auto", "fetch", "recompute", "split"] = "auto"
    """What to do with a prefix that the store has: fetch it, recompute it, or fetch the end while
    computing the start (``split``). ``auto``: whichever is predicted to be fastest."""

    # Mock workers: `baton serve mock`, `baton up --mock`
    mock: bool = False
    """`baton up`: start mock workers, all in one process, instead of real ones, and no store."""
    mock_prefill: Annotated[int, Field(ge=0, le=1024)] = 4
    mock_decode: Annotated[int, Field(ge=0, le=1024)] = 4
    mock_mixed: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of mock workers in one process. Each has a port of its own."""
    mock_prefill_tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20_000.0
    """Prefill speed of each mock worker. 0: prompts take no time."""
    mock_step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02
    """Inter-token latency of a mock worker. 0: emit each token as soon as the router has taken the
    previous one."""
    mock_kv_tokens: Count = 2**20
    """KV capacity that a mock worker reports."""
    mock_cache_tokens: Annotated[int, Field(ge=0)] = 2**17
    """Capacity of each mock worker's prefix cache, which determines the reported cached_tokens. 0:
    no cache."""
