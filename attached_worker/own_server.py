"""An unmodified ``vllm serve`` that a worker starts for itself, and that ends with it."""

import asyncio
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from attached_worker.vllm_protocol import CONNECTOR, GRAMMAR_FLAG
from attached_worker.vllm_server import PLUGIN, PLUGIN_FOLDER
from baton.config import LOOPBACK, Settings
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Invalid, Unavailable
from baton.network.free_port import free_port
from baton.system.process_folder import make_process_folder
from baton.system.python_process import python_command

STOP_SECONDS = 5.0
"""How long an idle server may take to end after SIGTERM."""

SPECULATION_FLAGS = ("--speculative-config", "--speculative_config", "-sc")
"""vLLM allows no logits processors beside speculative decoding."""

NVIDIA_DEVICE = Path("/dev/nvidiactl")

UCX_TLS_ON_CPU = "tcp,cma,posix,sysv,self"
"""UCX's transports between CPU servers of one host. Left to itself, UCX took up to 30 s for the
first read, in which the server computes nothing and counts as frozen."""

MAX_FOLDER_BYTES = 50
"""Maximum length of the path of the temporary folder in which vLLM's sockets are placed. A Unix
socket's path may have 107 bytes, and those of vLLM have 57 bytes below that folder."""


class OwnServer:
    """Has its log in the worker's. It generates for this worker alone, and listens on loopback."""

    def __init__(self, settings: Settings, role: Role) -> None:
        self._settings = settings
        self._role = role
        self._port = free_port(LOOPBACK[0])
        parent = tempfile.gettempdir()
        self._folder = make_process_folder(
            "baton-vllm-", parent if len(parent) <= MAX_FOLDER_BYTES else "/tmp"
        )
        self._process: asyncio.subprocess.Process | None = None
        self._events, self._replay = f"ipc://{self._folder}/events", f"ipc://{self._folder}/replay"
        self.url = (
            f"http://{LOOPBACK[0]}:{self._port}?kv_events={self._events}&kv_replay={self._replay}"
        )
        """As in the setting ``attach``."""

    async def start(self, model: Path) -> None:
        """Start the server, which then loads its model. Raises Invalid if it can't be started."""
        python = self._settings.engine_python or sys.executable
        try:
            self._process = await asyncio.create_subprocess_exec(
                *python_command("baton.system.group_guard"),
                *(python, "-m", "vllm.entrypoints.cli.main", *self._arguments(model)),
                env={**self._environment(), **os.environ, **self._own_environment()},
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the worker, which drains first
            )
        except OSError as error:
            raise Invalid(f"engine_python is {python!r}: {error}", param="engine_python") from error

    def check(self) -> None:
        """Raise Unavailable if the server has ended."""
        process = self._process
        if process is not None and process.returncode is not None:
            raise Unavailable(
                f"vllm serve has ended with status {process.returncode}; its log says why"
            )

    async def watch(self) -> None:
        """Wait until the server ends. Raises Unavailable then."""
        assert self._process is not None
        await self._process.wait()
        self.check()

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            assert process.stdin is not None
            process.stdin.close()  # the guard kills the server then
            await process.wait()

    def _arguments(self, model: Path) -> list[str]:
        """Return the arguments of ``vllm``. The operator's come last, so they win."""
        settings = self._settings
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._events,
            "replay_endpoint": self._replay,
        }
        arguments = [
            *("serve", str(model), f"--host={LOOPBACK[0]}", f"--port={self._port}"),
            f"--served-model-name={settings.model_name}",
            f"--shutdown-timeout={settings.drain_timeout_seconds:.0f}",
            f"--kv-events-config={json.dumps(events)}",
            "--enable-prompt-tokens-details",
            *shlex.split(GRAMMAR_FLAG),
        ]
        own = shlex.split(settings.engine_args)
        if not any(each.startswith(SPECULATION_FLAGS) for each in own):
            arguments.append(f"--logits-processors={PLUGIN}")
        if not WORKER_KINDS[self._role].serves_alone:
            buffer = {"kv_buffer_device": "cpu"} if self._is_on_cpu else {}
            arguments.append(f"--kv-transfer-config={json.dumps(CONNECTOR | buffer)}")
        if settings.dtype != "auto":
            arguments.append(f"--dtype={settings.dtype}")
        return [*arguments, *own]

    @property
    def _is_on_cpu(self) -> bool:
        device = self._settings.device
        return device == "cpu" or (device == "auto" and not NVIDIA_DEVICE.exists())

    def _environment(self) -> dict[str, str]:
        """Return the variables that the operator's own replace."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK[0],
            "GLOO_SOCKET_IFNAME": "lo",
            "UCX_NET_DEVICES": "lo",
            **({"UCX_TLS": UCX_TLS_ON_CPU} if self._is_on_cpu else {}),
        }

    def _own_environment(self) -> dict[str, str]:
        paths = [str(PLUGIN_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_RPC_BASE_PATH": str(self._folder),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK[0],
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(LOOPBACK[0])),
        }
