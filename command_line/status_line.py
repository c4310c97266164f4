"""Shows the progress of a command, on terminals and in pipes."""

from rich.console import Console


class StatusLine:
    """Shows the progress in one line that is updated in place if the output is a terminal;
    otherwise prints a line for each new text."""

    def __init__(self) -> None:
        self._console = Console()
        self._status = self._console.status("")
        self._last = ""
        if self._console.is_terminal:
            self._status.start()

    def show(self, text: str, seconds: float) -> None:
        if self._console.is_terminal:
            self._status.update(f"{text}, {seconds:.0f} s")
        elif text != self._last:
            print(f"{text}, {seconds:.0f} s", flush=True)
        self._last = text

    def close(self) -> None:
        self._status.stop()
