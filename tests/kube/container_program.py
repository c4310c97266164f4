"""A small program that runs in the containers of tests.

    python -m tests.kube.container_program serve PORT

It answers HTTP requests with $BODY or with files.
"""

import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Serves $BODY at ``/``, and the container's files at any other path."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        path = Path(self.path)
        if self.path != "/" and not path.is_file():
            self.send_error(404)
            return
        text = os.environ.get("BODY", "") if self.path == "/" else path.read_text(encoding="utf-8")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


def main(arguments: list[str]) -> int:
    assert arguments[0] == "serve", __doc__
    server = ThreadingHTTPServer(("0.0.0.0", int(arguments[1])), Handler)
    print(f"serving as {os.getuid()}", flush=True)
    stop = threading.Thread(target=server.shutdown)
    signal.signal(signal.SIGTERM, lambda *_: stop.start())
    server.serve_forever(poll_interval=0.01)
    print("SIGTERM", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
