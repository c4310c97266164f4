"""Commands that show the state of a cluster and of its requests, and check it."""

from typing import Annotated

import typer

from baton.errors import Invalid
from command_line.common_options import AsJson, Config, Name, TargetCluster, cluster_name
from command_line.option_groups import with_option_groups


@with_option_groups
def status(
    as_json: AsJson = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="First wait at most this long until every process serves; exit code 1 if one "
            "doesn't. Only for a cluster that was started by `baton up`.",
        ),
    ] = None,
    target: TargetCluster = TargetCluster(),
) -> None:
    """Show the cluster's processes and their states."""
    from command_line.status import show_status, wait_until_ready

    if target.is_kubernetes:
        from command_line import kubernetes_status

        if wait is not None:
            raise Invalid(
                "--wait is only for a cluster that was started by `baton up`; in Kubernetes run "
                "`kubectl rollout status`",
                param="wait",
            )
        kubernetes_status.status(target.kubernetes_settings, as_json)
        return
    if wait is not None:
        wait_until_ready(cluster_name(target.name), wait)
    show_status(cluster_name(target.name), as_json)


def top(name: Name = None) -> None:
    """Show processes and their load live, until Ctrl-C."""
    from command_line.status import show_top

    show_top(cluster_name(name))


def logs(process: str, name: Name = None) -> None:
    """Print the log of one process."""
    from command_line.status import show_log

    show_log(cluster_name(name), process)


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


def check(as_json: AsJson = False, name: Name = None) -> None:
    """Check the internal accounting of every worker and store node; exit code 1 if it is wrong or
    if one does not answer."""
    from command_line.check import show_check

    show_check(cluster_name(name), as_json)


def doctor(
    sockets: Annotated[
        bool, typer.Option("--sockets", help="List every listening socket of a running cluster.")
    ] = False,
    as_json: AsJson = False,
    name: Name = None,
) -> None:
    """Check this installation, and the servers in BATON_ATTACH. With --sockets, list where a
    cluster on this machine listens, and how each socket authenticates its clients."""
    from command_line.doctor import run_doctor, show_sockets

    if sockets:
        show_sockets(cluster_name(name), as_json)
    elif as_json:
        raise Invalid("doctor --json needs --sockets")
    else:
        run_doctor()
