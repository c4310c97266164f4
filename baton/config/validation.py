"""Checks of settings that depend on each other."""

from baton.config.attached_server import event_endpoints
from baton.config.settings import LOOPBACK, Settings
from baton.core.worker_kinds import WORKER_KINDS, list_kinds, serving_problem
from baton.errors import Invalid

LOOPBACK_DEVICE = "lo"


def check_exposure(settings: Settings) -> None:
    """Raise Invalid if a port that listens beyond loopback does not require authentication."""
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
    """Raise Invalid if NIXL is to use a network, but ``nixl_private_network`` does not confirm that
    this network is private."""
    exposed = [name for name in settings.nixl_interfaces if name != LOOPBACK_DEVICE]
    if exposed and not settings.nixl_private_network:
        raise Invalid(
            f"nixl_interfaces is {','.join(settings.nixl_interfaces)}: UCX and RDMA authenticate "
            "nobody and encrypt nothing, even if cluster_secret or certificates are set. Any "
            "machine on that network can read prompts and answers out of workers and stores, write "
            "any of their memory, and thus run code with their privileges. If only this cluster's "
            "machines are on it, set nixl_private_network=true (BATON_NIXL_PRIVATE_NETWORK); "
            "otherwise leave nixl_interfaces empty, so that KV is transferred between hosts over "
            "gRPC, which uses the secret and TLS"
        )


def check_combinations(settings: Settings) -> None:
    """Raise Invalid if the values of settings that depend on each other contradict each other."""
    _check_servers(settings)
    _check_pools(settings)
    least = settings.min_prefill + settings.min_decode
    if settings.min_prefill > settings.max_prefill or settings.min_decode > settings.max_decode:
        raise Invalid(
            "min_prefill must not be above max_prefill, and min_decode not above max_decode"
        )
    if least > settings.max_workers:
        raise Invalid(
            f"max_workers is {settings.max_workers}; it must be at least min_prefill + "
            f"min_decode, which is {least}"
        )
    for name, (model, _) in settings.adapter_folders.items():
        if settings.models and model not in settings.models:
            raise Invalid(
                f"adapters: {name} belongs to model {model}, which is not one of the models"
            )
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise Invalid("tls_certificate and tls_key go together: set both or neither")
    files = (settings.rpc_tls_certificate, settings.rpc_tls_key, settings.rpc_tls_ca)
    if any(files) and not all(files):
        raise Invalid(
            "rpc_tls_certificate, rpc_tls_key and rpc_tls_ca go together: set all or none"
        )
    if settings.autoscale_shrink_utilisation > settings.autoscale_utilisation:
        raise Invalid(
            f"autoscale_shrink_utilisation is {settings.autoscale_shrink_utilisation}; it "
            f"must be at most autoscale_utilisation ({settings.autoscale_utilisation}), otherwise "
            "a pool would grow and shrink in turn at the same load"
        )


def _check_servers(settings: Settings) -> None:
    """Raise Invalid if the settings of the inference servers below workers are malformed, or
    contradict each other."""
    for each in settings.attach:
        pool, _, url = each.partition("=")
        if pool not in WORKER_KINDS or not url.startswith("http://"):
            forms = list_kinds("{}=http://HOST:PORT", "or")
            raise Invalid(f"attach: {each!r} must look like {forms}")
        event_endpoints(url)
    urls = [each.partition("=")[2].partition("?")[0] for each in settings.attach]
    if len(set(urls)) != len(urls):
        raise Invalid("attach names a server twice; each worker needs one of its own")
    if settings.attach and (settings.on == "ray" or settings.models or settings.mock):
        raise Invalid("attach needs one model, on=local, and no mock workers")
    if settings.engine == "vllm" and (settings.on == "ray" or settings.mock):
        raise Invalid("engine vllm needs on=local, and no mock workers")
    for name in ("engine_python", "engine_args"):
        if settings.engine != "vllm" and getattr(settings, name):
            raise Invalid(f"{name} is only read with engine=vllm; set engine=vllm, or unset {name}")


def _check_pools(settings: Settings) -> None:
    """Raise Invalid if the pools of ``baton up`` could not serve requests."""
    sizes = settings.pool_sizes
    if not any(sizes.values()):
        raise Invalid(f"{list_kinds()} are all 0: there would be no workers")
    if problem := serving_problem(sizes):
        raise Invalid(problem)
