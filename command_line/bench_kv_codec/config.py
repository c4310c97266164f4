"""The configuration of ``baton bench kv-codec``."""

from dataclasses import dataclass
from pathlib import Path

from baton.config import Settings


@dataclass(frozen=True, slots=True)
class KvCodecBenchConfig:
    """The options of a run. ``text`` is the file of the prompts' text; None: Baton's README."""

    settings: Settings
    text: Path | None
    prompt_tokens: int
    continuation_tokens: int
    prompts: int
    json_file: Path | None

    @property
    def writes_to_stdout(self) -> bool:
        return str(self.json_file) == "-"
