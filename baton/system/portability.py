"""Whether this process uses facilities that only Linux has, or their portable twins.

Each module of this package that wraps such a facility has both, behind the same functions. The
portable twins are used on every other system, and on Linux if the setting ``portable`` is true, so
that they can be tested there.
"""

import sys

_is_portable = False


def uses_linux() -> bool:
    """Whether this process uses what only Linux has: memory files, /proc, credentials of a socket's
    peer, signals at the death of a parent."""
    return sys.platform == "linux" and not _is_portable


def set_portable(is_portable: bool) -> None:
    """Use the portable twins from now on (``is_portable``), or what the system offers. Call this
    before anything is opened: :func:`baton.config.load_settings` does."""
    global _is_portable
    _is_portable = is_portable


def describe_facilities() -> str:
    """Return a text for users, which says which facilities are used, and why."""
    if uses_linux():
        return "Linux's own facilities"
    if sys.platform == "linux":
        return "portable facilities, because the setting portable is true"
    return f"portable facilities, because this is {sys.platform}"
