"""Collects a text that arrives in small pieces."""

PIECES_PER_RUN = 128
"""So many pieces are joined at a time."""


class TextBuffer:
    """A text that grows by pieces. It takes little more memory than its characters: a piece of one
    token takes more than 50 bytes, so the pieces are joined :data:`PIECES_PER_RUN` at a time."""

    __slots__ = ("_pieces", "_runs")

    def __init__(self) -> None:
        self._runs: list[str] = []
        self._pieces: list[str] = []

    def append(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if len(self._pieces) >= PIECES_PER_RUN:
            self._runs.append("".join(self._pieces))
            self._pieces.clear()

    @property
    def text(self) -> str:
        return "".join((*self._runs, *self._pieces))

    def take(self) -> str:
        """Return the text, and leave the buffer empty."""
        text = self.text
        self._runs.clear()
        self._pieces.clear()
        return text

    def __bool__(self) -> bool:
        """Return whether there is any text."""
        return bool(self._pieces or self._runs)
