"""A console for tables, on terminals and in pipes."""

from rich.console import Console

PIPE_COLUMNS = 160


def open_console() -> Console:
    """A console whose tables are not cut off in a pipe, which has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
