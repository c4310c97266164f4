"""The settings of all programs. A setting has the same name in every source.

A command-line flag overrides the environment (``BATON_<NAME>``), which overrides a YAML file
(``--config`` or ``BATON_CONFIG``), which overrides the default. A wrong value or an unknown name
fails at start-up, with a message that says what would be valid. No other module reads settings from
the environment.
"""

from baton.config.environment import (
    baton_home,
    child_environment,
    set_ray_environment,
    set_thread_environment,
    thread_environment,
    to_environment,
)
from baton.config.loading import load_settings
from baton.config.settings import LOOPBACK, Settings
from baton.config.worker_settings import DEMO_MODEL

__all__ = [
    "DEMO_MODEL",
    "LOOPBACK",
    "Settings",
    "baton_home",
    "child_environment",
    "load_settings",
    "set_ray_environment",
    "set_thread_environment",
    "thread_environment",
    "to_environment",
]
