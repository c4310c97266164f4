"""What ``baton bench engine`` is asked."""

from dataclasses import dataclass
from pathlib import Path

from baton.config import Settings
from baton.errors import Invalid

MOST_NUMBERS = 32
"""In one list: a table that nobody waits for is a mistake."""

MOST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """``contexts``: None for those of a table that the model has room for. ``seconds``: after which
    no figure gets another round."""

    settings: Settings
    prefill_batches: tuple[int, ...]
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...] | None
    rounds: int
    seconds: float
    seed: int
    json_file: Path | None
    plot: Path | None

    @property
    def to_stdout(self) -> bool:
        return str(self.json_file) == "-"


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """``1,8,32``. Raises Invalid that says what is no count."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise Invalid(f"{flag} takes counts with commas between, as in 1,8,32, not {text!r}")
    if len(parts) > MOST_NUMBERS:
        raise Invalid(f"{flag} has {len(parts)} counts; {MOST_NUMBERS} at most")
    return tuple(dict.fromkeys(int(part) for part in parts))
