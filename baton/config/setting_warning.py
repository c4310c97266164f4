"""Warnings about settings that are accepted, but that the operator should change or know of."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingWarning:
    """A warning about the settings. It is logged as ``event``."""

    event: str
    message: str


OnWarning = Callable[[SettingWarning], None]
