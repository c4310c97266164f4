"""The ``baton`` command. Exit codes: 0 success, 1 failure, 2 wrong usage.

Each command imports its dependencies only when it runs: ``baton status`` must not wait for torch.
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
    help="Serve large language models on separate prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[
    str | None, typer.Option(help="Name of the cluster. Default: BATON_CLUSTER, else 'default'.")
]
Config = Annotated[Path | None, typer.Option(help="A YAML file of settings.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return without waiting for the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
OnWhere = Annotated[
    str,
    typer.Option("--on", help="cluster (started by `baton up`) or kubernetes.", metavar="WHERE"),
]
Namespace = Annotated[
    str | None, typer.Option(help="Kubernetes namespace. Default: the current one.")
]
Quantization = Annotated[
    str | None, typer.Option(help="Format of the weights: none, fp8; on a CPU also int8, int4.")
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Give bit-identical output in any batch; don't start if that is impossible.",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting, by name. Repeatable."),
]


def parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Return the ``--set NAME=VALUE`` pairs as settings. Raises Invalid."""
    parts = [pair.partition("=") for pair in pairs or []]
    for name, equals, _ in parts:
        if not equals or not name:
            raise Invalid(f"--set takes NAME=VALUE, not {name!r}")
    return {name.replace("-", "_"): value for name, _, value in parts}


def cluster_name(name: str | None) -> str:
    from baton.config import load_settings

    return load_settings(cluster=name).cluster


def merge_settings(flags: dict[str, Any], pairs: list[str] | None) -> dict[str, Any]:
    """Merge flags with ``--set`` pairs; a setting's own flag overrides its ``--set``."""
    given = {name: value for name, value in flags.items() if value is not None}
    return {**parse_settings(pairs), **given}


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Model directory, or Hugging Face hub id.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None,
    on: Annotated[str | None, typer.Option(help="Where workers run: local or ray.")] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join: auto or HOST:PORT. Default: start a private one."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address that the router listens on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that the router listens on.")] = None,
    redis: Annotated[
        str | None, typer.Option(help="Redis URL. Default: start an embedded Redis.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    quantization: Quantization = None,
    deterministic: Deterministic = False,
    transports: Annotated[
        str | None,
        typer.Option(help="KV transports to use, best first; a selection of shm,nixl,grpc."),
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
    """Show the cluster's processes and their states."""
    from command_line.status import show_status

    if on_kubernetes(on):
        from command_line import kubernetes

        kubernetes.status(kubernetes_settings(name, namespace, config), as_json)
    else:
        show_status(cluster_name(name), as_json)


@app.command()
def top(name: Name = None) -> None:
    """Show processes and their load live, until Ctrl-C."""
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
    """Resize pools, e.g. prefill=2 decode=3. In Kubernetes, pools may have other names."""
    from command_line import scale

    if on_kubernetes(on):
        from command_line import kubernetes

        kubernetes.scale(kubernetes_settings(name, namespace, config), pools)
    else:
        scale.run_scale(cluster_name(name), pools, not no_wait)


@app.command()
def drain(
    worker: Annotated[
        str | None, typer.Argument(help="The worker's id, or the name of its pod.")
    ] = None,
    own: Annotated[
        bool,
        typer.Option("--self", help="Drain the program in this container, through its ops_port."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds that --self waits. Default: endpoint_grace_seconds + "
            "drain_timeout_seconds.",
        ),
    ] = None,
    on: OnWhere = "cluster",
    namespace: Namespace = None,
    no_wait: NoWait = False,
    name: Name = None,
    config: Config = None,
) -> None:
    """Let one worker finish its requests, then remove it. With --self (a container's preStop hook),
    make this container's program stop accepting work, and return when it has none left."""
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
        raise Invalid(f"--on {where}: it must be cluster (started by `baton up`) or kubernetes")
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
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt. Repeatable: all prompts form one batch.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file whose whole text is one prompt.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory, or Hugging Face hub id.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens to generate per prompt.")
    ] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-9, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=1e-9)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1)] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    json_schema: Annotated[
        str | None, typer.Option(help="JSON schema that the answer must follow: a file, or JSON.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole answer must match.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    quantization: Quantization = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
    config: Config = None,
    set_: Setting = None,
) -> None:
    """Generate with the engine alone, in this process: a cluster must give the same output."""
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
kv = typer.Typer(help="Inspect and manage the KV store.", no_args_is_help=True)
app.add_typer(kv, name="kv")

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's blocks.")]
Model = Annotated[str | None, typer.Option(help="Only this model's blocks, by name or digest.")]
OlderThan = Annotated[
    str | None, typer.Option(help="Only blocks older than this: 90 (seconds), 15m, 2h or 3d.")
]


@kv.command("stats")
def kv_stats(as_json: AsJson = False, name: Name = None) -> None:
    """Show bytes, blocks, hits and evictions of every store node."""
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
    """List stored blocks, oldest first."""
    from command_line.kv import block_filter, run_list

    cluster = cluster_name(name)
    run_list(cluster, block_filter(cluster, tenant, model, older_than), limit, as_json)


@kv.command("find")
def kv_find(
    wanted: Annotated[str, typer.Argument(help="A block's key in hex, or the text of a prompt.")],
    tenant: Annotated[str, typer.Option(help="The tenant whose prompt it is.")] = "default",
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Show which store nodes have a block, or how many blocks of a prompt they have."""
    from command_line.kv import run_find

    run_find(cluster_name(name), wanted, tenant, as_json)


@kv.command("purge")
def kv_purge(
    tenant: Tenant = None,
    model: Model = None,
    older_than: OlderThan = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks.")] = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Delete blocks from every tier of every store node."""
    from command_line.kv import block_filter, run_purge

    if not (tenant or model or older_than or everything):
        raise Invalid("purge needs --tenant, --model, --older-than, or --all")
    cluster = cluster_name(name)
    run_purge(cluster, block_filter(cluster, tenant, model, older_than), as_json)


@kv.command("warm")
def kv_warm(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt. Repeatable.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a chat's user message.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the tenant whose cache is warmed.")
    ] = None,
    name: Name = None,
) -> None:
    """Prefill prompts and store their KV before users send them."""
    from command_line.kv import read_prompts, run_warm

    run_warm(cluster_name(name), read_prompts(prompt or [], prompt_file), api_key, chat)


@app.command()
def explain(
    request_id: str,
    url: Annotated[
        str | None,
        typer.Option(help="URL of a router elsewhere; BATON_ADMIN_KEY is its admin key."),
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
    config: Config = None,
) -> None:
    """Show which workers served a request, what KV was transferred and what was cached."""
    from baton.config import load_settings
    from command_line.status import RouterAdminAddress, show_explanation

    settings = load_settings(config, cluster=name)
    address = (
        RouterAdminAddress.of_cluster(settings.cluster)
        if url is None
        else RouterAdminAddress(url, settings.admin_key)
    )
    show_explanation(address, request_id, as_json)


@app.command()
def usage(
    since: Annotated[
        str | None, typer.Option(help="First day (UTC): 2030-12-31, today, or 7d. Default: 30d.")
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Show tokens and cost per tenant, summed over all routers."""
    from command_line.usage import run_usage

    run_usage(cluster_name(name), since, as_json)


@app.command()
def check(as_json: AsJson = False, name: Name = None) -> None:
    """Check the internal accounting of every worker and store node; exit code 1 if it is wrong."""
    from command_line.status import show_check

    show_check(cluster_name(name), as_json)


app.command()(simulate_options.simulate)
app.command()(simulate_options.plan)
app.add_typer(bench.app, name="bench")


@app.command()
def doctor(
    sockets: Annotated[
        bool, typer.Option("--sockets", help="List every listening socket of a running cluster.")
    ] = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Check this installation. With --sockets, list where a cluster on this machine listens, and
    how each socket authenticates its clients."""
    from command_line.doctor import run_doctor, show_sockets

    if sockets:
        show_sockets(cluster_name(name), as_json)
    elif as_json:
        raise Invalid("doctor --json needs --sockets")
    else:
        run_doctor()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--prompt-file {path}: {error}") from error


def main() -> None:
    """Run the command line; print one of Baton's own errors as one line on stderr."""
    try:
        app(prog_name="baton")
    except BatonError as error:
        print(f"baton: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Invalid) else 1)


if __name__ == "__main__":
    main()
