"""What a member has not applied of its changed config file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingSettings:
    """``restart_needed`` are the names of changed settings for which the member has to be started
    again; ``rejected`` says why it has not applied the config file, or not everywhere."""

    restart_needed: tuple[str, ...] = ()
    rejected: str = ""
