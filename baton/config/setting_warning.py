"""Warnings about settings that are accepted, but that the operator should change or know about."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingWarning:
    """A warning about the settings. ``event`` is the name of the log event that reports it."""

    event: str
    message: str


OnWarning = Callable[[SettingWarning], None]
