"""How Baton starts Python processes of its own.

``python -m`` puts the working folder first in ``sys.path``, so that a ``router.py`` or ``queue.py``
there would be imported instead of Baton's module or the standard library's.
"""

import os
import sys

_HELPER_VARIABLES = frozenset({
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"
})  # fmt: skip


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs ``module`` with this interpreter, and imports nothing from
    the working folder."""
    return (sys.executable, "-P", "-m", module, *arguments)


def exclude_working_folder() -> None:
    """Make the Python processes that libraries start leave the working folder out, too."""
    os.environ["PYTHONSAFEPATH"] = "1"


def helper_environment() -> dict[str, str]:
    """Return the environment variables of a helper process: only those that Python needs, since the
    others may be secret, such as settings or the token of a model hub."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _HELPER_VARIABLES or name.startswith("PYTHON")
    }
