"""Runs startup, readiness and liveness probes."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.kube.kinds import Object

EXEC = Callable[[list[str]], Awaitable[int]]


def port_of(container: Object, port: int | str) -> int:
    """Return the number of a container's port, which may be given by name. Raises ValueError if the
    name is unknown."""
    if isinstance(port, int):
        return port
    for each in container.get("ports") or []:
        if each.get("name") == port:
            return int(each["containerPort"])
    raise ValueError(f"container {container['name']} has no port {port!r}")


async def run_probe(probe: Object, container: Object, address: str, execute: EXEC) -> str:
    """Run a probe once. Return why it failed, or "" if it succeeded."""
    seconds = float(probe["timeoutSeconds"])
    try:
        async with asyncio.timeout(seconds):
            if "httpGet" in probe:
                return await _http(probe["httpGet"], container, address)
            if "tcpSocket" in probe:
                port = port_of(container, probe["tcpSocket"]["port"])
                _, writer = await asyncio.open_connection(address, port)
                writer.close()
                return ""
            if "grpc" in probe:
                return "this kubelet does not support gRPC probes"
            code = await execute(probe["exec"]["command"])
            return f"exit code {code}" if code else ""
    except TimeoutError:
        return f"no response within {seconds:g} s"
    except OSError as error:
        return f"{type(error).__name__}: {error}"


async def _http(get: Object, container: Object, address: str) -> str:
    port, path = port_of(container, get["port"]), get.get("path", "/")
    headers = {"Host": f"{address}:{port}", "User-Agent": "kube-probe/1.36", "Connection": "close"}
    headers |= {each["name"]: each["value"] for each in get.get("httpHeaders") or []}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    reader, writer = await asyncio.open_connection(get.get("host", address), port)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status = (await reader.readline()).decode().split(" ")
        if len(status) < 2 or not status[1].isdecimal():
            return f"the response is not HTTP: {status}"
        rest = await reader.read(2048)
    finally:
        writer.close()
    good = 200 <= int(status[1]) < 400
    body = rest.partition(b"\r\n\r\n")[2].decode(errors="replace")[:200]
    return "" if good else f"status {status[1]}: {body}"


class Probing:
    """Runs one probe of a container periodically, and calls ``on_verdict`` when the probe reaches
    its failure or success threshold."""

    def __init__(
        self,
        kind: str,
        probe: Object,
        check: Callable[[Object], Awaitable[str]],
        on_verdict: Callable[[str, bool, str], None],
    ) -> None:
        self._kind = kind
        self._probe = probe
        self._check = check
        self._on_verdict = on_verdict

    async def run(self) -> bool:
        """Run a startup probe until it reaches its success threshold (return True) or its failure
        threshold (return False). Run a liveness probe until it reaches its failure threshold, and a
        readiness probe forever."""
        probe, good, bad = self._probe, 0, 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            why = await self._check(probe)
            good, bad = (0, bad + 1) if why else (good + 1, 0)
            if bad >= probe["failureThreshold"]:
                self._on_verdict(self._kind, False, why)
                if self._kind != "readiness":
                    return False
            if good >= probe["successThreshold"]:
                self._on_verdict(self._kind, True, "")
                if self._kind == "startup":
                    return True
            await asyncio.sleep(probe["periodSeconds"])
