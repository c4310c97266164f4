"""Tests a process's log lines as a log collector receives them."""

import json
import subprocess
import sys
from typing import Any

SCRIPT = """
import logging, threading, warnings
import structlog
from baton.obs.logs import configure_logging
configure_logging("info", STYLE, id="decode-0", role="decode")
log = structlog.get_logger("x")
log.info("request_migrates", request_id="chatcmpl-1", epoch=2)
log.debug("too_small_to_say")
thread = threading.Thread(target=lambda: log.warning("from_a_thread"))
thread.start(); thread.join()
try:
    raise ValueError("two\\nlines")
except ValueError:
    log.exception("request_crashed", request_id="chatcmpl-2")
logging.getLogger("some.library").warning("it says %s", "so")
logging.getLogger("some.library").info("noise")
warnings.warn("odd")
"""


def lines(style: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"STYLE = {style!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_each_json_line_is_one_object_whatever_library_logged_it() -> None:
    records: list[dict[str, Any]] = [json.loads(line) for line in lines("json")]
    events = [each["event"] for each in records]
    assert events[:4] == ["request_migrates", "from_a_thread", "request_crashed", "it says so"]
    assert "odd" in events[4] and len(events) == 5
    for each in records:
        assert (each["id"], each["role"]) == ("decode-0", "decode")
        assert {"level", "timestamp"} <= each.keys()
    assert records[0]["request_id"] == "chatcmpl-1" and records[0]["epoch"] == 2
    assert "ValueError: two\nlines" in records[2]["exception"]
    assert [each["level"] for each in records] == ["info", "warning", "error", "warning", "warning"]
    assert records[3]["logger"] == "some.library"


def test_console_style_writes_plain_text() -> None:
    records = lines("console")
    assert (
        "request_migrates" in records[0] and "chatcmpl-1" in records[0] and "decode-0" in records[0]
    )
    assert not any(line.startswith("{") for line in records)


LEVELS_SCRIPT = """
import logging, structlog
from baton.obs.logs import configure_logging, set_log_level
configure_logging("info", "json")
log, bound = structlog.get_logger("x"), structlog.get_logger("y").bind(n=1)
for level in ("info", "debug", "error", "warning"):
    set_log_level(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)(f"{level}:{name}")
    bound.info(f"{level}:bound info")
    logging.getLogger("library").warning(f"{level}:library warning")
    logging.getLogger("library").info(f"{level}:library info")
"""


def test_the_level_changes_for_loggers_that_are_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEVELS_SCRIPT], capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == [
        "info:info", "info:warning", "info:error", "info:bound info", "info:library warning",
        "debug:debug", "debug:info", "debug:warning", "debug:error", "debug:bound info",
        "debug:library warning", "error:error", "warning:warning", "warning:error",
        "warning:library warning",
    ]  # fmt: skip
