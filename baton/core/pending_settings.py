"""The changes of a config file that a member has not applied."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingSettings:
    """``restart_needed`` are the names of changed settings for which the member has to be started
    again. ``rejected`` says why the member, or a part of it, keeps the settings from before the
    change; empty if none does."""

    restart_needed: tuple[str, ...] = ()
    rejected: str = ""
