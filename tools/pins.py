"""Pin workflow actions by commit and images by digest, since tags can be moved.

    python -m tools.pins            # lists what is not pinned; exit code 1 if anything is not
    python -m tools.pins --write    # pins everything: gets commits from git, digests from Docker

The tag stays beside the pin, as a comment or before the digest; ``--write`` updates each pin to the
current commit or digest of its tag. Releases are pushed only if everything is pinned. Reads the
workflows and the Dockerfile.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, Unavailable

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 60.0

ACTION = re.compile(r"(?P<head>uses: *(?P<name>[\w./-]+))@(?P<ref>\S+)(?: *# *(?P<tag>\S+))?")
IMAGE = re.compile(
    r"(?P<head>(?:# syntax=|ARG \w+_IMAGE=|node_image: *))"
    r"(?P<tag>[\w./-]+:[\w.-]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")

Resolve = Callable[[str, str], str]
"""Maps an action's repository and tag to its commit, or an image's name and tag to its digest."""


@dataclass(frozen=True, slots=True)
class PinnedReference:
    """One reference in a file, pinned or not."""

    path: Path
    line: int
    text: str
    is_pinned: bool


def files_with_references() -> list[Path]:
    """Return every file that names an action or an image to build from."""
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    return [*workflows, ROOT / "deploy/docker/Dockerfile"]


def find_references(path: Path) -> list[PinnedReference]:
    """Return every reference in ``path``, in order."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for match in ACTION.finditer(line):
            is_pinned = COMMIT.fullmatch(match["ref"]) is not None
            found.append(PinnedReference(path, number, match[0].strip(), is_pinned))
        for match in IMAGE.finditer(line):
            found.append(
                PinnedReference(path, number, match[0].strip(), match["digest"] is not None)
            )
    return found


def pin_references(text: str, commit_of: Resolve, digest_of: Resolve) -> str:
    """Return ``text`` in which every action is pinned to its tag's commit and every image to its
    tag's digest."""

    def action(match: re.Match[str]) -> str:
        tag = match["tag"] or match["ref"]
        owner_and_name = "/".join(match["name"].split("/")[:2])
        return f"{match['head']}@{commit_of(owner_and_name, tag)} # {tag}"

    def image(match: re.Match[str]) -> str:
        name, _, tag = match["tag"].rpartition(":")
        return f"{match['head']}{match['tag']}@{digest_of(name, tag)}"

    return IMAGE.sub(image, ACTION.sub(action, text))


def commit_of(repository: str, tag: str) -> str:
    """Return the commit of a tag on GitHub. Raises Unavailable when git can't get it."""
    url = f"https://github.com/{repository}"
    answer = _output("git", "ls-remote", url, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
    commits = [line.split()[0] for line in answer.splitlines()]
    if not commits or not COMMIT.fullmatch(commits[-1]):
        raise Unavailable(f"{repository} has no tag {tag!r}")
    return commits[-1]  # for an annotated tag, the second line is its commit


def digest_of(name: str, tag: str) -> str:
    """Return the digest of an image's multi-platform index. Raises Unavailable if Docker can't get
    it."""
    form = "{{.Manifest.Digest}}"
    digest = _output("docker", "buildx", "imagetools", "inspect", f"{name}:{tag}", "--format", form)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()):
        raise Unavailable(
            f"docker printed no SHA-256 digest for {name}:{tag}, but {digest.strip()!r}"
        )
    return digest.strip()


def _output(*command: str) -> str:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS
        )
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command)} failed: {error}") from error
    return answer.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="pin what is not pinned")
    if parser.parse_args().write:
        try:
            texts = {
                path: pin_references(path.read_text(), commit_of, digest_of)
                for path in files_with_references()
            }
        except BatonError as error:
            sys.exit(str(error))
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    unpinned = [
        pin
        for path in files_with_references()
        for pin in find_references(path)
        if not pin.is_pinned
    ]
    for pin in unpinned:
        print(f"{pin.path.relative_to(ROOT)}:{pin.line}: not pinned: {pin.text}")
    sys.exit(bool(unpinned))


if __name__ == "__main__":
    main()
