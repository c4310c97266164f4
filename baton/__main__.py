"""``python -m baton`` runs the command ``baton``."""

from command_line.main import main

if __name__ == "__main__":
    main()
