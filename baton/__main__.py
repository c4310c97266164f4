"""The command ``baton``, also as ``python -m baton``.

An installation has the programs in ``baton/_programs``, a checkout beside ``baton``. Only this
command puts that folder into ``sys.path``, so packages of others may have the programs' names.
"""

import os
import sys


def main() -> None:
    """Run the command ``baton`` without importing anything from the working folder."""
    _leave_out_working_folder()
    _heed_sigterm_as_first_process()
    from pathlib import Path

    package = Path(__file__).resolve().parent
    installed = package / "_programs"
    sys.path.insert(0, str(installed if installed.is_dir() else package.parent))
    from command_line.main import main as run_command

    run_command()


def _leave_out_working_folder() -> None:
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, or that of the script
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(folders) > 1 and "" in folders:  # an empty entry means the working folder, too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        here = os.getcwd()  # noqa: PTH109
        sys.path[:] = [folder for folder in sys.path if folder != here]


def _heed_sigterm_as_first_process() -> None:
    """End at SIGTERM, also as the first process of a container, to which the kernel sends only
    signals that it has a handler for. ``baton serve`` replaces the handler once it can drain."""
    import signal

    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    main()
