"""Opens a supervisor with the backend that the settings name: local processes, with engines of
their own or attached servers, Ray or mock workers.

Ray is imported only here and in ``orchestrator/ray``, and only when the settings ask for it.
"""

import importlib.util
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.checkpoints.checkpoint import is_gguf, load_model_config, load_model_limits
from baton.checkpoints.hub import resolve_model
from baton.clock import Clock
from baton.config import Settings, set_ray_environment
from baton.config.pinned_models import pin_models
from baton.errors import Invalid
from orchestrator.cluster_state import ClusterFolder, ClusterState
from orchestrator.engine_probe import probe_vllm
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.local_pools import AttachedPools, MockPools, ServerPools
from orchestrator.supervisor import Supervisor

OnState = Callable[[ClusterState], None]


def check_backend(settings: Settings) -> None:
    """Raise Invalid if the backend is not installed, or conflicts with other settings."""
    if settings.on == "ray" and importlib.util.find_spec("ray") is None:
        raise Invalid("--on ray: Ray is not installed: pip install 'baton[ray]'")
    if settings.on != "ray" and settings.ray_address is not None:
        raise Invalid(f"ray_address is {settings.ray_address!r}, which needs --on ray")
    if settings.mock and (settings.on == "ray" or settings.autoscale != "off"):
        raise Invalid("mock is true, but mock workers need on=local and autoscale=off")
    if settings.attach and settings.engine != "baton":
        raise Invalid(
            f"attach names servers that run already, and engine {settings.engine} would start "
            "others: set one of them"
        )
    if settings.has_server_workers and settings.adapters:
        raise Invalid(
            f"adapters names {', '.join(settings.adapters)}, which vLLM has to load itself: start "
            "its servers with --lora-modules (docs/vllm.md)"
        )


def check_models(settings: Settings) -> Settings:
    """Return the settings with the commit of each model from the Hugging Face hub. The cluster
    keeps it until it is started again. The models are downloaded here, so that not every process
    downloads them. Raises Invalid if the engine can't run a model, or if the engine is vLLM and
    ``engine_python`` has no vLLM, and Unavailable if a model can't be downloaded."""
    settings = pin_models(settings)
    for model in settings.served_models.values():
        path = resolve_model(model)
        if is_gguf(path) and (settings.engine != "baton" or settings.attach):
            engine = "attached servers" if settings.attach else settings.engine
            raise Invalid(
                f"model is {model}, but engine is {engine}, which can't load GGUF files: name the "
                "model that the file was made of"
            )
        if settings.has_server_workers:
            load_model_limits(path)
        else:
            load_model_config(path)
    if settings.engine == "vllm":
        probe_vllm(settings)
    return settings


@asynccontextmanager
async def open_supervisor(
    settings: Settings, folder: ClusterFolder, clock: Clock, on_change: OnState
) -> AsyncIterator[Supervisor]:
    """Open the supervisor, and close its backend on exit. Raises Invalid if the settings don't
    allow the backend, and Unavailable if Ray can't be reached."""
    check_backend(settings)
    if settings.on == "ray":
        async with _open_on_ray(settings, folder, clock, on_change) as supervisor:
            yield supervisor
    elif settings.mock or settings.has_server_workers:
        recipe = LaunchSpecs(settings, folder)
        servers = AttachedPools if settings.attach else ServerPools
        of_kind = MockPools if settings.mock else servers
        pools = {
            model: of_kind(
                specs, clock, settings.drain_timeout_seconds, settings.hang_timeout_seconds
            )
            for model, specs in recipe.by_model().items()
        }
        yield Supervisor(settings, folder, clock, on_change, recipe, pools)
    else:
        yield Supervisor(settings, folder, clock, on_change)


@asynccontextmanager
async def _open_on_ray(
    settings: Settings, folder: ClusterFolder, clock: Clock, on_change: OnState
) -> AsyncIterator[Supervisor]:
    set_ray_environment(is_private=settings.ray_address is None)
    from orchestrator.ray.cluster import RayCluster
    from orchestrator.ray.pools import RayPools

    cluster = RayCluster(settings)
    try:
        await cluster.connect()
        if cluster.spans_machines:
            settings = _for_network(settings, cluster.supervisor_host)
        recipe = LaunchSpecs(settings, folder, redis_host=cluster.supervisor_host)
        pools = {
            model: RayPools(specs, cluster, clock) for model, specs in recipe.by_model().items()
        }
        yield Supervisor(settings, folder, clock, on_change, recipe, pools)
    finally:
        await cluster.close()


def _for_network(settings: Settings, host: str) -> Settings:
    """Return settings with which processes on several machines can reach each other: with a
    non-loopback address and a cluster secret."""
    secret = settings.cluster_secret or secrets.token_urlsafe(24)
    return settings.model_copy(update={"grpc_host": host, "cluster_secret": secret})
