"""Loads the settings, checks the names and values from all sources, and explains errors."""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pydantic import ValidationError

from baton.config.environment import otlp_protocol
from baton.config.setting_warning import OnWarning, SettingWarning
from baton.config.settings import SECRET_SETTINGS, Settings
from baton.config.sources import (
    SecretFiles,
    check_environment,
    check_name,
    environment_values,
    read_files,
    use_files,
)
from baton.config.validation import check_combinations, check_exposure, check_private_network
from baton.errors import Invalid
from baton.system.portability import set_portable
from baton.system.process_environment import CONFIG_ENVIRONMENT_VARIABLE


def print_warning(warning: SettingWarning) -> None:
    print(f"baton: warning: {warning.message}", file=sys.stderr)


def load_settings(
    config: Path | None = None, warn: OnWarning = print_warning, **flags: Any
) -> Settings:
    """Load the settings from all sources. A flag that is None counts as not given. ``warn`` is
    called if the config file is marked as written for a newer version of Baton; settings in it that
    this version does not know are ignored. The setting ``portable`` takes effect at once, for this
    process. Raises Invalid for a wrong value, and for an unknown name anywhere else."""
    if config is not None:
        os.environ[CONFIG_ENVIRONMENT_VARIABLE] = str(config)
    settings = _load(flags, warn)
    set_portable(settings.portable)
    return settings


def reload_settings(settings: Settings, content: bytes, warn: OnWarning) -> Settings:
    """Load the settings again, with the flags of ``settings``, and with ``content`` as the content
    of the config file. ``warn`` is called as by :func:`load_settings`. Raises Invalid."""
    return _load(settings.flags, warn, content)


def pinned_settings(settings: Settings) -> frozenset[str]:
    """Return the names of the settings that are given by flags, the environment or secret files.
    These take precedence, so changing the config file has no effect on them. If ``redis_password``
    is one of them, so is ``redis_url``, which contains the password."""
    pinned = {*settings.flags, *environment_values(), *settings.secret_files}
    return frozenset(pinned | ({"redis_url"} if "redis_password" in pinned else set()))


def _load(flags: Mapping[str, Any], warn: OnWarning, content: bytes | None = None) -> Settings:
    """Load the settings as :func:`load_settings` does; ``content``, if not None, is the content of
    the config file."""
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        check_name(name, Settings.model_fields, "command line")
    check_environment(Settings.model_fields)
    files = read_files(Settings.model_fields, warn, content)
    with use_files(files):
        settings = _with_redis_password(_build(given))
        secret_files = frozenset(SecretFiles(Settings)())
    check_exposure(settings)
    check_private_network(settings)
    check_combinations(settings)
    if settings.trace_endpoint is not None:
        otlp_protocol()
    settings._flags = given
    settings._secret_files = secret_files
    return settings


def _build(given: Mapping[str, Any]) -> Settings:
    """Build the settings from the flags ``given`` and the other sources. Call this within
    :func:`use_files`. Raises Invalid, with an explanation of each wrong setting."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise Invalid(_explain(error, SECRET_SETTINGS | SecretFiles(Settings)().keys())) from error


def _with_redis_password(settings: Settings) -> Settings:
    """Move ``redis_password`` into ``redis_url``, with its special characters escaped. Raises
    Invalid if there is no URL, or if the URL already has a different password. The URL may already
    have the same password: a child process gets the URL from its parent, and ``redis_password``
    from the config file."""
    if settings.redis_password is None:
        return settings
    if not settings.redis_url:
        raise Invalid("redis_password is set, but redis_url is not; set both")
    try:
        parts = urlsplit(settings.redis_url)
    except ValueError:  # a malformed IPv6 address
        raise Invalid("redis_url is wrong: it should be redis://HOST:PORT/0") from None
    if parts.password is not None:
        if unquote(parts.password) != settings.redis_password:
            raise Invalid(
                "redis_password differs from the password in redis_url; set the password in only "
                "one of them"
            )
        return settings.model_copy(update={"redis_password": None})
    host = parts.netloc.rpartition("@")[2]
    login = f"{parts.username or ''}:{quote(settings.redis_password, safe='')}"
    url = parts._replace(netloc=f"{login}@{host}").geturl()
    return settings.model_copy(update={"redis_url": url, "redis_password": None})


def _explain(error: ValidationError, secrets: Collection[str]) -> str:
    """Describe each wrong setting: its name, its value unless it is one of ``secrets``, and what
    would be valid."""
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]] or ["settings"]
        is_secret = parts[0] in secrets
        name = parts[0] if is_secret else ".".join(parts)
        shown = "wrong" if is_secret else repr(problem.get("input"))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} is {shown}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
