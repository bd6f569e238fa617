"""The `forkd` command: parse, call one thing of the SDK, render."""
