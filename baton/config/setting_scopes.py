"""A table of which programs read each setting, and in which of these programs the setting can
change while the program runs.

A setting that is *live* in a program takes effect there when the config file changes. Any other
setting takes effect when the program starts again. The Helm chart has the same table (``python -m
tools.chart_settings``) and restarts only the pods that need it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from baton.config.settings import SECRET_SETTINGS, Settings
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, runs_engine


class Reader(StrEnum):
    """A program that reads settings. ``WORKER`` stands for all kinds of workers."""

    ROUTER = "router"
    CONDUCTOR = "conductor"
    WORKER = "worker"
    KVSTORE = "kvstore"
    MOCK = "mock"
    SUPERVISOR = "supervisor"
    """The supervisor of ``baton up``. It passes the other programs' settings on to them."""

    @classmethod
    def of_role(cls, role: Role) -> "Reader":
        return cls.WORKER if role in WORKER_KINDS else cls(role.value)


@dataclass(frozen=True, slots=True)
class SettingScope:
    """The programs that read a setting (``readers``), and those of them in which its value can
    change while they run (``live``)."""

    readers: frozenset[Reader]
    live: frozenset[Reader] = frozenset()


_ROUTER = (Reader.ROUTER,)
_CONDUCTOR = (Reader.CONDUCTOR,)
_WORKER = (Reader.WORKER,)
_KVSTORE = (Reader.KVSTORE,)
_MOCK = (Reader.MOCK,)
_SUPERVISOR = (Reader.SUPERVISOR,)
_REQUEST_PATH = (Reader.ROUTER, Reader.CONDUCTOR, Reader.WORKER)
_GRPC_SERVERS = (Reader.CONDUCTOR, Reader.WORKER, Reader.KVSTORE)
_TRANSFERS = (Reader.WORKER, Reader.KVSTORE)
_SCALERS = (Reader.CONDUCTOR, Reader.SUPERVISOR)
_SERVED = tuple(reader for reader in Reader if reader is not Reader.SUPERVISOR)
"""Every program that ``baton serve`` runs."""

_READERS: Mapping[tuple[Reader, ...], str] = MappingProxyType({
    tuple(Reader): """
        cluster redis_url redis_password cluster_secret rpc_tls_certificate rpc_tls_key rpc_tls_ca
        drain_timeout_seconds hang_timeout_seconds ops_port portable log_level log_format""",
    _SERVED: """
        id redis_wait_seconds heartbeat_interval_seconds advertise_address ops_host
        allowed_hosts metric_aliases""",
    _REQUEST_PATH: "trace_endpoint slo_itl_seconds",
    (*_GRPC_SERVERS, Reader.MOCK, Reader.SUPERVISOR): "grpc_host",
    _GRPC_SERVERS: "grpc_port",
    (Reader.CONDUCTOR, Reader.WORKER): "framed_port max_sequences",
    (Reader.ROUTER, Reader.CONDUCTOR): "slo_ttft_seconds",
    (Reader.ROUTER, Reader.WORKER): "max_lora_rank",
    (Reader.ROUTER, Reader.WORKER, Reader.MOCK): "max_model_tokens",
    (Reader.ROUTER, Reader.WORKER, Reader.MOCK, Reader.SUPERVISOR): "model served_model_name",
    (Reader.WORKER, Reader.SUPERVISOR): "device threads adapters attach engine engine_python",
    (Reader.ROUTER, Reader.SUPERVISOR): """
        models host port reuse_port tls_certificate admin_key tenant_secret""",
    _ROUTER: """
        worker_wait_seconds trace_sample tls_key control_socket api_keys tenants_file
        allow_open_http max_body_bytes
        max_inflight_body_bytes max_concurrent_requests max_connections max_header_bytes max_headers
        header_timeout_seconds body_timeout_seconds keep_alive_timeout_seconds
        write_timeout_seconds endpoint_grace_seconds request_timeout_seconds cors_origins
        special_tokens_in_messages strict_fields access_log tool_parser reasoning_parser
        generation_defaults batch_folder batch_concurrency max_file_bytes batch_folder_bytes
        tenant_files tenant_file_bytes tenant_uploads_per_minute tenant_concurrent_uploads
        response_bytes response_ttl_seconds tenant_response_bytes tenant_responses
        placement_timeout_seconds first_token_timeout_seconds next_token_timeout_seconds""",
    _SCALERS: """
        autoscale autoscale_pools min_prefill max_prefill min_decode max_decode max_workers
        autoscale_interval_seconds autoscale_stable_seconds autoscale_cooldown_seconds
        autoscale_step autoscale_pending_timeout_seconds autoscale_shrink_seconds""",
    _CONDUCTOR: """
        autoscale_utilisation autoscale_shrink_utilisation
        autoscale_start_seconds autoscale_prefill_pool autoscale_decode_pool kubernetes_namespace
        kubernetes_pools kubernetes_lease kubernetes_initial_replicas kubernetes_watch
        placement_policy admission max_short_prompt_advantage local_prefill""",
    (Reader.WORKER, Reader.MOCK): "block_tokens",
    _WORKER: """
        engine_args dtype quantization kv_dtype share_cores cpu_kernels cpu_instruction_set
        cuda_graphs deterministic async_scheduling speculation speculation_tokens draft_model
        draft_pool_bytes num_blocks pool_bytes max_batched_tokens chunk_tokens max_waiting
        max_adapters prefill_order tenant_fairness store_timeout_seconds store_reload
        kv_codec_wire kv_codec_store kv_codec_recent_tokens kv_staging_bytes""",
    _TRANSFERS: "transports nixl_interfaces nixl_private_network kv_codec_disk",
    _KVSTORE: """
        store_bytes store_disk_bytes store_folder store_eviction store_tenant_share""",
    _MOCK: f"""
        {" ".join(f"mock_{role.value}" for role in filter(runs_engine, WORKER_KINDS))}
        mock_prefill_tokens_per_second mock_step_seconds mock_kv_tokens mock_cache_tokens""",
    _SUPERVISOR: f"""
        {" ".join(WORKER_KINDS)}
        on routers ray_address ray_worker_cpus ray_worker_gpus mock""",
})  # fmt: skip

_LIVE: Mapping[tuple[Reader, ...], str] = MappingProxyType({
    tuple(Reader): "log_level",
    _REQUEST_PATH: "slo_itl_seconds trace_endpoint",
    (Reader.ROUTER, Reader.CONDUCTOR): "slo_ttft_seconds",
    _ROUTER: """
        trace_sample max_body_bytes max_inflight_body_bytes max_concurrent_requests
        body_timeout_seconds request_timeout_seconds placement_timeout_seconds
        first_token_timeout_seconds next_token_timeout_seconds tenant_files tenant_file_bytes
        tenant_uploads_per_minute tenant_concurrent_uploads strict_fields""",
    _CONDUCTOR: """
        admission max_short_prompt_advantage max_sequences kubernetes_initial_replicas""",
})  # fmt: skip


def _readers_by_name(table: Mapping[tuple[Reader, ...], str]) -> dict[str, frozenset[Reader]]:
    pairs = [
        (name, frozenset(readers)) for readers, names in table.items() for name in names.split()
    ]
    by_name = dict(pairs)
    assert len(by_name) == len(pairs), "a setting is listed twice"
    return by_name


def _scopes() -> dict[str, SettingScope]:
    readers, live = _readers_by_name(_READERS), _readers_by_name(_LIVE)
    unlisted = readers.keys() ^ Settings.model_fields.keys()
    assert not unlisted, f"settings and their readers differ: {sorted(unlisted)}"
    return {name: SettingScope(readers[name], live.get(name, frozenset())) for name in readers}


SETTING_SCOPES: Mapping[str, SettingScope] = MappingProxyType(_scopes())


def live_settings(reader: Reader) -> frozenset[str]:
    """Return the names of the settings that can change while the program ``reader`` runs."""
    return frozenset(name for name, scope in SETTING_SCOPES.items() if reader in scope.live)


def foreign_secrets(reader: Reader) -> frozenset[str]:
    """Return the names of the secret settings that the program ``reader`` does not read."""
    return frozenset(n for n in SECRET_SETTINGS if reader not in SETTING_SCOPES[n].readers)


def restarting_settings(reader: Reader, names: Iterable[str]) -> list[str]:
    """Return, sorted, those of ``names`` whose changes take effect only after ``reader`` is started
    again. For the supervisor, these are all settings that are not live in every program that reads
    them, since the supervisor keeps the values that it passes to the processes it starts."""
    if reader is Reader.SUPERVISOR:
        return sorted(n for n in names if SETTING_SCOPES[n].readers > SETTING_SCOPES[n].live)
    return sorted(
        name
        for name in names
        if reader in SETTING_SCOPES[name].readers and reader not in SETTING_SCOPES[name].live
    )
