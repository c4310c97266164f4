"""How Baton starts Python processes of its own."""

import sys


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs ``module`` with this interpreter. ``-P``: otherwise ``-m``
    would put the working folder first in ``sys.path``, and its ``router.py`` or ``queue.py`` would
    be imported instead of Baton's module or the standard library's."""
    return (sys.executable, "-P", "-m", module, *arguments)
