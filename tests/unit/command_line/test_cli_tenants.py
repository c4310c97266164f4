"""Tests ``baton key``, and which days ``baton usage`` accepts."""

import json
from datetime import date

import pytest
from typer.testing import CliRunner

from baton.config import load_settings
from baton.core.api_key import hash_api_key
from baton.errors import Invalid
from command_line.main import app
from command_line.usage import parse_since
from router.tenants.tenants_file import parse_tenants_file

RUNNER = CliRunner()
TODAY = date(2030, 1, 8)


def test_new_key_is_printed_with_its_tenants_file_entry() -> None:
    output = RUNNER.invoke(app, ["key", "new", "acme"]).output
    key = output.splitlines()[0].removeprefix("the key, shown only once: ")
    tenants = parse_tenants_file(output.partition("\n\n")[2].encode())
    assert tenants.keys == parse_tenants_file(_file("acme", key)).keys
    other = json.loads(RUNNER.invoke(app, ["key", "new", "acme", "--json"]).output)
    assert other["hash"] == hash_api_key(other["key"])
    assert other["key"] != key


def _file(tenant: str, key: str) -> bytes:
    return f"tenants: {{{tenant}: {{keys: ['{hash_api_key(key)}']}}}}".encode()


def test_own_key_is_hashed_from_stdin() -> None:
    key = "a-key-of-one's-own-made-elsewhere"
    assert RUNNER.invoke(app, ["key", "hash"], input=key + "\n").output == hash_api_key(key) + "\n"


@pytest.mark.parametrize(
    ("arguments", "given", "complaint"),
    [
        (["key", "hash"], "short\n", "at least 20 characters"),
        (["key", "hash"], "", "at least 20 characters"),
        (["key", "new", "a b"], "", "it must be 1 to 64 letters"),
    ],
)
def test_invalid_keys_and_tenant_names_are_rejected(
    arguments: list[str], given: str, complaint: str
) -> None:
    result = RUNNER.invoke(app, arguments, input=given)
    assert isinstance(result.exception, Invalid)
    assert complaint in str(result.exception)


@pytest.mark.parametrize(
    ("since", "day"),
    [
        ("today", TODAY),
        ("1d", TODAY),
        ("7d", date(2030, 1, 2)),
        ("2029-12-31", date(2029, 12, 31)),
    ],
)
def test_days_are_parsed(since: str, day: date) -> None:
    assert parse_since(since, TODAY) == day


@pytest.mark.parametrize("since", ["0d", "7", "a week", "2029-13-01", ""])
def test_invalid_days_are_rejected(since: str) -> None:
    with pytest.raises(Invalid, match=r"--since is .*; it must be like"):
        parse_since(since, TODAY)


def test_tenants_file_permits_listening_beyond_loopback() -> None:
    with pytest.raises(Invalid, match=r"needs api_keys .* or a tenants_file"):
        load_settings(host="0.0.0.0")
    assert load_settings(host="0.0.0.0", tenants_file="t.yaml").tenants_file == "t.yaml"
