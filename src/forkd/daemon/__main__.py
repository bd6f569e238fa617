"""`forkd-daemon`, also as `python -m forkd.daemon`."""

from __future__ import annotations

from forkd.loading import without_collecting


def main() -> None:
    """Load the program and run it."""
    with without_collecting():
        from forkd.daemon.main import main as run  # noqa: PLC0415 - what loading is about
    run()


if __name__ == "__main__":
    main()
