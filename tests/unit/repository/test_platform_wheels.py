"""Tests that tools.platform_wheels follows requirements as pip would on another platform. What pip
answers is made up."""

import re
from typing import Any

import pytest

from tools import platform_wheels
from tools.platform_wheels import PLATFORMS, Platform, Resolution, project_requirements, resolve

INDEX: dict[str, list[str]] = {
    "torch": ["numpy", "nvidia; sys_platform == 'linux'", "slow; extra == 'slow'"],
    "numpy": [],
    "nvidia": ["torch"],
    "server[fast]": [
        "uvloop; extra == 'fast' and sys_platform != 'win32'",
        "slow; extra == 'slow'",
    ],
    "uvloop": ["old; python_version < '3'"],
}
"""What each package requires. All others have no wheel."""


def made_up_pip(
    requirements: list[str], platform: Platform, python: str
) -> list[dict[str, Any]] | None:
    names = [re.split("[=<>]", text)[0] for text in requirements]
    known = {name.partition("[")[0]: (name, requires) for name, requires in INDEX.items()}
    if not set(names) <= known.keys():
        return None
    return [
        {
            "metadata": {"name": name, "requires_dist": known[name][1]},
            "download_info": {"url": f"file:///{name}-{platform.machine}.whl"},
        }
        for name in names
    ]


@pytest.fixture(autouse=True)
def _pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_wheels, "_ask_pip", made_up_pip)


def on(name: str, *requirements: str) -> Resolution:
    (platform,) = (each for each in PLATFORMS if each.name == name)
    return resolve(list(requirements), platform, "3.12")


def test_markers_are_evaluated_for_the_platform() -> None:
    mac, linux = (on(name, "torch") for name in ("macos-arm64", "linux-aarch64"))
    assert mac.wheels == {"torch": "torch-arm64.whl", "numpy": "numpy-arm64.whl"}
    assert mac.excluded == {"nvidia"} and not mac.missing
    assert sorted(linux.wheels) == ["numpy", "nvidia", "torch"]
    assert linux.excluded == set() and not linux.missing


def test_extras_are_followed() -> None:
    assert sorted(on("macos-arm64", "server").wheels) == ["server"]
    result = on("macos-arm64", "server[fast]")
    assert sorted(result.wheels) == ["server", "uvloop"]
    assert result.excluded == {"old"}


def test_what_has_no_wheel_is_named() -> None:
    result = on("macos-arm64", "nixl-cu13>=1; sys_platform == 'darwin'", "torch", "other<2")
    assert result.missing == ["nixl-cu13==1.5.1", "other<2"]  # constraints.txt pins the first
    assert sorted(result.wheels) == ["numpy", "torch"]


def test_the_requirements_are_those_of_the_project() -> None:
    plain, dev = project_requirements(""), project_requirements("dev")
    assert "nixl-cu13>=1.5.1; platform_system == 'Linux'" in plain
    assert set(plain) < set(dev) and "locust>=2.47" in dev  # by baton[load]
