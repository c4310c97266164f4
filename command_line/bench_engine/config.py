"""The configuration of ``baton bench engine``."""

from dataclasses import dataclass
from pathlib import Path

from baton.config import Settings
from baton.errors import Invalid

MAX_COUNTS = 32
"""The maximum number of values in one list: a longer list is treated as a mistake, since it would
take too long to run."""

MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """The options of a run. If ``contexts`` is None, the default context lengths that the model
    supports are used. ``seconds`` is the time after which no new round of a case starts."""

    settings: Settings
    prefill_batches: tuple[int, ...]
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...] | None
    rounds: int
    seconds: float
    seed: int
    json_file: Path | None
    plot: Path | None
    profile: Path | None = None

    @property
    def writes_to_stdout(self) -> bool:
        return str(self.json_file) == "-"


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse a list like ``1,8,32``, without duplicates. Raises Invalid if the list is malformed or
    too long."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise Invalid(
                f"{flag} is {text!r}; it must be positive whole numbers separated by commas, like "
                "1,8,32"
            )
    if len(parts) > MAX_COUNTS:
        raise Invalid(f"{flag} has {len(parts)} values; it may have at most {MAX_COUNTS}")
    return tuple(dict.fromkeys(int(part) for part in parts))
