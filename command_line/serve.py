"""``baton serve ROLE`` runs one role in the foreground, as in a container."""

import importlib
import traceback
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import disable_created_metrics

from baton.clock import SystemClock
from baton.config import (
    LOOPBACK,
    Reader,
    Settings,
    SettingWarning,
    config_file,
    load_settings,
    set_thread_environment,
)
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, runs_engine
from baton.errors import BatonError, Invalid
from baton.network.browser_guard import BrowserGuard
from baton.obs.logs import configure_logging, set_log_level
from baton.obs.lost_writes import tolerate_lost_output
from baton.obs.metric_aliases import METRIC_ALIASES
from baton.serve.lifecycle import Program
from baton.serve.ops_server import OpsServer
from baton.serve.process import serve
from baton.serve.settings_watcher import SettingsWatcher
from baton.serve.status_pipe import STATUS, StatusReport, open_status_pipe
from baton.serve.termination_message import write_termination_message

log = structlog.get_logger(__name__)

PROGRAM_BUILDERS = {
    Role.ROUTER: "router.program:build",
    Role.CONDUCTOR: "conductor.program:build",
    Role.KVSTORE: "kvstore.program:build",
    Role.MOCK: "baton.worker.mock.program:build",
}
"""The function that builds the program of each role but those of workers, whose programs are in
:data:`~baton.core.worker_kinds.WORKER_KINDS`. Its module is imported only when the role runs, since
a worker's module may import torch."""


def run_role(role: str, status_fd: int, config: Path | None, flags: dict[str, Any]) -> None:
    """Run the program of ``role`` until it ends. Raises Invalid for an unknown role or setting, or
    the error that ended the program."""
    if role not in (known := (*PROGRAM_BUILDERS, *WORKER_KINDS)):
        raise Invalid(f"unknown role {role!r}; known roles: {', '.join(known)}")
    tolerate_lost_output()
    open_status_pipe(status_fd)
    log_level = ""
    try:
        warnings: list[SettingWarning] = []
        settings = load_settings(config, warn=warnings.append, **flags)
        log_level = settings.log_level
        configure_logging(
            settings.log_level, settings.log_format, id=settings.id or role, role=role
        )
        for warning in warnings:
            log.warning(warning.event, message=warning.message)
        # Otherwise each counter and histogram exports another time series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        set_thread_environment(settings.threads if runs_engine(role) else 1)
        # Probes and scrapes from other machines may use any name for this host, so host names are
        # checked only if the ops server listens on loopback.
        is_here = settings.ops_host in LOOPBACK
        guard = BrowserGuard(hosts=settings.accepted_hosts(settings.ops_host) if is_here else None)
        aliases = METRIC_ALIASES[settings.metric_aliases]
        ops = OpsServer(STATUS.health, settings.hang_timeout_seconds, guard, aliases)
        address = _open_ops_server(ops, settings)
        program = _build_program(Role(role), settings)
        drain_timeout = drain_timeout_of(settings, Role(role))
        serve(program, drain_timeout, ops, address, _settings_watcher(settings, Role(role)))
    except BatonError as error:
        STATUS.send(StatusReport("failed", message=str(error)))
        write_termination_message(str(error))
        if log_level == "debug":
            traceback.print_exc()
        raise
    except Exception as error:
        write_termination_message(f"a bug: {error!r}; see the log")
        raise


def _build_program(role: Role, settings: Settings) -> Program:
    """Build the program of a role. A worker's also gets its role, which may be one of several."""
    is_worker = role in WORKER_KINDS
    builder = WORKER_KINDS[role].program if is_worker else PROGRAM_BUILDERS[role]
    module, _, function = builder.partition(":")
    build = getattr(importlib.import_module(module), function)
    program: Program = build(settings, role) if is_worker else build(settings)
    return program


def _settings_watcher(settings: Settings, role: Role) -> SettingsWatcher | None:
    """Return the watcher of the config file; None if there is no config file."""
    path = config_file()
    if path is None:
        return None
    watcher = SettingsWatcher(
        path,
        settings,
        Reader.of_role(role),
        SystemClock(),
        lambda status: STATUS.send_settings(status.to_json()),
    )

    async def apply_log_level(settings: Settings) -> None:
        set_log_level(settings.log_level)

    watcher.subscribe(apply_log_level)
    return watcher


def drain_timeout_of(settings: Settings, role: Role) -> float:
    """Return the maximum duration of a drain, in seconds. For a router this includes
    ``endpoint_grace_seconds``, during which the router still serves."""
    grace = settings.endpoint_grace_seconds if role is Role.ROUTER else 0.0
    return grace + settings.drain_timeout_seconds


def _open_ops_server(ops: OpsServer, settings: Settings) -> str:
    """Open the ops server, and return its host:port; empty when the settings disable it."""
    if settings.ops_port is None:
        return ""
    return ops.open(settings.ops_host, settings.ops_port)
