"""Every setting of every program, by one name each.

A command-line flag wins over the environment (``BATON_<NAME>``), that over a YAML file
(``--config`` or ``BATON_CONFIG``), that over the default. A wrong value, and a name that isn't
one, fail at start-up with what would be right. Nothing else reads the environment.
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
CONFIG_VARIABLE, HOME_VARIABLE = "BATON_CONFIG", "BATON_HOME"
SECRET_SETTINGS = {"cluster_secret", "api_keys", "admin_key", "tenant_secret", "redis_url"}
"""Never shown in an error."""


class Settings(BaseSettings):
    """Frozen. Build it with :func:`load_settings`, which explains what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    # The cluster, and this process in it
    cluster: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    id: str = Field("", max_length=128)
    redis_url: str | None = None
    redis_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """For Redis when a program starts, where both may start at once; 0: it is there, or the program
    fails."""
    worker_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """For a worker when a router starts, before it takes requests that nobody could answer: a
    registry that has forgotten everybody knows them again as soon as they have told it."""
    cluster_secret: str | None = None
    heartbeat_seconds: Seconds = 1.0
    drain_seconds: Seconds = 30.0

    # Where it listens. Port 0 means: any that is free
    host: str = "127.0.0.1"
    port: Port = 8000
    reuse_port: bool = False
    """Several routers listen on one port of one machine, each with an address of its own beside."""
    tls_certificate: str | None = None
    """A PEM file with the router's certificate and what leads to its authority. When it changes it
    is read again."""
    tls_key: str | None = None
    grpc_host: str = "127.0.0.1"
    grpc_port: Port = 0
    line_port: Port = 0
    """Of lines: routers reach workers and conductors there without gRPC, at ``grpc_host``."""
    rpc_tls_certificate: str | None = None
    """PEM files, all three or none: with them, members speak TLS among themselves, and each shows a
    certificate of ``rpc_tls_ca`` that has the DNS name ``baton``. Read again when they change."""
    rpc_tls_key: str | None = None
    rpc_tls_ca: str | None = None
    advertise_address: str | None = None

    # Pools of `baton up`
    on: Literal["local", "ray"] = "local"
    """Where workers run: as processes of this machine, or as actors of a Ray cluster."""
    prefill: Count = 1
    decode: Count = 1
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes, all on the one port."""
    hung_seconds: Annotated[float, Field(ge=0)] = 20.0
    """Without a sign of life (one a second) until a process that has served is killed and started
    again; 0: never."""
    ray_address: RayAddress | None = None
    """``auto`` or HOST:PORT of a running Ray; None: one of its own, on this machine."""
    ray_worker_cpus: Annotated[float, Field(gt=0)] = 0.25
    """What a worker takes of its node's CPUs, as Ray counts them. It bounds how many workers a
    node gets, not how many cores they use."""
    ray_worker_gpus: Annotated[float, Field(ge=0)] | None = None
    """None: one where workers compute on CUDA, else none."""

    # Their size
    autoscale: Annotated[Literal["off", "dry_run", "on"], AsSwitch] = "off"
    """Whether the pools follow the load; ``dry_run`` only says what it would do."""
    autoscale_pools: Literal["supervisor", "kubernetes"] = "supervisor"
    """Whose pools: the supervisor of ``baton up`` resizes its own; ``kubernetes``: a conductor
    resizes the Deployments of its cluster."""
    min_prefill: Count = 1
    max_prefill: Count = 64
    min_decode: Count = 1
    max_decode: Count = 64
    max_workers: Count = 128
    """Of both pools together: how many there are GPUs for."""
    autoscale_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Aimed at when a pool grows."""
    autoscale_shrink_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.6
    """At most, of a pool that has shrunk."""
    autoscale_shrink_seconds: Seconds = 300.0
    """Fewer workers must have done for so long."""
    autoscale_start_seconds: Seconds = 60.0
    """What a worker takes to start: the load is forecast so far ahead."""
    autoscale_seconds: Seconds = 5.0
    """Between two looks."""
    autoscale_stable_seconds: Annotated[float, Field(ge=0)] = 10.0
    """The plan must have asked for a change for so long."""
    autoscale_cooldown_seconds: Annotated[float, Field(ge=0)] = 30.0
    """After a change, until the next one."""
    autoscale_step: Count = 1
    """Workers of one pool, at most, in one change."""
    autoscale_pending_seconds: Seconds = 900.0
    """A worker that does not serve after so long is given up, and its pool is as before."""
    autoscale_prefill_pool: str | None = None
    autoscale_decode_pool: str | None = None
    """In Kubernetes, which pool of the role is resized: by its name (``baton.dev/pool``). None: the
    only one, or that which is called like the role; its others stay as they are."""
    kubernetes_namespace: str | None = None
    """Of the pools' Deployments; None: the pod's own, or the kubeconfig's."""
    kubernetes_pools: PoolTargets = Field(default_factory=dict)
    """What each pool is: POOL=ROLE/DEPLOYMENT,…; empty: they are listed by their labels, for which
    one needs the right to list Deployments."""
    kubernetes_lease: str | None = None
    """By which conductors agree on the one that resizes pools; None: baton-CLUSTER-conductor."""
    kubernetes_watch: bool = False
    """Whether conductors watch the pods of the pools, and place nothing on one that is being
    deleted, before its worker says so itself."""

    # The model
    model: str = str(DEMO_MODEL)
    served_model_name: str | None = None
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """What the model's weights are kept in (docs/engine.md, docs/cuda.md): as ``dtype`` has them,
    or in fewer bits, made at load. A checkpoint in FP8 stays as it is. Workers with different ones
    share nothing."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """What the KV cache is kept in (docs/cuda.md): ``dtype``, or FP8, in half of the memory.
    Workers with different ones share nothing."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Of a worker's arithmetic; 0 means all cores."""
    cpu_kernels: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Whether a CPU computes with our own kernels (docs/engine.md). ``auto``: where they run, and
    with torch else; ``on``: not without them."""
    cuda_graphs: bool = True
    """Whether a GPU replays steps of decodes from graphs (docs/cuda.md)."""
    deterministic: bool = False
    """A request's logits have the same bits in any batch, chunking and placement (docs/engine.md).
    Who can't keep that refuses to start, and workers that compute otherwise are not mixed."""

    # The engine
    overlap: Annotated[Literal["auto", "on", "off"], AsSwitch] = "auto"
    """Whether the next step of answers is planned while this one is computed (docs/engine.md).
    ``auto``: on a GPU, and where kernels leave a core of a CPU free."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    num_blocks: Count | None = None
    pool_bytes: Size | None = None
    max_step_tokens: Count = 512
    chunk_tokens: Count | None = None
    max_running: Count = 64
    max_waiting: Count = 1024
    max_model_tokens: Count | None = None
    prefill_order: PrefillOrderName = "deadline"
    """Whose prompt is computed next: a name in baton/core/prefill_order.py."""
    tenant_fairness: bool = True
    """In a queue, the tenant that was given least goes first."""

    # What is promised to clients
    slo_first_token_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """Beside what the prompt takes by itself; 0: nothing is promised."""
    slo_token_gap_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    """Mean time between two tokens of an answer. Steps of a worker that reads prompts beside
    answers take no longer, if they can (docs/engine.md)."""

    # Placement
    placement_policy: str = "baton"
    """A name in conductor/policy/policies.py; the conductor checks it when it starts."""
    admission: bool | Literal["auto"] = "auto"
    """Whether a request is refused (429) that can't meet what is promised, or for which no decode
    worker will have memory. ``auto``: on, unless a worker computes on a CPU: what is promised by
    default is meant for GPUs, and on a laptop a late answer is better than none."""
    read_alone: bool | Literal["auto"] = "auto"
    """Whether a decode worker may read a prompt itself, where that costs less than another's time
    and the link; auto: not on a CPU."""

    # KV movement and storage
    transports: Transports = ()
    """Empty (or ``auto``): all that can start, best first."""
    nixl_interfaces: Names = ()
    """Network devices that NIXL may use, as UCX calls them (``eth1``, ``mlx5_0:1``). Empty: none,
    and it moves KV within a host only (docs/network.md)."""
    nixl_private_network: bool = False
    """Stated by the operator: only this cluster is on the networks of ``nixl_interfaces``. Whoever
    is may read and write the memory of workers and stores: UCX and RDMA authenticate nobody."""
    store_bytes: Size = 256 * 2**20
    store_disk_bytes: SizeOrZero = 2**30
    """Of the store's SSD tier; 0: none."""
    store_folder: str | None = None
    """Where the SSD tier lies; None: below BATON_HOME, per cluster."""
    store_eviction: Literal["baton", "lru", "lfu", "length_aware"] = "baton"
    store_tenant_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the store's DRAM, at most, for one tenant."""
    store_seconds: Annotated[float, Field(ge=0.1)] = 0.2
    """What a request waits for a call of the store at most."""
    store_reload: Literal["auto", "fetch", "recompute", "split"] = "auto"

    # Mock workers: `baton serve mock`, `baton up --mock`
    mock: bool = False
    """`baton up`: mock workers instead of real ones, all in one process, and no store."""
    mock_prefill: Annotated[int, Field(ge=0, le=1024)] = 4
    mock_decode: Annotated[int, Field(ge=0, le=1024)] = 4
    """Of one process; each has a port of its own."""
    mock_prefill_tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20_000.0
    """Of each worker; 0: prompts take no time."""
    mock_step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02
    """Between two tokens of an answer; 0: the next one comes when the router has taken the last."""
    mock_kv_tokens: Count = 2**20
    """A worker's memory, as it is reported."""
    mock_cache_tokens: Annotated[int, Field(ge=0)] = 2**17
    """Of prefixes, on each worker: cached_tokens is counted by them. 0: none."""

    # The router
    api_keys: Pairs = Field(default_factory=dict)
    tenants_file: str | None = None
    """YAML: who may come in beside ``api_keys``, and what each gets. Read again when it changes."""
    admin_key: str | None = None
    control_socket: str | None = None
    """Where its supervisor listens, for ``/admin/scale``; set by ``baton up``."""
    tenant_secret: str = "baton"
    allow_open_http: bool = False
    max_body_bytes: Size = 8 * 2**20
    max_inflight_body_bytes: Size = 128 * 2**20
    """Of all bodies together that one router has received and not made prompts of yet."""
    max_concurrent_requests: Count = 1024
    max_connections: Count = 16_384
    """Of one router; whoever comes then gets a 503. As many as files may be open, if those are
    fewer."""
    max_header_bytes: Annotated[int, AsSize, Field(ge=1024)] = 32 * 2**10
    """Of a request's line and headers together."""
    max_headers: Annotated[int, Field(ge=8)] = 100
    header_seconds: Seconds = 10.0
    """From a connection's, or a further request's, first byte to the end of its headers."""
    body_seconds: Seconds = 60.0
    keep_alive_seconds: Seconds = 75.0
    """That a connection may idle between two requests. More than load balancers keep theirs, so
    that it is they who close."""
    write_seconds: Seconds = 30.0
    """For a client to read what has been written (64 KiB), before it is given up."""
    endpoint_grace_seconds: Annotated[float, Field(ge=0)] = 0.0
    """That a router which is to leave goes on taking requests, not ready any more: until every
    load balancer in front has heard of it. ``drain_seconds`` begin after it."""
    request_seconds: Seconds = 3600.0
    """For a request from its body's end to its answer's."""
    cors_origins: Origins = ()
    """Whose web pages may ask from a browser: exact origins, or ``*``. Never the admin API."""
    allowed_hosts: Hosts = ()
    """By which names a router without keys is asked beside those of loopback, as behind a proxy on
    its machine; ``*``: any. Beyond loopback any are, unless some are named."""
    special_tokens_in_messages: Literal["parsed", "refused"] = "parsed"
    """Of users and tools: read as the model's own marks, as everywhere, or a request with one is
    refused."""
    access_log: bool = False
    """A line of JSON for each request, to stderr. Neither prompts nor answers."""
    tool_parser: Literal["auto", "llama3", "pythonic", "hermes", "mistral", "none"] = "auto"
    """How the model writes calls of tools; auto: by its chat template."""
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1", "none"] = "auto"
    """Whether it thinks in ``<think>`` first; auto: by its chat template. ``deepseek_r1`` is for
    prompts that don't open a thought although the answer begins with one."""
    batch_folder: str | None = None
    """Of files and batches; None: below BATON_HOME, per cluster."""
    batch_lines: Annotated[int, Field(ge=0)] = 2
    """Of batches, answered at once for each decode worker, while nobody else waits; 0: none."""
    max_file_bytes: Size = 64 * 2**20
    batch_folder_bytes: Size = 4 * 2**30
    """Of all files of all tenants."""
    tenant_files: Count = 10_000
    """Of one tenant, as the three below; the tenants file may say otherwise for each. A list of so
    many is read from disk in a second."""
    tenant_file_bytes: Size = 2**30
    tenant_uploads_per_minute: Count = 60
    tenant_concurrent_uploads: Count = 4
    place_seconds: Seconds = 5.0
    first_token_seconds: Seconds = 120.0
    next_token_seconds: Seconds = 60.0

    # Metrics and logs
    ops_host: str = "127.0.0.1"
    ops_port: Port | None = None
    """Of every program: probes and metrics over HTTP, and a drain for who is on this host. None:
    none of them; 0: any that is free. Processes of `baton up` take any."""
    trace_endpoint: CollectorUrl | None = None
    """Of an OpenTelemetry collector (OTLP/gRPC): http in plain text, https with TLS. None: no
    traces."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, of those whose client has not decided."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.model).name

    def known_hosts(self, host: str) -> tuple[str, ...] | None:
        """The names by which whoever listens at ``host`` is asked, beside those of loopback; None:
        any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or host in LOOPBACK):
            return None
        return (*self.allowed_hosts, *filter(None, [self.advertise_address]))

    @property
    def trust(self) -> ClusterCredentials:
        """What members know each other by."""
        return ClusterCredentials(
            self.cluster_secret,
            self.rpc_tls_certificate or "",
            self.rpc_tls_key or "",
            self.rpc_tls_ca or "",
        )

    @property
    def needs_redis_url(self) -> str:
        """For a role that was started by itself. Raises Invalid when it is not set."""
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
        """Flags, then the environment, then the file, which :func:`load_settings` has read."""
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(PydanticBaseSettingsSource):
    """The YAML file that ``BATON_CONFIG`` names."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return read_config_file(os.environ.get(CONFIG_VARIABLE))


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Settings from all sources; a flag that is None was not given. Raises Invalid."""
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)
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
    """Raises Invalid for a file that can't be read, is no mapping, or has unknown keys."""
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
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".baton")


def child_environment(settings: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    """The environment of a program that gets ``settings`` and, of what we got ourselves, only
    what is no setting."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name == HOME_VARIABLE
    }
    named = {ENVIRONMENT_PREFIX + name.upper(): value for name, value in settings.items()}
    return {**inherited, **named, **extra}


def to_environment(settings: Settings) -> dict[str, str]:
    """Every setting, as a child reads it, for :func:`child_environment`."""
    values = settings.model_dump(exclude_none=True)
    return {name: _to_text(value) for name, value in values.items()}


def set_thread_environment(threads: int) -> None:
    """For arithmetic libraries that this process imports later; what is set already stays."""
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)


def set_ray_environment(own: bool) -> None:
    """For Ray, before it is imported: it tells nobody of its use. One of our own stays on loopback
    and asks for a token that nobody else knows. Processes that it starts inherit this."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own:
        # Ray's switch for clusters of several nodes on systems where it has none by default: off,
        # every socket is bound to loopback.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def thread_environment(threads: int) -> dict[str, str]:
    """Workers share the cores: who waits must not spin. 0 means all cores."""
    return {
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


def check_exposure(settings: Settings) -> None:
    """What listens beyond this host needs a lock. Raises Invalid."""
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
    """NIXL on a network needs the operator's word that nobody else is on it. Raises Invalid."""
    exposed = [name for name in settings.nixl_interfaces if name != LOOPBACK_DEVICE]
    if exposed and not settings.nixl_private_network:
        raise Invalid(
            f"nixl_interfaces is {','.join(settings.nixl_interfaces)}: UCX and RDMA authenticate "
            "nobody and encrypt nothing, whatever cluster_secret and certificates say. Whoever is "
            "on that network can read prompts and answers out of workers and stores, write any of "
            "their memory, and so run code as them. If only this cluster's machines are on it, say "
            "so with nixl_private_network=true (BATON_NIXL_PRIVATE_NETWORK); else leave "
            "nixl_interfaces empty, and KV goes between hosts over gRPC, with the secret and TLS"
        )


def check_combinations(settings: Settings) -> None:
    """What must go together. Raises Invalid."""
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
            CONFIG_VARIABLE,
            HOME_VARIABLE,
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
    """One line per wrong setting: its name, its value, and what would be right."""
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]] or ["settings"]
        is_secret = parts[0] in SECRET_SETTINGS
        name = parts[0] if is_secret else ".".join(parts)
        shown = "wrong" if is_secret else repr(problem.get("input"))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} is {shown}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
