"""Try several strategies at once, each in a branch of one moment, and go on from the best one.

    python recipes/speculative-agent/run.py [SNAPSHOT]

The agent looks for a short round trip through sixteen towns.  In each turn a model proposes
strategies; each runs in a branch, a judge measures the result, and the best branch is promoted.
`ScriptedModel` stands in for a real model.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor

from forkd import Sandbox

PREPARE = """
import itertools, math
towns = [(math.sin(n * n), math.cos(5 * n)) for n in range(16)]
def length(trip):
    return sum(math.dist(towns[a], towns[b]) for a, b in zip(trip, trip[1:] + trip[:1]))
trip = list(range(16))
"""

JUDGE = "length(trip) if sorted(trip) == list(range(16)) else math.inf"


NEAREST = """
left, trip = set(range(1, 16)), [0]
while left:
    trip.append(min(left, key=lambda town: math.dist(towns[town], towns[trip[-1]])))
    left.remove(trip[-1])
"""

TURN_PARTS = """
for a, b in list(itertools.combinations(range(17), 2)) * 4:
    trip = min(trip, trip[:a] + trip[a:b][::-1] + trip[b:], key=length)
"""


class ScriptedModel:
    """A model that proposes what a script says: a name and code for each strategy of a turn."""

    broken = "import a_solver_that_is_not_there"
    turns = (
        {"nearest town first": NEAREST, "visit half": "trip = trip[:8]", "use a solver": broken},
        {"turn parts around": TURN_PARTS, "swap two": "trip[0], trip[1] = trip[1], trip[0]"},
    )


def judge(sandbox: Sandbox) -> float:
    """Return how long a sandbox's trip is; infinite if it leaves a town out."""
    return float(str(sandbox.eval(JUDGE, check=True)))


def attempt(branch: Sandbox, code: str) -> float:
    """Run a strategy in its branch; return the judge's measure, infinite if the code failed."""
    return math.inf if branch.eval(code).error else judge(branch)


def main(snapshot: str = "numpy") -> list[tuple[str, float]]:
    """Return the strategy that won each turn, and the length of its trip."""
    won = []
    with Sandbox(snapshot) as agent:
        agent.eval(PREPARE, check=True)
        for strategies in ScriptedModel.turns:
            branches = agent.branch(len(strategies))
            with ThreadPoolExecutor() as pool:
                lengths = list(pool.map(attempt, branches, strategies.values()))
            print(dict(zip(strategies, lengths, strict=True)))
            best = lengths.index(min(lengths))
            branches[best].promote()  # takes the agent's id; the other branches end
            won.append((list(strategies)[best], judge(agent)))
    return won


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
