"""All settings of all programs. A setting has the same name in all sources.

A command-line flag overrides the environment (``BATON_<NAME>``), which overrides a YAML file
(``--config`` or ``BATON_CONFIG``), which overrides the default. A wrong value or an unknown name
fails at start-up, with a message that says what would be valid. Nothing else reads the environment.
"""

import difflib
import json
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from baton.core.credentials import ClusterCredentials
from baton.errors import Invalid
from baton.values import (
    AsSize,
    AsSwitch,
    CollectorUrl,
    Count,
    Hosts,
    Names,
    Origins,
    Pairs,
    PoolTargets,
    Port,
    PrefillOrderName,
    RayAddress,
    Seconds,
    Size,
    SizeOrZero,
    Transports,
)

DEMO_MODEL = Path(__file__).parent / "models" / "demo"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOOPBACK_DEVICE = "lo"
ENVIRONMENT_PREFIX = "BATON_"
CONFIG_ENVIRONMENT_VARIABLE, HOME_ENVIRONMENT_VARIABLE = "BATON_CONFIG", "BATON_HOME"
SECRET_SETTINGS = {"cluster_secret", "api_keys", "admin_key", "tenant_secret", "redis_url"}
"""Settings whose values error messages never show."""


class Settings(BaseSettings):
    """The settings, frozen. Build them with :func:`load_settings`, which explains wrong values."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    # The cluster, and this process in it
    cluster: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    id: str = Field("", max_length=128)
    redis_url: str | None = None
    redis_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a program that starts waits for Redis, for when both start at once. 0: fail at once
    if Redis can't be reached."""
    worker_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a router that starts waits for the first worker before it accepts requests. A
    registry that lost its entries (a Redis restart) has them again after the next heartbeats."""
    cluster_secret: str | None = None
    heartbeat_seconds: Seconds = 1.0
    drain_seconds: Seconds = 30.0

    # Listening addresses. Port 0 means any free port
    host: str = "127.0.0.1"
    port: Port = 8000
    reuse_port: bool = False
    """Whether several routers of one machine listen on the same port. Each also listens on a port
    of its own."""
    tls_certificate: str | None = None
    """A PEM file with the router's certificate and the chain to its CA. It is read again when it
    changes."""
    tls_key: str | None = None
    grpc_host: str = "127.0.0.1"
    grpc_port: Port = 0
    line_port: Port = 0
    """Port, at ``grpc_host``, of the framed connections by which routers reach workers and
    conductors without gRPC."""
    rpc_tls_certificate: str | None = None
    """PEM files; set all three or none. With them, members of the cluster use mutual TLS: each
    presents a certificate of ``rpc_tls_ca`` with the DNS name ``baton``. The files are read again
    when they change."""
    rpc_tls_key: str | None = None
    rpc_tls_ca: str | None = None
    advertise_address: str | None = None

    # Pools of `baton up`
    on: Literal["local", "ray"] = "local"
    """Where workers run: as processes of this machine, or as actors of a Ray cluster."""
    prefill: Count = 1
    decode: Count = 1
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of router processes. They share one port."""
    hung_seconds: Annotated[float, Field(ge=0)] = 20.0
    """A process that has served and then sends no heartbeat (one per second) for this long is
    killed and restarted. 0: never."""
    ray_address: RayAddress | None = None
    """``auto`` or HOST:PORT of a running Ray cluster. None: start a private one on this machine."""
    ray_worker_cpus: Annotated[float, Field(gt=0)] = 0.25
    """Ray CPUs that a worker reserves on its node. This bounds how many workers a node gets, not
    how many cores they use."""
    ray_worker_gpus: Annotated[float, Field(ge=0)] | None = None
    """Ray GPUs that a worker reserves. None: one where workers compute on CUDA, zero elsewhere."""

    # Autoscaling of the pools
    autoscale: Annotated[Literal["off", "dry_run", "on"], AsSwitch] = "off"
    """Whether the sizes of the pools follow the load. ``dry_run`` only logs what it would do."""
    autoscale_pools: Literal["supervisor", "kubernetes"] = "supervisor"
    """Which pools are resized. ``supervisor``: those of ``baton up``, by its supervisor;
    ``kubernetes``: the Deployments of the cluster, by a conductor."""
    min_prefill: Count = 1
    max_prefill: Count = 64
    min_decode: Count = 1
    max_decode: Count = 64
    max_workers: Count = 128
    """Maximum number of workers in both pools together: as many as there are GPUs for."""
    autoscale_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Target utilisation of a pool that grows."""
    autoscale_shrink_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.6
    """A pool shrinks only if its utilisation afterwards is at most this."""
    autoscale_shrink_seconds: Seconds = 300.0
    """A pool shrinks only if fewer workers would have sufficed for this long."""
    autoscale_start_seconds: Seconds = 60.0
    """How long a worker takes to start. The load is forecast this far ahead."""
    autoscale_seconds: Seconds = 5.0
    """Interval between two checks of the autoscaler."""
    autoscale_stable_seconds: Annotated[float, Field(ge=0)] = 10.0
    """The plan must have asked for a change for this long before the change is made."""
    autoscale_cooldown_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Minimum time between two changes."""
    autoscale_step: Count = 1
    """Maximum number of workers that one change adds to or removes from a pool."""
    autoscale_pending_seconds: Seconds = 900.0
    """A new worker that does not serve after this long is given up: its pool goes back to its old
    size."""
    autoscale_prefill_pool: str | None = None
    autoscale_decode_pool: str | None = None
    """In Kubernetes: name (``baton.dev/pool``) of the pool of this role that is resized. None: the
    only pool of the role, or the one named after it. Other pools of the role keep their size."""
    kubernetes_namespace: str | None = None
    """Namespace of the pools' Deployments. None: the pod's own, or that of the kubeconfig."""
    kubernetes_pools: PoolTargets = Field(default_factory=dict)
    """The pools, as POOL=ROLE/DEPLOYMENT,…. Empty: find them by their labels, which needs the
    permission to list Deployments."""
    kubernetes_lease: str | None = None
    """Name of the Lease by which the conductors elect the one that resizes pools. None:
    baton-CLUSTER-conductor."""
    kubernetes_watch: bool = False
    """Whether conductors watch the pods of the pools, so that they place nothing on a pod that is
    being deleted even before its worker reports that it drains."""

    # The model
    model: str = str(DEMO_MODEL)
    served_model_name: str | None = None
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Quantization of the model's weights at load (docs/engine.md, docs/cuda.md). ``none``: keep
    them in ``dtype``. An FP8 checkpoint stays as it is. Workers with different values share no
    KV."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache (docs/cuda.md). ``auto``: ``dtype``; ``fp8`` takes half of the
    memory. Workers with different values share no KV."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads that a worker computes with. 0: one per core."""
    cpu_kernels: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Whether a CPU computes with Baton's own kernels (docs/engine.md). ``auto``: use them where
    they run, else torch; ``on``: refuse to start without them."""
    cuda_graphs: bool = True
    """Whether a GPU runs decode steps from CUDA graphs (docs/cuda.md)."""
    deterministic: bool = False
    """Make a request's logits bit-identical in any batch, chunking and placement
    (docs/engine.md). A worker that can't guarantee this refuses to start, and workers with
    different arithmetic are not mixed."""

    # The engine
    overlap: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Async scheduling: plan the next decode step while the current one is computed
    (docs/engine.md). ``auto``: on for a GPU, and for a CPU if the kernels leave one of its cores
    free."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    num_blocks: Count | None = None
    pool_bytes: Size | None = None
    max_step_tokens: Count = 512
    chunk_tokens: Count | None = None
    max_running: Count = 64
    max_waiting: Count = 1024
    max_model_tokens: Count | None = None
    prefill_order: PrefillOrderName = "deadline"
    """The order in which waiting prompts are computed: a name in baton/core/prefill_order.py."""
    tenant_fairness: bool = True
    """Whether a queue serves the tenant first that has received the least service so far."""

    # Service-level objectives (SLOs)
    slo_first_token_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """TTFT objective, on top of the time that the prompt itself takes to compute. 0: none."""
    slo_token_gap_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    """Objective for a request's mean inter-token latency. A worker that mixes prefill with decode
    keeps its steps within this, if it can (docs/engine.md)."""

    # Placement
    placement_policy: str = "baton"
    """A name in conductor/policy/policies.py; the conductor checks it when it starts."""
    admission: bool | Literal["auto"] = "auto"
    """Whether to refuse (429) a request that can't meet its SLO, or for which no decode worker
    will have memory. ``auto``: on, unless a worker computes on a CPU. The default SLOs are meant
    for GPUs; on a laptop a late answer is better than none."""
    read_alone: bool | Literal["auto"] = "auto"
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
    store_bytes: Size = 256 * 2**20
    store_disk_bytes: SizeOrZero = 2**30
    """Size of the store's SSD tier. 0: no SSD tier."""
    store_folder: str | None = None
    """Folder of the SSD tier. None: one per cluster below BATON_HOME."""
    store_eviction: Literal["baton", "lru", "lfu", "length_aware"] = "baton"
    store_tenant_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum share of the store's DRAM that one tenant may use."""
    store_seconds: Annotated[float, Field(ge=0.1)] = 0.2
    """Timeout of a store call that a request waits for."""
    store_reload: Literal["auto", "fetch", "recompute", "split"] = "auto"
    """What to do with a prefix that the store has: fetch it, recompute it, or fetch the end while
    computing the start (``split``). ``auto``: whichever is predicted to be fastest."""

    # Mock workers: `baton serve mock`, `baton up --mock`
    mock: bool = False
    """`baton up`: start mock workers, all in one process, instead of real ones, and no store."""
    mock_prefill: Annotated[int, Field(ge=0, le=1024)] = 4
    mock_decode: Annotated[int, Field(ge=0, le=1024)] = 4
    """Number of mock workers in one process. Each has a port of its own."""
    mock_prefill_tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20_000.0
    """Prefill speed of each mock worker. 0: prompts take no time."""
    mock_step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02
    """Inter-token latency of a mock worker. 0: emit the next token as soon as the router has taken
    the last one."""
    mock_kv_tokens: Count = 2**20
    """KV capacity that a mock worker reports."""
    mock_cache_tokens: Annotated[int, Field(ge=0)] = 2**17
    """Capacity of each mock worker's prefix cache, which determines the reported cached_tokens. 0:
    no cache."""

    # The router
    api_keys: Pairs = Field(default_factory=dict)
    tenants_file: str | None = None
    """YAML file of further tenants besides those of ``api_keys``, with their keys and quotas. It is
    read again when it changes."""
    admin_key: str | None = None
    control_socket: str | None = None
    """Unix socket of the supervisor, for ``/admin/scale``; set by ``baton up``."""
    tenant_secret: str = "baton"
    allow_open_http: bool = False
    max_body_bytes: Size = 8 * 2**20
    max_inflight_body_bytes: Size = 128 * 2**20
    """Limit for all request bodies together that one router has received and not tokenized yet."""
    max_concurrent_requests: Count = 1024
    max_connections: Count = 16_384
    """HTTP connections of one router; further ones get a 503. It is lowered to what the limit on
    open files allows."""
    max_header_bytes: Annotated[int, AsSize, Field(ge=1024)] = 32 * 2**10
    """Limit for a request's request line and headers together."""
    max_headers: Annotated[int, Field(ge=8)] = 100
    header_seconds: Seconds = 10.0
    """Timeout from the first byte of a connection, or of a further request on it, to the end of
    the headers."""
    body_seconds: Seconds = 60.0
    keep_alive_seconds: Seconds = 75.0
    """How long a connection may idle between two requests. It is longer than load balancers keep
    theirs, so that they close it and not the router."""
    write_seconds: Seconds = 30.0
    """How long a client may take to read what has been written (64 KiB) before its connection is
    closed."""
    endpoint_grace_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a router that is to stop keeps accepting requests, while it reports not ready, so
    that every load balancer in front notices. ``drain_seconds`` start after this."""
    request_seconds: Seconds = 3600.0
    """Timeout of a request, from the end of its body to the end of its answer."""
    cors_origins: Origins = ()
    """Origins whose web pages may send requests from a browser: exact origins, or ``*``. This never
    includes the admin API."""
    allowed_hosts: Hosts = ()
    """Host names that a router on loopback without keys accepts besides those of loopback, e.g.
    behind a proxy on the same machine. ``*``: any. A router that listens beyond loopback accepts
    any, unless some are named here."""
    special_tokens_in_messages: Literal["parsed", "refused"] = "parsed"
    """Special tokens in messages of users and tools. ``parsed``: they become the model's control
    tokens, as in other servers; ``refused``: a request that contains one is refused."""
    access_log: bool = False
    """Write a line of JSON per request to stderr, without prompts and answers."""
    tool_parser: Literal["auto", "llama3", "pythonic", "hermes", "mistral", "none"] = "auto"
    """Format in which the model writes tool calls. ``auto``: determined by its chat template."""
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1", "none"] = "auto"
    """Format of the model's reasoning (``<think>``). ``auto``: determined by its chat template.
    ``deepseek_r1`` is for models whose answer begins with reasoning although the prompt does not
    open it."""
    batch_folder: str | None = None
    """Folder of uploaded files and batches. None: one per cluster below BATON_HOME."""
    batch_lines: Annotated[int, Field(ge=0)] = 2
    """Batch requests that run at once per decode worker while no other requests wait. 0: batches
    are not run."""
    max_file_bytes: Size = 64 * 2**20
    batch_folder_bytes: Size = 4 * 2**30
    """Limit for all files of all tenants together."""
    tenant_files: Count = 10_000
    """Maximum number of files of one tenant. The tenants file may override this and the next three
    settings for each tenant. Listing this many files takes a second."""
    tenant_file_bytes: Size = 2**30
    tenant_uploads_per_minute: Count = 60
    tenant_concurrent_uploads: Count = 4
    place_seconds: Seconds = 5.0
    """Timeout for a conductor to place a request."""
    first_token_seconds: Seconds = 120.0
    """Timeout for a worker's first token, queueing included, and for the KV transfer to a decode
    worker. After it, the request fails over."""
    next_token_seconds: Seconds = 60.0
    """Timeout for each further token. After it, the request fails over."""

    # Metrics and logs
    ops_host: str = "127.0.0.1"
    ops_port: Port | None = None
    """HTTP port of every program for probes, metrics, and a drain command from the same host. None:
    no such server; 0: any free port. Processes of `baton up` use any free port."""
    trace_endpoint: CollectorUrl | None = None
    """URL of an OpenTelemetry collector (OTLP/gRPC): http is plain text, https is TLS. None: no
    traces."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced, among those whose client sent no sampling decision."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model).name

    def accepted_hosts(self, host: str) -> tuple[str, ...] | None:
        """Host names that a server listening at ``host`` accepts besides those of loopback; None
        means any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or host in LOOPBACK):
            return None
        return (*self.allowed_hosts, *filter(None, [self.advertise_address]))

    @property
    def trust(self) -> ClusterCredentials:
        """The credentials by which members of the cluster authenticate each other."""
        return ClusterCredentials(
            self.cluster_secret,
            self.rpc_tls_certificate or "",
            self.rpc_tls_key or "",
            self.rpc_tls_ca or "",
        )

    @property
    def required_redis_url(self) -> str:
        """``redis_url``, for a program that can't run without it. Raises Invalid if it is not
        set."""
        if not self.redis_url:
            raise Invalid("redis_url is not set: BATON_REDIS_URL=redis://HOST:PORT/0")
        return self.redis_url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources by precedence: flags, then the environment, then the YAML file."""
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(PydanticBaseSettingsSource):
    """Settings source that reads the YAML file named by ``BATON_CONFIG``."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return read_config_file(os.environ.get(CONFIG_ENVIRONMENT_VARIABLE))


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Load the settings from all sources. A flag that is None counts as not given. Raises
    Invalid."""
    if config is not None:
        os.environ[CONFIG_ENVIRONMENT_VARIABLE] = str(config)
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        _check_name(name, "command line")
    _check_environment()
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise Invalid(_explain(error)) from error
    check_exposure(settings)
    check_private_network(settings)
    check_combinations(settings)
    return settings


def read_config_file(path: str | None) -> dict[str, Any]:
    """Read a YAML file of settings. Raises Invalid if it can't be read, is not a mapping, or has
    unknown keys."""
    if not path:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Invalid(f"config file {path}: {error}") from error
    if not isinstance(values, dict):
        raise Invalid(f"config file {path}: must be a mapping of settings")
    for name in values:
        _check_name(str(name), f"config file {path}")
    return values


def baton_home() -> Path:
    """Where local clusters keep their state and logs: ``BATON_HOME``, or ``~/.baton``."""
    return Path(os.environ.get(HOME_ENVIRONMENT_VARIABLE) or Path.home() / ".baton")


def child_environment(settings: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    """The environment for a child process: ``settings``, ``extra``, and those variables of this
    process that are not settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name == HOME_ENVIRONMENT_VARIABLE
    }
    named = {ENVIRONMENT_PREFIX + name.upper(): value for name, value in settings.items()}
    return {**inherited, **named, **extra}


def to_environment(settings: Settings) -> dict[str, str]:
    """All settings as text, for :func:`child_environment`."""
    values = settings.model_dump(exclude_none=True)
    return {name: _to_text(value) for name, value in values.items()}


def set_thread_environment(threads: int) -> None:
    """Set the number of threads of numeric libraries that this process imports later. Variables
    that are already set stay as they are."""
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)


def set_ray_environment(is_private: bool) -> None:
    """Configure Ray; call this before Ray is imported. Usage statistics are turned off. A private
    Ray cluster (``is_private``) stays on loopback and requires a random token. Processes that Ray
    starts inherit these variables."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_private:
        # With 0, Ray binds every socket to loopback, since it then allows no cluster of several
        # nodes; despite the name, on Linux, too.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables for numeric libraries. Workers share the cores, so waiting threads must not spin.
    0 threads means one per core."""
    return {
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


def check_exposure(settings: Settings) -> None:
    """Check that every port that listens beyond loopback requires authentication. Raises
    Invalid."""
    is_locked = settings.cluster_secret or settings.trust.has_tls
    if settings.grpc_host not in LOOPBACK and not is_locked:
        raise Invalid(
            f"grpc_host is {settings.grpc_host!r}: listening beyond loopback needs "
            "cluster_secret (BATON_CLUSTER_SECRET), the same for every program of the cluster, or "
            "certificates (rpc_tls_certificate, rpc_tls_key, rpc_tls_ca)"
        )
    keyed = settings.api_keys or settings.tenants_file
    if settings.host not in LOOPBACK and not (keyed or settings.allow_open_http):
        raise Invalid(
            f"host is {settings.host!r}: listening beyond loopback needs api_keys "
            "(BATON_API_KEYS=key=tenant) or a tenants_file, or allow_open_http=true if that is what"
            " you want"
        )


def check_private_network(settings: Settings) -> None:
    """Check that NIXL uses a network only if the operator has confirmed that it is private. Raises
    Invalid."""
    exposed = [name for name in settings.nixl_interfaces if name != LOOPBACK_DEVICE]
    if exposed and not settings.nixl_private_network:
        raise Invalid(
            f"nixl_interfaces is {','.join(settings.nixl_interfaces)}: UCX and RDMA authenticate "
            "nobody and encrypt nothing, whatever cluster_secret and certificates say. Any machine "
            "on that network can read prompts and answers out of workers and stores, write any of "
            "their memory, and so run code as them. If only this cluster's machines are on it, say "
            "so with nixl_private_network=true (BATON_NIXL_PRIVATE_NETWORK); else leave "
            "nixl_interfaces empty, and KV goes between hosts over gRPC, with the secret and TLS"
        )


def check_combinations(settings: Settings) -> None:
    """Check settings that depend on each other. Raises Invalid."""
    least = settings.min_prefill + settings.min_decode
    if settings.min_prefill > settings.max_prefill or settings.min_decode > settings.max_decode:
        raise Invalid("min_prefill and min_decode must not be above max_prefill and max_decode")
    if least > settings.max_workers:
        raise Invalid(
            f"max_workers is {settings.max_workers}: min_prefill and min_decode are {least}"
            " together"
        )
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise Invalid("tls_certificate and tls_key go together: give both, or none")
    files = (settings.rpc_tls_certificate, settings.rpc_tls_key, settings.rpc_tls_ca)
    if any(files) and not all(files):
        raise Invalid(
            "rpc_tls_certificate, rpc_tls_key and rpc_tls_ca go together: give all, or none"
        )
    if settings.autoscale_shrink_utilisation > settings.autoscale_utilisation:
        raise Invalid(
            f"autoscale_shrink_utilisation is {settings.autoscale_shrink_utilisation}: above "
            f"autoscale_utilisation ({settings.autoscale_utilisation}), pools would flap"
        )


def _to_text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return ",".join(str(part) for part in value)
    return str(value)


def _check_environment() -> None:
    for variable in os.environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in (
            CONFIG_ENVIRONMENT_VARIABLE,
            HOME_ENVIRONMENT_VARIABLE,
        ):
            _check_name(
                variable.removeprefix(ENVIRONMENT_PREFIX).lower(),
                f"environment variable {variable}",
            )


def _check_name(name: str, where: str) -> None:
    if name not in Settings.model_fields:
        close = difflib.get_close_matches(name, Settings.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise Invalid(f"{where}: there is no setting {name!r}{hint}")


def _explain(error: ValidationError) -> str:
    """Describe each wrong setting: its name, its value, and what would be valid."""
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]] or ["settings"]
        is_secret = parts[0] in SECRET_SETTINGS
        name = parts[0] if is_secret else ".".join(parts)
        shown = "wrong" if is_secret else repr(problem.get("input"))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} is {shown}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
