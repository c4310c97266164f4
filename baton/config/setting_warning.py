"""What is accepted in the settings, but should be changed or known."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingWarning:
    """``event`` is the name of its log event."""

    event: str
    message: str


OnWarning = Callable[[SettingWarning], None]
