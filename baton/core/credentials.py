"""Credentials by which members of a cluster authenticate each other."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """The credentials of a cluster. ``secret`` is shared by all members; None means that members
    answer anyone who can reach them. ``certificate``, ``key`` and ``authority`` are the paths of
    PEM files; set all three or none. If they are set, members use mutual TLS with certificates
    issued by the authority."""

    secret: str | None = field(default=None, repr=False)
    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def has_tls(self) -> bool:
        return bool(self.authority)


def to_credentials(value: ClusterCredentials | str | None) -> ClusterCredentials:
    """Return ``value`` as credentials. A string is a cluster's secret and becomes credentials
    without TLS; None becomes empty credentials."""
    return value if isinstance(value, ClusterCredentials) else ClusterCredentials(value)
