"""What `make demo-branch` runs in the guest: a process that plans a tour, thought by thought.

It visits the nearest city that it has not seen, over and over, and writes down each thought.
Once somebody has told it a way (`way.json`) it improves its tour in that way, and writes the
length down (`result.json`).  Nobody tells it that it was branched, and nothing in it would
notice: what it knows is in its memory, and its files are where they were.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import secrets
import sys
import time
from pathlib import Path

CITIES = 60
PACE_S = 0.05


class Thinker:
    """A tour, and the thoughts that led to it."""

    def __init__(self, home: Path) -> None:
        dice = random.Random(7)  # noqa: S311 - the same map for everybody
        self.home = home
        self.cities = [(dice.random(), dice.random()) for _ in range(CITIES)]
        self.tour = [0]
        self.known_to_nobody = secrets.token_hex(8)
        self.chain = hashlib.sha256(self.known_to_nobody.encode()).hexdigest()
        self.thoughts = 0
        self.log = (home / "thoughts.log").open("a", buffering=1)

    def note(self, thought: str) -> None:
        """Write a thought down, chained to all before it."""
        self.thoughts += 1
        self.chain = hashlib.sha256(f"{self.chain} {thought}".encode()).hexdigest()
        self.log.write(f"{self.thoughts} {self.chain[:16]} {thought}\n")

    def distance(self, one: int, other: int) -> float:
        """Return how far two cities are apart."""
        return math.dist(self.cities[one], self.cities[other])

    def length(self, tour: list[int]) -> float:
        """Return how long a tour is."""
        return sum(self.distance(tour[i - 1], tour[i]) for i in range(len(tour)))

    def wander(self) -> None:
        """Visit cities until somebody says how to go on, and then the rest at once."""
        way = self.home / "way.json"
        while len(self.tour) < CITIES:
            here = self.tour[-1]
            left = set(range(CITIES)) - set(self.tour)
            city = min(left, key=lambda other: self.distance(here, other))
            self.tour.append(city)
            self.note(f"from {here} to {city}")
            if not way.exists():
                time.sleep(PACE_S)
        while not way.exists():
            time.sleep(PACE_S)

    def improve(self, way: dict[str, float]) -> None:
        """Cool down from `heat`: reverse stretches, also for the worse while it is hot."""
        dice = random.Random(int(way["seed"]))  # noqa: S311 - not for secrets
        heat, steps = way["heat"], int(way["steps"])
        length = best = self.length(self.tour)
        kept = list(self.tour)
        for step in range(steps):
            one, other = sorted(dice.sample(range(1, CITIES), 2))
            self.tour[one:other] = self.tour[one:other][::-1]
            tried = self.length(self.tour)
            cold = heat * (1 - step / steps) + 1e-9
            if tried <= length or dice.random() < math.exp((length - tried) / cold):
                length = tried
            else:
                self.tour[one:other] = self.tour[one:other][::-1]
            if length < best:
                best, kept = length, list(self.tour)
        self.tour = kept
        self.note(f"improved to {best:.4f} with heat {heat}")

    def report(self, way: dict[str, float]) -> None:
        """Say what came out; the file is whole or absent."""
        said = {
            "way": way,
            "length": self.length(self.tour),
            "visited": len(set(self.tour)),
            "cities": CITIES,
            "thoughts": self.thoughts,
            "chain": self.chain,
            "secret": self.known_to_nobody,
            "pid": os.getpid(),
        }
        aside = self.home / "result.json.new"
        aside.write_text(json.dumps(said))
        aside.rename(self.home / "result.json")


def main() -> None:
    """Think."""
    home = Path(sys.argv[1])
    thinker = Thinker(home)
    (home / "born").touch()
    thinker.wander()
    way = json.loads((home / "way.json").read_text())
    thinker.improve(way)
    thinker.report(way)
    while True:
        time.sleep(3600)


main()
