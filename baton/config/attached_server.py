"""What an entry of the setting ``attach`` says about a server's KV events."""

from urllib.parse import parse_qsl, urlsplit

from baton.errors import Invalid

PARAMETERS = ("kv_events", "kv_replay")


def event_endpoints(url: str) -> tuple[str, str] | None:
    """Return the ZMQ endpoints where a server publishes KV events and replays them, the parameters
    kv_events and kv_replay of its URL; None if it has none. Raises Invalid."""
    given = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for name, endpoint in given.items():
        if name not in PARAMETERS:
            raise Invalid(
                f"attach: {url} has the unknown parameter {name!r}; known are "
                f"{' and '.join(PARAMETERS)}"
            )
        if not endpoint.startswith(("ipc:///", "tcp://")) or "*" in endpoint:
            raise Invalid(
                f"attach: {name} is {endpoint!r}; it must be an endpoint of --kv-events-config, as "
                "ipc:///PATH or tcp://HOST:PORT"
            )
    missing = [name for name in PARAMETERS if name not in given]
    if given and missing:
        raise Invalid(f"attach: {url} also needs the parameter {missing[0]}")
    return (given["kv_events"], given["kv_replay"]) if given else None
