"""What members of a cluster know each other by."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
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


def as_credentials(given: ClusterCredentials | str | None) -> ClusterCredentials:
    """A secret alone is trust enough."""
    return given if isinstance(given, ClusterCredentials) else ClusterCredentials(given)
