"""`forkd`, also as `python -m forkd.cli`."""

from __future__ import annotations

from forkd import starting


def main() -> None:
    """Load the program and run it."""
    starting.run("forkd.cli.main")


if __name__ == "__main__":
    main()
