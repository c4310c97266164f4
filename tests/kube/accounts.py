"""Authenticates users, authorizes their calls by RBAC, and records the API calls of service
accounts."""

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
"""The administrator's user name and token."""


@dataclass(frozen=True, slots=True)
class Call:
    """An API call, described as in RBAC rules. ``resource`` includes the subresource, as in
    ``deployments/scale``."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str


def user_of(namespace: str, account: str) -> str:
    return f"system:serviceaccount:{namespace}:{account}"


class Accounts:
    """The service accounts and their rights. An account's token is derived from its name, so it is
    not a secret."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[Call] = []
        """All calls in order, including refused ones, except the administrator's."""
        self.refused: list[Call] = []

    def token(self, namespace: str, account: str) -> str:
        return f"{namespace}.{account}.token"

    def user(self, authorization: str) -> str:
        """Return the user that an Authorization header names. Raises Refused (401) if the header
        contains neither the administrator's token nor a token like those that :meth:`token`
        returns."""
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
        """Record a call, unless the administrator made it. Raises Refused (403) if no role that is
        bound to the user allows the call."""
        if call.user == ADMIN:
            return
        self.calls.append(call)
        if not any(allows(rule, call) for rule in self._rules(call.user, call.namespace)):
            self.refused.append(call)
            raise forbidden(call.user, call.verb, call.resource, call.group, call.namespace)

    def check_granted_rules(self, user: str, namespace: str, role: Object) -> None:
        """Check that ``user``, who writes the Role or RoleBinding ``role``, has all permissions
        that the role or binding grants. Raises Refused (403)."""
        if user == ADMIN:
            return
        reference = role.get("roleRef")
        rules = self._rules_of(reference, namespace) if reference else role.get("rules") or []
        own = list(self._rules(user, namespace))
        for call in (call for rule in rules for call in calls_of(rule, user, namespace)):
            if not any(allows(each, call) for each in own):
                raise Refused(
                    403, "Forbidden",
                    f"user {user!r} is attempting to grant RBAC permissions not currently held: "
                    f"{call.verb} {call.resource} {call.name}".strip(),
                )  # fmt: skip

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


def calls_of(rule: Object, user: str, namespace: str) -> list[Call]:
    """Return one call by ``user`` for each permission that a rule grants."""
    return [
        Call(user, verb, group, resource, namespace, name)
        for verb in rule["verbs"]
        for group in rule.get("apiGroups") or []
        for resource in rule.get("resources") or []
        for name in rule.get("resourceNames") or [""]
    ]


def unused_permissions(rules: list[Object], calls: list[Call]) -> list[str]:
    """Return the permissions in ``rules`` that no call used, as ``verb resource name``."""
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
