"""Environment variables: the settings of child processes, and variables that other libraries
read."""

import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from baton.config.otlp_protocol import OtlpProtocol
from baton.config.settings import Settings
from baton.config.sources import variable_name
from baton.errors import Invalid
from baton.system.cpu_cores import usable_cores
from baton.system.home_folder import HOME_ENVIRONMENT_VARIABLE
from baton.system.process_environment import CONFIG_ENVIRONMENT_VARIABLE, ENVIRONMENT_PREFIX

OTLP_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first one that is set counts."""


def config_file() -> Path | None:
    """Return the absolute path of the file that this process reads its settings from (``--config``
    or ``BATON_CONFIG``), or None if there is no such file."""
    path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    return Path(path).absolute() if path else None


def child_environment(settings: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    """Return all environment variables for a child process: first this process's own variables,
    without the ``BATON_…`` ones except ``BATON_HOME``; then ``settings`` (text by setting name) as
    ``BATON_…`` variables; then ``extra``. If a variable occurs more than once, the last one
    counts."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name == HOME_ENVIRONMENT_VARIABLE
    }
    named = {variable_name(name): value for name, value in settings.items()}
    return {**inherited, **named, **extra}


def to_environment(settings: Settings, left_out: Collection[str] = ()) -> dict[str, str]:
    """Return the text of each setting except those in ``left_out``, by its name, for
    :func:`child_environment`."""
    values = settings.model_dump(exclude_none=True)
    return {name: setting_text(value) for name, value in values.items() if name not in left_out}


def config_environment() -> dict[str, str]:
    """Return the environment variable that makes a child process read this process's config file;
    return an empty dict if this process has no config file."""
    path = config_file()
    return {} if path is None else {CONFIG_ENVIRONMENT_VARIABLE: str(path)}


def set_thread_environment(threads: int) -> None:
    """Set the number of threads of numeric libraries that this process imports later. Variables
    that are already set stay as they are."""
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)


def otlp_protocol() -> OtlpProtocol:
    """Return the protocol by which spans are sent, from OpenTelemetry's variables. Raises Invalid
    if it is not supported."""
    for variable in OTLP_PROTOCOL_VARIABLES:
        value = os.environ.get(variable)
        if value:
            try:
                return OtlpProtocol(value)
            except ValueError as error:
                supported = " or ".join(OtlpProtocol)
                raise Invalid(f"{variable} is {value!r}; it must be {supported}") from error
    return OtlpProtocol.GRPC


def set_ray_environment(is_private: bool) -> None:
    """Configure Ray; call this before Ray is imported. Usage statistics are turned off. A private
    Ray cluster (``is_private``) stays on loopback and requires a random token. Processes that Ray
    starts inherit these variables."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_private:
        # The value 0 makes Ray bind every socket to loopback, since it then supports only a single
        # node. Despite the variable's name, this also holds on Linux.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def thread_environment(threads: int) -> dict[str, str]:
    """Return the variables that tell numeric libraries to use this number of threads (0: one per
    core that this process may use), and not to spin while they wait, since workers share the
    cores."""
    return {
        "OMP_NUM_THREADS": str(threads or usable_cores()),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


def setting_text(value: Any) -> str:
    """Return a setting's value as the text of an environment variable."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return ",".join(str(part) for part in value)
    return str(value)
