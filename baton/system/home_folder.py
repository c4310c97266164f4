"""The folders in which a user's programs keep state: Baton's own, and the home folder."""

import os
from pathlib import Path

from baton.errors import Invalid

HOME_ENVIRONMENT_VARIABLE = "BATON_HOME"
NO_HOME = (
    "this user has no home folder: set BATON_HOME to a folder in which this user may create files"
)


def baton_home() -> Path:
    """Return the folder of local clusters' state and logs: ``BATON_HOME``, or ``~/.baton``. Raises
    Invalid if there is neither."""
    if given := os.environ.get(HOME_ENVIRONMENT_VARIABLE):
        return Path(given)
    return require_home() / ".baton"


def user_home() -> Path | None:
    """Return the user's home folder; None if the system knows none. Container runtimes name the
    root folder as the home of a user that the image doesn't know, so it counts only if it is
    writable."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home if home != Path("/") or os.access(home, os.W_OK) else None


def require_home() -> Path:
    """Return the user's home folder. Raises Invalid if there is none."""
    home = user_home()
    if home is None:
        raise Invalid(NO_HOME)
    return home
