"""The client of resumable streams in docs/failover.md."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "failover.md"


def documented_client() -> Callable[..., Iterator[str]]:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "def resumable_stream" in block), names)
    found: Callable[..., Iterator[str]] = names["resumable_stream"]
    return found
