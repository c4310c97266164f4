"""Opens the console on which commands print tables, to a terminal or into a pipe."""

from rich.console import Console

PIPE_COLUMNS = 160


def open_console() -> Console:
    """Return a console for printing tables. A pipe has no width of its own, so there the console is
    ``PIPE_COLUMNS`` wide, and tables are not cut off."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
