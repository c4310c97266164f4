"""The commands ``baton kv …``."""

from pathlib import Path
from typing import Annotated

import typer

from baton.errors import Invalid
from command_line.common_options import AsJson, Name, cluster_name

app = typer.Typer(help="Inspect and manage the KV store.", no_args_is_help=True)

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's blocks.")]
Model = Annotated[str | None, typer.Option(help="Only this model's blocks, by name or digest.")]
ExactKv = Annotated[
    bool,
    typer.Option("--exact-kv", help="The KV of requests with exact_kv."),
]
OlderThan = Annotated[
    str | None, typer.Option(help="Only blocks older than this: 90 (seconds), 15m, 2h or 3d.")
]


@app.command("stats")
def kv_stats(as_json: AsJson = False, name: Name = None) -> None:
    """Show bytes, blocks, hits and evictions of every store node."""
    from command_line.kv import run_stats

    run_stats(cluster_name(name), as_json)


@app.command("ls")
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


@app.command("find")
def kv_find(
    wanted: Annotated[str, typer.Argument(help="A block's key in hex, or the text of a prompt.")],
    tenant: Annotated[str, typer.Option(help="The tenant whose prompt it is.")] = "default",
    exact_kv: ExactKv = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Show which store nodes have a block, or how many blocks of a prompt they have."""
    from command_line.kv import run_find

    run_find(cluster_name(name), wanted, tenant, exact_kv, as_json)


@app.command("purge")
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


@app.command("warm")
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
    exact_kv: ExactKv = False,
    name: Name = None,
) -> None:
    """Prefill prompts and store their KV before users send them."""
    from command_line.kv import read_prompts, run_warm

    prompts = read_prompts(prompt or [], prompt_file)
    run_warm(cluster_name(name), prompts, api_key, chat, {"exact_kv": True} if exact_kv else {})
