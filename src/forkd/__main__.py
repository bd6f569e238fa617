"""`python -m forkd` is the command `forkd`."""

from forkd.cli.__main__ import main

if __name__ == "__main__":
    main()
