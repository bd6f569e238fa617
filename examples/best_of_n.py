"""Branch a running sandbox into several attempts, and keep the best one.

The expensive part (here: a list of numbers) is done once.  Every sibling starts with it in memory.
"""

from __future__ import annotations

from forkd import Client

ATTEMPTS = 4

PREPARE = """
import random
numbers = list(range(100))
"""

ATTEMPT = """
random.Random({seed}).shuffle(numbers)
score = sum(abs(a - b) for a, b in zip(numbers, numbers[1:]))
score
"""


def main() -> tuple[float, float]:
    """Return the best score, and the score that the promoted sandbox has in memory."""
    with Client() as client, client.sandbox("numpy") as source:
        name = source.id
        source.eval(PREPARE, check=True)
        siblings = source.branch(ATTEMPTS)
        scores = [
            float(str(sibling.eval(ATTEMPT.format(seed=seed), check=True)))
            for seed, sibling in enumerate(siblings)
        ]
        best = scores.index(max(scores))
        print("scores:", scores, "best attempt:", best)

        siblings[best].promote()  # takes the source's id; the source and the other siblings end
        kept = client.sandboxes.get(name)
        return max(scores), float(str(kept.eval("score", check=True)))


if __name__ == "__main__":
    print(main())
