"""Changed settings in the config file that a member has not applied."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingSettings:
    """The settings that a member has not applied since the config file changed. ``restart_needed``
    are the names of changed settings that take effect only when the member is started again.
    ``rejected`` says why the member, or a part of it, has rejected the change and keeps the earlier
    settings; it is empty if nothing was rejected."""

    restart_needed: tuple[str, ...] = ()
    rejected: str = ""
