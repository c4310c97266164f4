"""Errors of the API server, in the form of the Status objects that clients expect."""

from tests.kube.kinds import Kind, Object


class Refused(Exception):
    """A refused request: HTTP status ``code``, Kubernetes ``reason`` and optional ``details``."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def as_status(self) -> Object:
        status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        return status | ({"details": self.details} if self.details else {})


def _details(kind: Kind, name: str) -> Object:
    return {"name": name, "group": kind.group, "kind": kind.plural}


def not_found(kind: Kind, name: str) -> Refused:
    message = f'{kind.qualified} "{name}" not found'
    return Refused(404, "NotFound", message, _details(kind, name))


def already_exists(kind: Kind, name: str) -> Refused:
    message = f'{kind.qualified} "{name}" already exists'
    return Refused(409, "AlreadyExists", message, _details(kind, name))


def conflict(kind: Kind, name: str, why: str) -> Refused:
    message = f'Operation cannot be fulfilled on {kind.qualified} "{name}": {why}'
    return Refused(409, "Conflict", message, _details(kind, name))


def modified(kind: Kind, name: str) -> Refused:
    why = "the object has been modified; please apply your changes to the latest version"
    return conflict(kind, name, why + " and try again")


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def invalid(kind: Kind, name: str, why: str) -> Refused:
    return Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: {why}', _details(kind, name))


def forbidden(user: str, verb: str, resource: str, group: str, namespace: str | None) -> Refused:
    where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
    message = f'User "{user}" cannot {verb} resource "{resource}" in API group "{group}"{where}'
    return Refused(403, "Forbidden", f"{resource} is forbidden: {message}")


def expired(version: int) -> Refused:
    return Refused(410, "Expired", f"too old resource version: {version}")


def too_many(message: str, cause: str) -> Refused:
    """Return the eviction API's error for an eviction that a disruption budget forbids."""
    details = {"causes": [{"reason": "DisruptionBudget", "message": cause}]}
    return Refused(429, "TooManyRequests", message, details)
