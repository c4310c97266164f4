"""Settings that have a new name. The old name is accepted for one version, with a warning."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from baton.config.setting_warning import SettingWarning
from baton.errors import Invalid

RENAMED_SETTINGS: Mapping[str, str] = MappingProxyType({
    "first_token_seconds": "first_token_timeout_seconds",
    "next_token_seconds": "next_token_timeout_seconds",
    "place_seconds": "placement_timeout_seconds",
    "store_seconds": "store_timeout_seconds",
    "header_seconds": "header_timeout_seconds",
    "body_seconds": "body_timeout_seconds",
    "keep_alive_seconds": "keep_alive_timeout_seconds",
    "write_seconds": "write_timeout_seconds",
    "request_seconds": "request_timeout_seconds",
    "drain_seconds": "drain_timeout_seconds",
    "hung_seconds": "hang_timeout_seconds",
    "heartbeat_seconds": "heartbeat_interval_seconds",
    "autoscale_seconds": "autoscale_interval_seconds",
    "autoscale_pending_seconds": "autoscale_pending_timeout_seconds",
    "slo_first_token_seconds": "slo_ttft_seconds",
    "slo_token_gap_seconds": "slo_itl_seconds",
    "line_port": "framed_port",
    "max_running": "max_sequences",
    "max_step_tokens": "max_batched_tokens",
    "overlap": "async_scheduling",
    "read_alone": "local_prefill",
    "batch_lines": "batch_concurrency",
})  # fmt: skip
"""Old name → new name."""

T = TypeVar("T")


def use_new_names(values: Mapping[str, T], where: str, spell: Callable[[str], str]) -> dict[str, T]:
    """Return ``values``, the settings of one source, under their new names. Raises Invalid if the
    source has a setting under both its names. The error names the source as ``where``, and each
    setting by the name that ``spell`` returns: the form that the setting's name has in that
    source."""
    for old, new in RENAMED_SETTINGS.items():
        if old in values and new in values:
            raise Invalid(
                f"{where}: {spell(old)} is the old name of {spell(new)}, and both are given; "
                f"remove {spell(old)}"
            )
    return {RENAMED_SETTINGS.get(name, name): value for name, value in values.items()}


def rename_warnings(names: Iterable[str]) -> list[SettingWarning]:
    """Return one warning for each old name that occurs in ``names``, in the order of
    ``RENAMED_SETTINGS``."""
    given = frozenset(names)
    return [
        SettingWarning(
            "setting_renamed",
            f"setting {old} is now called {new}; {old} will be removed in the next version",
        )
        for old, new in RENAMED_SETTINGS.items()
        if old in given
    ]
