"""The speed of plain TCP over the link, which is the ceiling of all transfers.

python -m benchmarks.codec_links.raw_tcp serve
python -m benchmarks.codec_links.raw_tcp read SECONDS
"""

import socket
import sys

from benchmarks.codec_links.commands import answer, bench_process
from benchmarks.codec_links.network import SOURCE_ADDRESS
from benchmarks.machine import SYSTEM_CLOCK

PORT = 5201
PIECE_BYTES = 2**20


def serve() -> None:
    """Send zeros to each reader until it disconnects."""
    data = bytes(PIECE_BYTES)
    with socket.create_server((SOURCE_ADDRESS, PORT)) as server:
        answer("ready")
        while True:
            connection, _ = server.accept()
            with connection:
                try:
                    while True:
                        connection.sendall(data)
                except OSError:
                    continue


def read(seconds: float) -> None:
    """Read for ``seconds``, after a tenth of that as a warm-up; answer with the bytes per
    second."""
    buffer = bytearray(PIECE_BYTES)
    with socket.create_connection((SOURCE_ADDRESS, PORT)) as connection:
        _read_for(connection, buffer, seconds / 10)
        began = SYSTEM_CLOCK()
        size = _read_for(connection, buffer, seconds)
        answer(size / (SYSTEM_CLOCK() - began))


def _read_for(connection: socket.socket, buffer: bytearray, seconds: float) -> int:
    size, until = 0, SYSTEM_CLOCK() + seconds
    while SYSTEM_CLOCK() < until:
        size += connection.recv_into(buffer)
    return size


async def measure(namespace: str, seconds: float) -> float:
    """Return the bytes per second from the serving process to one in ``namespace``."""
    async with bench_process("raw_tcp", "read", seconds, namespace=namespace) as reader:
        return float(await reader.receive())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        read(float(sys.argv[2]))
