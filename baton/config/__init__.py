"""The settings of all programs. A setting has the same name in every source.

The sources, in order of precedence, the highest first:

1. command-line flags
2. environment variables, ``BATON_<NAME>``
3. files in the folder ``BATON_SECRETS_DIRECTORY``, each named after its setting
4. a YAML file, ``--config`` or ``BATON_CONFIG``
5. the defaults

If a source has an unknown name or a wrong value, the program does not start, and says what would be
valid. Unknown names are ignored only in a YAML file that was written for a newer version
(:mod:`baton.config.config_version`). Live settings can change while a program runs
(:mod:`baton.config.setting_scopes`). No other module reads settings from the environment.
"""

from baton.checkpoints.checkpoint import DEMO_MODEL
from baton.config.environment import (
    child_environment,
    config_environment,
    config_file,
    set_ray_environment,
    set_thread_environment,
    setting_text,
    thread_environment,
    to_environment,
)
from baton.config.loading import load_settings, pinned_settings, reload_settings
from baton.config.setting_scopes import (
    Reader,
    foreign_secrets,
    live_settings,
    restarting_settings,
)
from baton.config.setting_warning import SettingWarning
from baton.config.settings import LOOPBACK, Settings
from baton.config.sources import read_config_bytes
from baton.system.home_folder import baton_home

__all__ = [
    "DEMO_MODEL",
    "LOOPBACK",
    "Reader",
    "SettingWarning",
    "Settings",
    "baton_home",
    "child_environment",
    "config_environment",
    "config_file",
    "foreign_secrets",
    "live_settings",
    "load_settings",
    "pinned_settings",
    "read_config_bytes",
    "reload_settings",
    "restarting_settings",
    "set_ray_environment",
    "set_thread_environment",
    "setting_text",
    "thread_environment",
    "to_environment",
]
