"""Who calls, what its Roles allow, and what was called."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kube.failures import Refused, forbidden
from tests.kube.kinds import (
    CLUSTER_ROLE,
    CLUSTER_ROLE_BINDING,
    ROLE,
    ROLE_BINDING,
    Kind,
    Object,
)
from tests.kube.store import Store

ADMIN = "admin"
"""A user, and the token by which it is known."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a Role speaks of. ``resource`` with its subresource: ``deployments/scale``."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str


def user_of(namespace: str, account: str) -> str:
    return f"system:serviceaccount:{namespace}:{account}"


class Accounts:
    """Tokens are the users' names in disguise: nothing here is secret."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[Call] = []
        """Of everybody but the administrator, in their order, those that were refused, too."""
        self.refused: list[Call] = []

    def token(self, namespace: str, account: str) -> str:
        return f"{namespace}.{account}.token"

    def user(self, authorization: str) -> str:
        """Raises Refused (401)."""
        kind, _, token = authorization.partition(" ")
        kind = kind.lower()
        if kind == "bearer" and token == ADMIN:
            return ADMIN
        namespace, _, rest = token.partition(".")
        account, _, last = rest.rpartition(".")
        if kind != "bearer" or last != "token" or not account:
            raise Refused(401, "Unauthorized", "Unauthorized")
        return user_of(namespace, account)

    def check(self, call: Call) -> None:
        """Notes it; raises Refused (403) for what no Role allows."""
        if call.user == ADMIN:
            return
        self.calls.append(call)
        if not any(allows(rule, call) for rule in self._rules(call.user, call.namespace)):
            self.refused.append(call)
            raise forbidden(call.user, call.verb, call.resource, call.group, call.namespace)

    def _rules(self, user: str, namespace: str) -> Iterator[Object]:
        if namespace:
            for binding in self._store.all(ROLE_BINDING, namespace):
                if binds(binding, user):
                    yield from self._rules_of(binding["roleRef"], namespace)
        for binding in self._store.all(CLUSTER_ROLE_BINDING):
            if binds(binding, user):
                yield from self._rules_of(binding["roleRef"], "")

    def _rules_of(self, reference: Object, namespace: str) -> list[Object]:
        kind: Kind = ROLE if reference["kind"] == "Role" else CLUSTER_ROLE
        role = self._store.find(kind, namespace if kind == ROLE else "", reference["name"])
        return (role or {}).get("rules") or []


def binds(binding: Object, user: str) -> bool:
    home = binding["metadata"].get("namespace", "")
    return any(
        each["kind"] == "ServiceAccount"
        and user_of(each.get("namespace") or home, each["name"]) == user
        for each in binding.get("subjects") or []
    )


def allows(rule: Object, call: Call) -> bool:
    names = rule.get("resourceNames") or []
    return (
        _has(rule["verbs"], call.verb)
        and _has(rule.get("apiGroups") or [], call.group)
        and _has(rule.get("resources") or [], call.resource)
        and (not names or call.name in names)
    )


def _has(allowed: list[str], wanted: str) -> bool:
    return wanted in allowed or "*" in allowed


def unused(rules: list[Object], calls: list[Call]) -> list[str]:
    """What ``rules`` allow and nobody did, as ``verb resource name``."""
    granted = [
        ({**rule, "verbs": [verb], "resources": [resource], "resourceNames": [name]}, text)
        for rule in rules
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        for text in [f"{verb} {resource} {name}".strip()]
    ]
    return [
        text
        for rule, text in granted
        if not any(
            allows({**rule, "resourceNames": [n for n in rule["resourceNames"] if n]}, call)
            for call in calls
        )
    ]
