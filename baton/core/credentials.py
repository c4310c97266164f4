"""Credentials by which members of a cluster authenticate each other."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """``secret`` is shared by the cluster; None means that members answer anyone who can reach
    them. ``certificate``, ``key`` and ``authority`` are PEM files, all three or none: with them,
    members use mutual TLS with certificates issued by the authority."""

    secret: str | None = field(default=None, repr=False)
    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def has_tls(self) -> bool:
        return bool(self.authority)


def to_credentials(value: ClusterCredentials | str | None) -> ClusterCredentials:
    """Turn a bare secret into credentials without TLS; leave credentials as they are."""
    return value if isinstance(value, ClusterCredentials) else ClusterCredentials(value)
