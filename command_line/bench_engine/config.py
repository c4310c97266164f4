"""The configuration of ``baton bench engine``."""

from dataclasses import dataclass
from pathlib import Path

from baton.config import Settings
from baton.errors import Invalid

MAX_COUNTS = 32
"""The most counts in one list: a longer one is taken for a mistake, since it would run too long."""

MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """``contexts``: None for the default lengths that the model supports. ``seconds``: the time
    after which no new round of a figure starts."""

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
    def writes_to_stdout(self) -> bool:
        return str(self.json_file) == "-"


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse a list like ``1,8,32``, without duplicates. Raises Invalid."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise Invalid(f"{flag} takes counts separated by commas, as in 1,8,32, not {text!r}")
    if len(parts) > MAX_COUNTS:
        raise Invalid(f"{flag} has {len(parts)} counts; {MAX_COUNTS} at most")
    return tuple(dict.fromkeys(int(part) for part in parts))
