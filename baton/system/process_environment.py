"""This process's environment variables: what it hands on to the processes that it starts, also to
those that libraries start."""

import getpass
import os

from baton.system.home_folder import HOME_ENVIRONMENT_VARIABLE, user_home

ENVIRONMENT_PREFIX = "BATON_"
CONFIG_ENVIRONMENT_VARIABLE = "BATON_CONFIG"
SECRETS_ENVIRONMENT_VARIABLE = "BATON_SECRETS_DIRECTORY"
NOT_SETTINGS = (
    CONFIG_ENVIRONMENT_VARIABLE,
    HOME_ENVIRONMENT_VARIABLE,
    SECRETS_ENVIRONMENT_VARIABLE,
)
"""Variables with the prefix of settings that are none: they say where settings and state are."""

_HELPER_VARIABLES = frozenset({
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"
})  # fmt: skip

_kept: dict[str, str] = {}
"""The settings that :func:`prepare_environment` has removed from the environment."""


def prepare_environment() -> None:
    """Prepare the environment for this program's libraries and child processes. Call this once,
    first.

    Settings are removed, since some are secret; :func:`settings_variables` still returns them.
    Python processes import nothing from the working folder. Libraries keep caches in ``HOME``: if
    the user has no writable home, it is set to ``BATON_HOME``. If the user has no name, ``USER`` is
    set, without which ``getpass.getuser`` fails."""
    for variable in list(settings_variables()):
        _kept[variable] = os.environ.pop(variable)
    os.environ["PYTHONSAFEPATH"] = "1"
    given, home = os.environ.get(HOME_ENVIRONMENT_VARIABLE), user_home()
    if given and (home is None or not os.access(home, os.W_OK | os.X_OK)):
        os.environ["HOME"] = os.path.abspath(given)  # noqa: PTH100
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"user-{os.getuid()}"


def settings_variables() -> dict[str, str]:
    """Return the ``BATON_…`` variables that are settings."""
    return {
        variable: value
        for variable, value in {**_kept, **os.environ}.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_SETTINGS
    }


def helper_environment() -> dict[str, str]:
    """Return the environment of a helper process: only what Python needs, since any other variable
    may be secret, such as the token of a model hub."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _HELPER_VARIABLES or name.startswith("PYTHON")
    }
