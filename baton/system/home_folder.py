"""The folders in which a user's programs keep state: Baton's own, and the home folder."""

import getpass
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


def complete_user_environment() -> None:
    """Set what libraries want to know of the user, if the system doesn't know it: ``HOME``, in
    which they keep caches, to ``BATON_HOME``, unless the user has a writable home; and a user name
    (``USER``), without which ``getpass.getuser`` fails."""
    given, home = os.environ.get(HOME_ENVIRONMENT_VARIABLE), user_home()
    if given and (home is None or not os.access(home, os.W_OK | os.X_OK)):
        os.environ["HOME"] = str(Path(given).absolute())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"user-{os.getuid()}"
