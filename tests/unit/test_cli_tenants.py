"""``baton key``, and what ``baton usage`` takes for a day."""

import json
from datetime import date

import pytest
from typer.testing import CliRunner

from baton.config import load_settings
from baton.core.api_key import hash_api_key
from baton.errors import Invalid
from command_line.main import app
from command_line.usage import first_day
from router.tenants.tenants_file import parse_tenants_file

RUNNER = CliRunner()
TODAY = date(2030, 1, 8)


def test_a_fresh_key_and_the_lines_for_the_file() -> None:
    told = RUNNER.invoke(app, ["key", "new", "acme"]).output
    key = told.splitlines()[0].removeprefix("the key, shown this once: ")
    roll = parse_tenants_file(told.partition("\n\n")[2].encode())
    assert roll.keys == parse_tenants_file(_file("acme", key)).keys
    other = json.loads(RUNNER.invoke(app, ["key", "new", "acme", "--json"]).output)
    assert other["hash"] == hash_api_key(other["key"])
    assert other["key"] != key


def _file(tenant: str, key: str) -> bytes:
    return f"tenants: {{{tenant}: {{keys: ['{hash_api_key(key)}']}}}}".encode()


def test_a_key_of_ones_own_comes_by_stdin() -> None:
    key = "a-key-of-one's-own-made-elsewhere"
    assert RUNNER.invoke(app, ["key", "hash"], input=key + "\n").output == hash_api_key(key) + "\n"


@pytest.mark.parametrize(
    ("arguments", "given", "complaint"),
    [
        (["key", "hash"], "short\n", "at least 20 characters"),
        (["key", "hash"], "", "at least 20 characters"),
        (["key", "new", "a b"], "", "a tenant's name has up to 64"),
    ],
)
def test_what_can_not_be_a_key(arguments: list[str], given: str, complaint: str) -> None:
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
def test_days(since: str, day: date) -> None:
    assert first_day(since, TODAY) == day


@pytest.mark.parametrize("since", ["0d", "7", "a week", "2029-13-01", ""])
def test_what_is_no_day(since: str) -> None:
    with pytest.raises(Invalid, match="--since is a day like"):
        first_day(since, TODAY)


def test_a_tenants_file_is_a_lock_for_an_open_port() -> None:
    with pytest.raises(Invalid, match=r"needs api_keys .* or a tenants_file"):
        load_settings(host="0.0.0.0")
    assert load_settings(host="0.0.0.0", tenants_file="t.yaml").tenants_file == "t.yaml"
