"""What members of a cluster know each other by."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Trust:
    """``secret`` is the cluster's; None: whoever reaches a member may ask it. ``certificate``,
    ``key`` and ``authority`` are PEM files, all three or none: with them, members speak TLS, and
    both sides show a certificate of the authority."""

    secret: str | None = field(default=None, repr=False)
    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def has_tls(self) -> bool:
        return bool(self.authority)


def trust_of(given: Trust | str | None) -> Trust:
    """A secret alone is trust enough."""
    return given if isinstance(given, Trust) else Trust(given)
