"""What pyproject.toml can't say of the wheel: the programs lie in ``baton/_programs``, so that none
of their names, such as ``router``, is a top-level module where Baton is installed."""

from setuptools import find_namespace_packages, setup

PROGRAMS = (
    "command_line", "conductor", "decode_worker", "kvstore", "load_generator", "orchestrator",
    "prefill_worker", "router", "simulator", "attached_worker",
)  # fmt: skip


def find(*names: str) -> list[str]:
    return find_namespace_packages(include=[each for name in names for each in (name, f"{name}.*")])


setup(
    packages=find("baton") + [f"baton._programs.{name}" for name in find(*PROGRAMS)],
    package_dir={f"baton._programs.{name}": name for name in PROGRAMS},
)
