"""Commands that start, resize and stop a cluster, or one of its processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.core.worker_kinds import WorkerKind, list_kinds
from baton.errors import Invalid
from command_line.common_options import (
    ComputeOptions,
    Deterministic,
    Name,
    NoWait,
    SettingSources,
    TargetCluster,
    cluster_name,
    model_settings,
)
from command_line.option_groups import option_per_kind, with_option_groups


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for the model, and for the engine of the workers."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model directory, or Hugging Face hub id. Repeatable: the cluster then serves all "
            "of them, by the last parts of their paths, or by the names in NAME=PATH.",
        ),
    ] = None
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=DIR",
            help="A LoRA adapter to load at the start; of one of several models: "
            "NAME=MODEL:DIR. Repeatable.",
        ),
    ] = None
    engine: Annotated[
        str | None, typer.Option(help="What computes for the workers: baton or vllm.")
    ] = None
    attach: Annotated[
        str | None,
        typer.Option(
            metavar="POOL=URL,…",
            help="Servers that run already (vllm serve), one for each worker of a pool.",
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        typer.Option(help="Python that has vLLM, to start servers with: .venv-vllm/bin/python."),
    ] = None
    engine_args: Annotated[
        str | None,
        typer.Option(help="vLLM's own arguments: --engine-args='--tensor-parallel-size 2'."),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        adapters = parse_adapters(self.adapters)
        return {**vars(self), **model_settings(self.model or []), "adapters": adapters}


def _pool_size(kind: WorkerKind) -> object:
    others = list_kinds("--{}", can=lambda each: not each.serves_alone)
    text = f"Number of {kind.role.value} workers"
    if kind.serves_alone:
        text += f", which serve whole requests. Without {others}: no other workers"
    return Annotated[int | None, typer.Option(help=f"{text}.")]


@dataclass(frozen=True, kw_only=True)
@option_per_kind(_pool_size)
class PoolOptions:
    """The sizes of the pools: one option for each kind of worker."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options for the other processes of a cluster, and for their addresses."""

    on: Annotated[str | None, typer.Option(help="Where workers run: local or ray.")] = None
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join: auto or HOST:PORT. Default: start a private one."),
    ] = None
    host: Annotated[str | None, typer.Option(help="Address that the router listens on.")] = None
    port: Annotated[int | None, typer.Option(help="Port that the router listens on.")] = None
    redis_url: Annotated[
        str | None,
        typer.Option("--redis", help="Redis URL. Default: start an embedded Redis."),
    ] = None


@with_option_groups
def up(
    engine: EngineOptions,
    pools: PoolOptions,
    cluster: ClusterOptions,
    compute: ComputeOptions,
    transports: Annotated[
        str | None,
        typer.Option(help="KV transports to use, best first; some of shm,cuda_ipc,nixl,grpc."),
    ] = None,
    mock: Annotated[
        bool,
        typer.Option(
            "--mock", help="Start mock workers without a model, in one process, and no KV store."
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return when ready.")
    ] = False,
    name: Name = None,
    sources: SettingSources = SettingSources(),
) -> None:
    """Start a whole cluster; Ctrl-C drains and stops it."""
    from command_line.up import run_up

    flags = {
        "cluster": name,
        **engine.settings,
        **vars(pools),
        **vars(cluster),
        **compute.settings,
        "transports": transports,
        "mock": mock or None,
    }
    run_up(sources.load(flags), detach)


def parse_adapters(pairs: list[str] | None) -> dict[str, str] | None:
    """Return the options NAME=DIR and NAME=MODEL:DIR as the setting ``adapters``, with absolute
    folders.
    Raises Invalid for a pair of another form, or a name that is given twice."""
    adapters: dict[str, str] = {}
    for pair in pairs or []:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise Invalid(f"--adapter takes NAME=DIR, not {pair!r}")
        if name in adapters:
            raise Invalid(f"--adapter {name} is given twice")
        model, colon, path = folder.rpartition(":")
        adapters[name] = model + colon + str(Path(path).expanduser().absolute())
    return adapters or None


def down(name: Name = None) -> None:
    """Drain and stop a cluster."""
    from command_line.up import run_down

    run_down(cluster_name(name))


@with_option_groups
def scale(
    pools: list[str],
    target: TargetCluster,
    no_wait: NoWait = False,
) -> None:
    """Resize pools, e.g. prefill=2 decode=3 or mixed=2, or MODEL/decode=3 if the cluster serves
    several models. In Kubernetes, pools may have other names."""
    from command_line import scale

    if target.is_kubernetes:
        from command_line import kubernetes

        kubernetes.scale(target.kubernetes_settings, pools, not no_wait)
    else:
        scale.run_scale(cluster_name(target.name), pools, not no_wait)


@with_option_groups
def drain(
    worker: Annotated[str, typer.Argument(help="The worker's id, or the name of its pod.")],
    target: TargetCluster = TargetCluster(),
    no_wait: NoWait = False,
) -> None:
    """Let one worker finish its requests, then remove it."""
    from command_line import scale

    if target.is_kubernetes:
        from command_line import kubernetes

        kubernetes.drain(target.kubernetes_settings, worker, not no_wait)
    else:
        scale.run_drain(cluster_name(target.name), worker, not no_wait)


@with_option_groups
def serve(
    role: str,
    status_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    deterministic: Deterministic = False,
    sources: SettingSources = SettingSources(),
) -> None:
    """Run one role in the foreground: router, conductor, kvstore, mock, or a kind of worker:
    prefill, decode or mixed."""
    from command_line.serve import run_role

    flags = {"deterministic": deterministic or None}
    run_role(role, status_fd, sources.config, sources.merge(flags))
