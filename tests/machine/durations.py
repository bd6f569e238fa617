"""Write down what each module took in the helper machines, from the last `make test`.

    python -m tests.machine.durations

What takes longest is begun first: see `tests.machine.claims`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from tests.machine.claims import DURATIONS
from tools import junit
from tools.test_all import RESULTS, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def main() -> int:
    """Read the JUnit files of the helper machines; write the durations."""
    text = json.dumps(of_modules(RESULTS.glob("machine-*.xml")), indent=4, sort_keys=True)
    (ROOT / DURATIONS).write_text(f"{text}\n", encoding="utf-8")
    return 0


def of_modules(results: Iterable[Path]) -> dict[str, int]:
    """Return what the tests of each module took together, with their fixtures, in seconds."""
    taken_s = defaultdict[str, float](float)
    for path in results:
        for test, duration_s in junit.taken_s(path).items():
            taken_s[test.partition("::")[0]] += duration_s
    return {module: round(duration_s) for module, duration_s in taken_s.items()}


if __name__ == "__main__":
    sys.exit(main())
