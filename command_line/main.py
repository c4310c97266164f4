"""``baton``: one program for everything. Exit codes: 0 done, 1 it failed, 2 asked wrongly.

Commands import what they need when they run: ``baton status`` must not wait for torch.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.errors import BatonError, Invalid
from command_line import bench as bench
from command_line import key, simulate_options

if TYPE_CHECKING:
    from baton.config import Settings

app = typer.Typer(
    name="baton",
    help="Serves large language models on separate prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str | None, typer.Option(help="Which cluster; BATON_CLUSTER, or default.")]
Config = Annotated[Path | None, typer.Option(help="A YAML file of settings.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
OnWhere = Annotated[
    str, typer.Option("--on", help="cluster: one of `baton up`; or kubernetes.", metavar="WHERE")
]
Namespace = Annotated[str | None, typer.Option(help="In Kubernetes; default: the current one.")]
Quantization = Annotated[
    str | None, typer.Option(help="What weights are kept in: none, fp8; on a CPU int8, int4.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same bits in any batch, or no start.")
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; repeatable."),
]


def parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """``--set name=value`` as settings."""
    parts = [pair.partition("=") for pair in pairs or []]
    for name, equals, _ in parts:
        if not equals or not name:
            raise Invalid(f"--set takes NAME=VALUE, not {name!r}")
    return {name.replace("-", "_"): value for name, _, value in parts}


def cluster_name(name: str | None) -> str:
    from baton.config import load_settings

    return load_settings(cluster=name).cluster


def merge_settings(flags: dict[str, Any], pairs: list[str] | None) -> dict[str, Any]:
    """A setting's own flag wins over its ``--set``."""
    given = {name: value for name, value in flags.items() if value is not None}
    return {**parse_settings(pairs), **given}


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="A directory, or a hub id.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    on: Annotated[str | None, typer.Option(help="Where workers run: local or ray.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="auto or HOST:PORT; default: a Ray of its own.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where the router listens.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the router listens.")] = None,
    redis: Annotated[str | None, typer.Option(help="A Redis URL; default: embedded.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    quantization: Quantization = None,
    deterministic: Deterministic = False,
    transports: Annotated[str | None, typer.Option(help="Of shm,nixl,grpc; best first.")] = None,
    mock: Annotated[
        bool, typer.Option("--mock", help="Workers without a model, in one process; no store.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready.")] = False,
    name: Name = None,
    config: Config = None,
    set_: Setting = None,
) -> None:
    """Start a whole cluster; Ctrl-C drains and stops it."""
    from baton.config import load_settings
    from command_line.up import run_up

    flags = {
        "cluster": name,
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "on": on,
        "ray_address": ray_address,
        "host": host,
        "port": port,
        "redis_url": redis,
        "device": device,
        "dtype": dtype,
        "quantization": quantization,
        "deterministic": deterministic or None,
        "transports": transports,
        "mock": mock or None,
    }
    run_up(load_settings(config, **merge_settings(flags, set_)), detach)


@app.command()
def down(name: Name = None) -> None:
    """Drain and stop a cluster."""
    from command_line.up import run_down

    run_down(cluster_name(name))


@app.command()
def status(
    as_json: AsJson = False,
    on: OnWhere = "cluster",
    namespace: Namespace = None,
    name: Name = None,
    config: Config = None,
) -> None:
    """What runs, in which state."""
    from command_line.status import show_status

    if on_kubernetes(on):
        from command_line import kubernetes

        kubernetes.status(kubernetes_settings(name, namespace, config), as_json)
    else:
        show_status(cluster_name(name), as_json)


@app.command()
def top(name: Name = None) -> None:
    """Processes and their load, live; Ctrl-C ends it."""
    from command_line.status import show_top

    show_top(cluster_name(name))


@app.command()
def logs(process: str, name: Name = None) -> None:
    """Print the log of one process."""
    from command_line.status import show_log

    show_log(cluster_name(name), process)


@app.command()
def scale(
    pools: list[str],
    on: OnWhere = "cluster",
    namespace: Namespace = None,
    no_wait: NoWait = False,
    name: Name = None,
    config: Config = None,
) -> None:
    """Resize the pools: prefill=2 decode=3. In Kubernetes a pool may have a name of its own."""
    from command_line import scale

    if on_kubernetes(on):
        from command_line import kubernetes

        kubernetes.scale(kubernetes_settings(name, namespace, config), pools)
    else:
        scale.run_scale(cluster_name(name), pools, not no_wait)


@app.command()
def drain(
    worker: Annotated[str | None, typer.Argument(help="Its id, or its pod's name.")] = None,
    own: Annotated[
        bool, typer.Option("--self", help="The program of this container (its ops_port).")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Of --self, seconds; default: drain_seconds.")
    ] = None,
    on: OnWhere = "cluster",
    namespace: Namespace = None,
    no_wait: NoWait = False,
    name: Name = None,
    config: Config = None,
) -> None:
    """Let one worker finish what it has, and remove it. With --self, as a container's preStop hook:
    the program beside it takes nothing new, and this returns when nothing is left."""
    from baton.config import load_settings
    from command_line import scale
    from command_line.drain_self import run_drain_self

    if own == (worker is not None):
        raise Invalid("drain takes a worker's name, or --self")
    if worker is None:
        run_drain_self(load_settings(config), timeout)
    elif on_kubernetes(on):
        from command_line import kubernetes

        kubernetes.drain(kubernetes_settings(name, namespace, config), worker)
    else:
        scale.run_drain(cluster_name(name), worker, not no_wait)


def on_kubernetes(where: str) -> bool:
    if where not in ("cluster", "local", "ray", "kubernetes"):
        raise Invalid(f"--on {where}: it is cluster (one of `baton up`), or kubernetes")
    return where == "kubernetes"


def kubernetes_settings(name: str | None, namespace: str | None, config: Path | None) -> "Settings":
    from baton.config import load_settings

    return load_settings(config, cluster=name, kubernetes_namespace=namespace)


@app.command()
def serve(
    role: str,
    status_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    deterministic: Deterministic = False,
    config: Config = None,
    set_: Setting = None,
) -> None:
    """Run one role in the foreground: router, conductor, prefill, decode, kvstore or mock."""
    from command_line.serve import run_role

    flags = {"deterministic": deterministic or None}
    run_role(role, status_fd, config, merge_settings(flags, set_))


@app.command()
def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="Repeatable: one batch.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The prompt is this file.")] = None,
    model: Annotated[str | None, typer.Option(help="A directory, or a hub id.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-9, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=1e-9)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1)] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer follows this schema: a file, or JSON.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    quantization: Quantization = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
    config: Config = None,
    set_: Setting = None,
) -> None:
    """The engine alone, in this process: the reference that the cluster must equal."""
    from baton.config import load_settings, set_thread_environment
    from baton.core.request import SamplingParams

    flags = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "quantization": quantization,
        "deterministic": deterministic or None,
    }
    settings = load_settings(config, **merge_settings(flags, set_))
    prompts = [*(prompt or []), *([_read(prompt_file)] if prompt_file else [])]
    if not prompts:
        raise Invalid("generate needs --prompt TEXT or --prompt-file FILE")
    from command_line.generate_grammar import parse_grammar

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
        grammar=parse_grammar(json_schema, regex),
    )
    set_thread_environment(settings.threads)  # before torch is imported
    from command_line.generate import run_generate

    run_generate(settings, prompts, sampling, as_json)


app.add_typer(key.app, name="key")
kv = typer.Typer(help="The KV store: what it holds, and what to do about it.", no_args_is_help=True)
app.add_typer(kv, name="kv")

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's blocks.")]
Model = Annotated[str | None, typer.Option(help="Only this model's: its name, or digest.")]
OlderThan = Annotated[
    str | None, typer.Option(help="Only what was stored before: 90, 15m, 2h, 3d.")
]


@kv.command("stats")
def kv_stats(as_json: AsJson = False, name: Name = None) -> None:
    """Bytes, blocks, hits and evictions of every node."""
    from command_line.kv import run_stats

    run_stats(cluster_name(name), as_json)


@kv.command("ls")
def kv_ls(
    tenant: Tenant = None,
    model: Model = None,
    older_than: OlderThan = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Blocks per node.")] = 20,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Blocks one by one, oldest first."""
    from command_line.kv import block_filter, run_list

    cluster = cluster_name(name)
    run_list(cluster, block_filter(cluster, tenant, model, older_than), limit, as_json)


@kv.command("find")
def kv_find(
    wanted: Annotated[str, typer.Argument(help="A block's key in hex, or the text of a prompt.")],
    tenant: Annotated[str, typer.Option(help="Whose prompt it is.")] = "default",
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Which nodes hold a block, or how much of a prompt."""
    from command_line.kv import run_find

    run_find(cluster_name(name), wanted, tenant, as_json)


@kv.command("purge")
def kv_purge(
    tenant: Tenant = None,
    model: Model = None,
    older_than: OlderThan = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything there is.")] = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Forget blocks, in every tier of every node."""
    from command_line.kv import block_filter, run_purge

    if not (tenant or model or older_than or everything):
        raise Invalid("purge needs --tenant, --model, --older-than, or --all")
    cluster = cluster_name(name)
    run_purge(cluster, block_filter(cluster, tenant, model, older_than), as_json)


@kv.command("warm")
def kv_warm(
    prompt: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="One prompt per line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="As a user's message.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Of the tenant to warm for.")] = None,
    name: Name = None,
) -> None:
    """Have prompts computed and stored before their users come."""
    from command_line.kv import read_prompts, run_warm

    run_warm(cluster_name(name), read_prompts(prompt or [], prompt_file), api_key, chat)


@app.command()
def explain(
    request_id: str,
    url: Annotated[
        str | None, typer.Option(help="Of a router that runs elsewhere; BATON_ADMIN_KEY opens it.")
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
    config: Config = None,
) -> None:
    """Where a request went, what was shipped, what was cached."""
    from baton.config import load_settings
    from command_line.status import RouterAdminAddress, show_explanation

    settings = load_settings(config, cluster=name)
    door = (
        RouterAdminAddress.of(settings.cluster)
        if url is None
        else RouterAdminAddress(url, settings.admin_key)
    )
    show_explanation(door, request_id, as_json)


@app.command()
def usage(
    since: Annotated[
        str | None, typer.Option(help="A day (UTC) like 2030-12-31, today, or 7d; default: 30d.")
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Tokens and cost per tenant, over all routers."""
    from command_line.usage import run_usage

    run_usage(cluster_name(name), since, as_json)


@app.command()
def check(as_json: AsJson = False, name: Name = None) -> None:
    """Every worker's and store's own books; exit code 1 if one doesn't balance."""
    from command_line.status import show_check

    show_check(cluster_name(name), as_json)


app.command()(simulate_options.simulate)
app.command()(simulate_options.plan)
app.add_typer(bench.app, name="bench")


@app.command()
def doctor(
    sockets: Annotated[
        bool, typer.Option("--sockets", help="Every listening socket of a running cluster.")
    ] = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """What is wrong with this installation; with --sockets, who may speak to a cluster here."""
    from command_line.doctor import run_doctor, show_sockets

    if sockets:
        show_sockets(cluster_name(name), as_json)
    elif as_json:
        raise Invalid("doctor --json goes with --sockets")
    else:
        run_doctor()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--prompt-file {path}: {error}") from error


def main() -> None:
    """Errors of ours are one line on stderr."""
    try:
        app(prog_name="baton")
    except BatonError as error:
        print(f"baton: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Invalid) else 1)


if __name__ == "__main__":
    main()
