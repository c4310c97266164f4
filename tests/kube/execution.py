"""Serves ``kubectl exec``: runs a command in a container, and carries its input and output over a
WebSocket. The first byte of each message is the number of a channel, such as STDOUT."""

import base64
import hashlib
import json
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from typing import IO

from tests.kube.kinds import Object

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""The constant from which the response to a WebSocket handshake is computed (RFC 6455, 1.3)."""

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255
BINARY, CLOSING = 2, 8
PIECE = 32 * 1024


def accepted(key: str, protocols: str) -> dict[str, str]:
    """Return the headers of the response that accepts the upgrade to a WebSocket. Raises ValueError
    if ``protocols`` contains none of PROTOCOLS."""
    wanted = [name.strip() for name in protocols.split(",")]
    protocol = next((name for name in PROTOCOLS if name in wanted), None)
    if protocol is None:
        raise ValueError(f"exec supports {' and '.join(PROTOCOLS)}, not {protocols!r}")
    digest = hashlib.sha1(key.encode() + GUID).digest()
    return {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
        "Sec-WebSocket-Protocol": protocol,
    }


class Channels:
    """Sends and receives the messages of one WebSocket connection. Any thread may send."""

    def __init__(self, source: BufferedIOBase, sink: BufferedIOBase) -> None:
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()

    def send(self, channel: int, data: bytes) -> None:
        self._frame(BINARY, bytes([channel]) + data)

    def close(self) -> None:
        self._frame(CLOSING, struct.pack("!H", 1000))

    def _frame(self, kind: int, data: bytes) -> None:
        head = bytes([0x80 | kind])
        if len(data) < 126:
            head += bytes([len(data)])
        else:
            head += struct.pack("!BH", 126, len(data))
        with self._lock:
            self._sink.write(head + data)
            self._sink.flush()

    def receive(self) -> bytes | None:
        """Return the next message, which begins with the number of its channel, or None once the
        client has closed the connection."""
        head = self._source.read(2)
        if len(head) < 2 or head[0] & 0x0F == CLOSING:
            return None
        length = head[1] & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", self._source.read(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self._source.read(8))
        mask = self._source.read(4) if head[1] & 0x80 else bytes(4)
        data = self._source.read(length)
        return bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))


def execute(
    channels: Channels, command: Sequence[str], environment: Mapping[str, str], takes_input: bool
) -> None:
    """Run a command until it exits, and then send its exit code in the form that kubectl
    expects."""
    process = subprocess.Popen(
        command, env=dict(environment), bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    pumps = [
        threading.Thread(target=_pump, args=(channels, STDOUT, process.stdout)),
        threading.Thread(target=_pump, args=(channels, STDERR, process.stderr)),
    ]
    feed = threading.Thread(target=_feed, args=(channels, process), daemon=True)
    with process:
        for thread in [*pumps, feed]:
            thread.start()
        for thread in pumps:
            thread.join()
        code = process.wait()
    channels.send(ERROR, json.dumps(_exit_status(code)).encode())
    channels.close()


def _pump(channels: Channels, channel: int, source: IO[bytes]) -> None:
    while data := source.read(PIECE):
        channels.send(channel, data)


def _feed(channels: Channels, process: "subprocess.Popen[bytes]") -> None:
    """Pass the client's input to the process; kill the process if the client disconnects."""
    try:
        while (message := channels.receive()) is not None:
            if message[:1] == bytes([STDIN]) and process.stdin is not None:
                process.stdin.write(message[1:])
            elif message == bytes([CLOSE, STDIN]) and process.stdin is not None:
                process.stdin.close()
    except (OSError, ValueError):
        pass
    if process.poll() is None:
        process.kill()


def _exit_status(code: int) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}]
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": causes},
    }
