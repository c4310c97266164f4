"""Tests that a new version of Baton changes only the last, small layers of an image. The sizes of
layers that were built are in ``docs/results/kubernetes.md``."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.wheel import DOCKERFILE, ROOT, copied

IGNORED = (ROOT / "deploy/docker/Dockerfile.dockerignore").read_text().splitlines()
LOCKS = "deploy/docker/locks"
BATON = ["COPY --from=baton /layers/model /", "COPY --from=kernels /built /",
         "COPY --from=baton /layers/baton /"]  # fmt: skip
"""The layers with what is Baton's own: what changes most often comes last."""

FIXED_TIMES = "touch --no-dereference --date=@0 {} +"


@dataclass(frozen=True)
class Stage:
    """A stage of the Dockerfile: the stage or image that it extends, and its instructions."""

    base: str
    instructions: list[str]


def parse_stages() -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    text = re.sub(r"<<'SCRIPT'(.*)\n([\s\S]*?)\nSCRIPT$", _join, text, flags=re.MULTILINE)
    instructions: list[str] = []
    for line in text.replace("\\\n", "").splitlines():
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            instructions = []
            stages[found[2]] = Stage(found[1], instructions)
        elif line:
            instructions.append(line)
    return stages


def _join(heredoc: re.Match[str]) -> str:
    """Return a heredoc, with what follows its mark, as one line."""
    return f"{heredoc[1]} {heredoc[2]}".replace("\n", "; ")


STAGES = parse_stages()


def history(target: str) -> list[str]:
    """Return all instructions of a target, those of the stages that it extends first."""
    stage = STAGES.get(target)
    return [*history(stage.base), *stage.instructions] if stage else []


def depends_on_baton(name: str) -> bool:
    """Whether a stage reads files of this repository other than the locks of dependencies."""
    for line in history(name):
        found = re.match(r"COPY (?:--from=(\S+) )?(\S+)", line)
        if found and (depends_on_baton(found[1]) if found[1] else LOCKS not in found[2]):
            return True
    return False


@pytest.mark.parametrize(
    ("target", "dependencies", "own"),
    [
        ("cpu", "dependencies", BATON),
        ("cuda", "dependencies", BATON),
        ("sidecar", "sidecar-dependencies", [BATON[0], BATON[2]]),
    ],
)
def test_layers_with_baton_come_last(target: str, dependencies: str, own: list[str]) -> None:
    layers = [line for line in history(target) if line.startswith(("COPY", "RUN", "ADD"))]
    assert layers[-len(own) :] == own
    before = layers[: -len(own)]
    assert before[-1] == f"COPY --from={dependencies} /layers /"
    assert [line for line in before[:-1] if not line.startswith("RUN")] == []
    assert not depends_on_baton(dependencies)
    assert depends_on_baton("baton") and depends_on_baton("kernels")


@pytest.mark.parametrize("target", ["cpu", "cuda", "sidecar"])
def test_no_layer_depends_on_a_version(target: str) -> None:
    """An ARG is part of the environment of each RUN behind it."""
    assert [line for line in history(target) if line.startswith("ARG")] == []
    labels = [line for line in history(target) if line.startswith("LABEL")]
    assert not [line for line in labels if "$" in line or "version" in line]


@pytest.mark.parametrize("name", ["baton", "dependencies", "sidecar-dependencies", "kernels"])
def test_layers_are_the_same_whenever_they_are_built(name: str) -> None:
    """Files have no time of their own, and bytecode does not depend on it."""
    script = STAGES[name].instructions[-1]
    assert script.startswith("RUN ") and script.endswith(FIXED_TIMES)
    assert script.count("compileall") == script.count("--invalidation-mode unchecked-hash")
    if name.endswith("dependencies"):  # what Python imports itself must not be written
        assert any("PYTHONDONTWRITEBYTECODE=1" in line for line in STAGES[name].instructions)
    assert script.count("--no-compile") == script.count("pip --python") - script.count(" check;")


@pytest.mark.parametrize("target", ["cpu", "cuda", "sidecar"])
def test_no_folder_gets_the_time_of_the_build(target: str) -> None:
    """COPY gives it to the folder that it copies to, and to those above that it makes. Only of the
    root a layer holds no entry."""
    copies = [line for line in history(target) if line.startswith("COPY")]
    assert copies and all(re.fullmatch(r"COPY --from=\S+ \S+ /", line) for line in copies)
    for stage, folder in (line.removeprefix("COPY --from=").split()[:2] for line in copies):
        last = STAGES[stage].instructions[-1]
        touched = re.search(rf"find (\S+) -exec {re.escape(FIXED_TIMES)}$", last)
        assert touched and f"{folder}/".startswith(f"{touched[1]}/"), stage


@pytest.mark.parametrize("target", ["cpu", "cuda", "sidecar"])
def test_what_a_final_image_runs_leaves_no_time(target: str) -> None:
    """The user, and the system's packages. Nor does a log or a cache name the time: each is
    emptied, since the mark of a removed file has a time of its own."""
    scripts = [line for line in history(target) if line.startswith("RUN")]
    for script in scripts:
        assert script.endswith(f'-xdev -newermt "@$start" -exec {FIXED_TIMES}')
    packages = [script for script in scripts if "apt-get" in script]
    assert len(packages) == (target == "cuda")
    emptied = "/var/log /var/cache/apt /var/cache/ldconfig -type f -exec truncate --size=0 {} +"
    assert all(f"find {emptied}" in script for script in packages)


def test_no_hash_of_the_wheel_is_written_down() -> None:
    """pip notes where it found a file and its hash, which changes whenever the wheel is built."""
    script = STAGES["baton"].instructions[-1]
    assert "--find-links /wheels" in script and "/wheels/" not in script


def test_the_build_may_read_what_it_copies() -> None:
    allowed = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[1] == "*"
    assert allowed == {*(path for path in copied() if LOCKS not in path), LOCKS}
    assert all((ROOT / Path(path)).exists() for path in allowed)
