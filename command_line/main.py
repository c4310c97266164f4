"""The ``baton`` command. Exit codes: 0 success, 1 failure, 2 wrong usage.

Each command imports its dependencies only when it runs, so that ``baton status``, for example, does
not wait for torch.
"""

import sys

import structlog
import typer

from baton.errors import BatonError, Invalid
from baton.system.process_environment import prepare_environment
from command_line import (
    bench,
    generate_options,
    key,
    kv_commands,
    simulate_options,
)
from command_line import inspect_commands as inspect
from command_line import lifecycle_commands as lifecycle

app = typer.Typer(
    name="baton",
    help="Serve large language models on separate prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = (
    lifecycle.up,
    lifecycle.down,
    inspect.status,
    inspect.top,
    inspect.logs,
    lifecycle.scale,
    lifecycle.drain,
    lifecycle.serve,
    generate_options.generate,
    inspect.explain,
    inspect.usage,
    inspect.check,
    simulate_options.simulate,
    simulate_options.plan,
    inspect.doctor,
)
"""The commands, in the order in which ``baton --help`` lists them."""

for command in COMMANDS:
    app.command()(command)
app.add_typer(key.app, name="key")
app.add_typer(kv_commands.app, name="kv")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Prepare the environment variables, send logs to stderr, since results go to stdout, and run
    the command line."""
    prepare_environment()
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    run_command_line()


def run_command_line() -> None:
    """Run the command line. If the command raises a BatonError, print its message in one line on
    stderr, and exit with 2 if the error is Invalid, else with 1."""
    try:
        app(prog_name="baton")
    except BatonError as error:
        print(f"baton: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Invalid) else 1)


if __name__ == "__main__":
    main()
