"""Run evaluation episodes in one sandbox, and reset the sandbox after each of them.

A reset rolls memory and disk back to the moment of the fork.  It takes less time than a new fork.
"""

from __future__ import annotations

from forkd import Sandbox

ENVIRONMENT = """
position = 0
def step(move):
    global position
    position += {"left": -1, "right": 1}[move]
    return position
"""

POLICIES = {
    "always right": ["right"] * 5,
    "never decided": ["right", "left"] * 2,
    "always left": ["left"] * 5,
}


def episode(sandbox: Sandbox, moves: list[str]) -> int:
    """Make the moves in a fresh environment, and return where they end."""
    sandbox.eval(ENVIRONMENT, check=True)
    for move in moves:
        sandbox.eval(f"step({move!r})", check=True)
    return int(str(sandbox.eval("position", check=True)))


def main() -> dict[str, int]:
    """Return the end of each policy's episode."""
    ends: dict[str, int] = {}
    with Sandbox("numpy") as sandbox:
        for name, moves in POLICIES.items():
            ends[name] = episode(sandbox, moves)
            sandbox.reset()  # files and variables of the episode are gone
            assert sandbox.eval("'position' in globals()").value is False
    return ends


if __name__ == "__main__":
    print(main())
