"""Environment variables: Baton's home folder, the settings of child processes, and variables that
other libraries read."""

import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from baton.config.settings import Settings
from baton.config.sources import (
    CONFIG_ENVIRONMENT_VARIABLE,
    ENVIRONMENT_PREFIX,
    HOME_ENVIRONMENT_VARIABLE,
    variable_name,
)


def baton_home() -> Path:
    """Where local clusters keep their state and logs: ``BATON_HOME``, or ``~/.baton``."""
    return Path(os.environ.get(HOME_ENVIRONMENT_VARIABLE) or Path.home() / ".baton")


def config_file() -> Path | None:
    """The file that this process reads its settings from (``--config`` or ``BATON_CONFIG``), as an
    absolute path; None if there is none."""
    path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    return Path(path).absolute() if path else None


def child_environment(settings: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    """The environment for a child process: ``settings``, ``extra``, and those variables of this
    process that are not settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name == HOME_ENVIRONMENT_VARIABLE
    }
    named = {variable_name(name): value for name, value in settings.items()}
    return {**inherited, **named, **extra}


def to_environment(settings: Settings, unpinned: Collection[str] = ()) -> dict[str, str]:
    """All settings except ``unpinned`` as text, for :func:`child_environment`. If this process has
    a config file, the child reads the same file, which gives it the values of ``unpinned``."""
    values = settings.model_dump(exclude_none=True)
    return {name: setting_text(value) for name, value in values.items() if name not in unpinned}


def config_environment() -> dict[str, str]:
    """The variable by which a child process reads the config file of this process, if any."""
    path = config_file()
    return {} if path is None else {CONFIG_ENVIRONMENT_VARIABLE: str(path)}


def set_thread_environment(threads: int) -> None:
    """Set the number of threads of numeric libraries that this process imports later. Variables
    that are already set stay as they are."""
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)


def set_vllm_environment() -> None:
    """Configure vLLM; call this before vLLM is imported. Baton decides on threads, runs vLLM's
    executor itself, and needs the model runner whose sampler it replaces. Variables that are
    already set stay as they are, except the last one."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


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
    """Variables for numeric libraries. Workers share the cores, so waiting threads must not spin.
    0 threads means one per core."""
    return {
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


def setting_text(value: Any) -> str:
    """Return a setting's value as an environment variable has it."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return ",".join(str(part) for part in value)
    return str(value)
