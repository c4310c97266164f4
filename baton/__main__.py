"""``python -m baton``."""

from baton.cli.main import main

if __name__ == "__main__":
    main()
