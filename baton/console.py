"""Tables for terminals and for pipes."""

from rich.console import Console

PIPE_COLUMNS = 160


def wide_console() -> Console:
    """A pipe has no width, and whoever reads it wants whole words."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)
