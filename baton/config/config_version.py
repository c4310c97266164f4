"""The version of Baton for which a config file was written, as stated in the file itself.

During an upgrade, pods that still run the previous version already see the new chart's ConfigMap.
If such a pod restarts, it must not fail because of a setting that only the new version has. So a
program ignores unknown settings in a file that was written for a newer version. In any other file,
an unknown setting is an error.
"""

import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

from baton.config.setting_warning import OnWarning, SettingWarning
from baton.errors import Invalid

WRITTEN_FOR = "written_for"
"""The key of the version in a config file. It is not a setting."""

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def program_version() -> str:
    return version("baton")


def without_newer_settings(
    values: Mapping[Any, Any], known: Collection[str], where: str, warn: OnWarning
) -> dict[Any, Any]:
    """Return ``values`` without the entry :data:`WRITTEN_FOR`. If the entry names a newer version
    than this program's, also leave out the settings that this version does not know, with a
    warning. Raises Invalid if the entry is malformed."""
    kept = {name: value for name, value in values.items() if name != WRITTEN_FOR}
    if WRITTEN_FOR not in values:
        return kept
    own, written_for = program_version(), str(values[WRITTEN_FOR])
    if _numbers(written_for, where) <= _numbers(own, "this program"):
        return kept
    unknown = sorted(str(name) for name in kept if str(name) not in known)
    if unknown:
        message = f"{where} was written for Baton {written_for}, and {own} does not have "
        warn(SettingWarning("newer_settings_ignored", message + ", ".join(unknown)))
    return {name: value for name, value in kept.items() if str(name) in known}


def _numbers(text: str, where: str) -> tuple[int, ...]:
    """Return the numbers of the version in ``text``. A suffix like -rc.1 or rc1 does not count,
    since pre-releases have the settings of their release. Raises Invalid if ``text`` is not a
    version."""
    found = VERSION.match(text)
    if found is None:
        raise Invalid(f"{where}: {WRITTEN_FOR} is {text!r}; it must be a version like 1.2.3")
    return tuple(map(int, found.groups()))
