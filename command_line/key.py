"""``baton key``: API keys for the tenants file."""

import json
import re
import secrets
import sys
from typing import Annotated

import typer

from baton.core.api_key import API_KEY_BYTES, MIN_KEY_CHARACTERS, hash_api_key, new_api_key
from baton.errors import Invalid

app = typer.Typer(help="API keys of tenants: make one, or hash one.", no_args_is_help=True)


@app.command("new")
def new(
    tenant: str,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Print a new key, which is not stored, and its entry for the tenants file."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", tenant):
        raise Invalid(
            f"the tenant is {tenant!r}; it must be 1 to 64 letters, digits or ._@-, and begin with "
            "a letter or digit"
        )
    key = new_api_key(secrets.token_bytes(API_KEY_BYTES))
    if as_json:
        print(json.dumps({"tenant": tenant, "key": key, "hash": hash_api_key(key)}))
        return
    print(f"the key, shown only once: {key}")
    print(f"for the tenants file:\n\ntenants:\n  {tenant}:\n    keys:\n      - {hash_api_key(key)}")


@app.command("hash")
def hash_() -> None:
    """Read a key from stdin, and print its hash for the tenants file."""
    key = sys.stdin.readline().strip()
    if len(key) < MIN_KEY_CHARACTERS:
        raise Invalid(
            f"the key is too short; it must have at least {MIN_KEY_CHARACTERS} characters, which "
            "should be random, or it can be guessed from its hash. `baton key new TENANT` makes one"
        )
    print(hash_api_key(key))
