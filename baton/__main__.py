"""``python -m baton`` runs the command ``baton``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, see baton.system.python_process
    from command_line.main import main

    main()
