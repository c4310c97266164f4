"""Evaluates label and field selectors."""

import re
from collections.abc import Mapping
from typing import Any

from tests.kube.failures import bad_request
from tests.kube.kinds import Object

SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^)]*)\)")
EQUAL = re.compile(r"([^=!\s]+)\s*(==|!=|=)\s*(\S*)")


def labels_match(selector: str, labels: Mapping[str, str]) -> bool:
    """Evaluate a label selector: ``a=b``, ``a!=b``, ``a``, ``!a``, ``a in (b,c)``, ``a notin (b)``,
    joined by commas."""
    return all(
        _term(term.strip(), labels) for term in re.findall(r"(?:[^,(]|\([^)]*\))+", selector)
    )


def _term(term: str, labels: Mapping[str, str]) -> bool:
    if found := SET.fullmatch(term):
        values = [value.strip() for value in found[3].split(",")]
        return (labels.get(found[1]) in values) == (found[2] == "in")
    if found := EQUAL.fullmatch(term):
        return (labels.get(found[1]) == found[3]) == (found[2] != "!=")
    if term.startswith("!"):
        return term[1:].strip() not in labels
    return term in labels


def fields_match(selector: str, found: Object) -> bool:
    """Evaluate a field selector like ``metadata.name=x,status.phase!=Running``. Raises Refused
    (400) if the selector is malformed."""
    for term in filter(None, selector.split(",")):
        match = EQUAL.fullmatch(term.strip())
        if match is None:
            raise bad_request(f"invalid field selector: {term!r}")
        if (str(_at(found, match[1])) == match[3]) != (match[2] != "!="):
            return False
    return True


def _at(found: Any, path: str) -> Any:
    for name in path.split("."):
        found = (found or {}).get(name)
    return "" if found is None else found


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Evaluate a LabelSelector object. None selects nothing, and an empty selector selects
    everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_expression(each, labels) for each in selector.get("matchExpressions") or [])


def _expression(expression: Object, labels: Mapping[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    if operator in ("In", "NotIn"):
        found = labels.get(key) in expression["values"]
        return bool(found == (operator == "In"))
    return bool((key in labels) == (operator == "Exists"))


def selector_text(selector: Object) -> str:
    """Return a LabelSelector as text, for the scale subresource."""
    pairs = sorted((selector.get("matchLabels") or {}).items())
    terms = [f"{key}={value}" for key, value in pairs]
    for each in selector.get("matchExpressions") or []:
        values = ",".join(each.get("values") or [])
        terms.append(f"{each['key']} {each['operator'].lower()} ({values})")
    return ",".join(terms)
