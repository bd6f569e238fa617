"""Write down what each test took in the helper machine, from the last `make test`.

    python -m tests.machine.durations

Parts of the tests that run at once are cut so that each takes about as long.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from tests.machine.run import DURATIONS
from tools.test_all import RESULTS, ROOT

if TYPE_CHECKING:
    from pathlib import Path


def main() -> int:
    """Read the JUnit files of the helper machines; write the durations."""
    found = sorted(RESULTS.glob("machine-*.xml"))
    taken_s = {test: s for path in found for test, s in durations_s(path).items()}
    text = json.dumps(taken_s, indent=4, sort_keys=True)
    (ROOT / DURATIONS).write_text(f"{text}\n", encoding="utf-8")
    return 0


def durations_s(junit: Path) -> dict[str, float]:
    """Return what each test that ran took, with its setup and teardown, in seconds."""
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": round(
            float(case.get("time", 0)), 1
        )
        for case in ET.parse(junit).getroot().iter("testcase")  # noqa: S314 - pytest wrote it
        if case.find("skipped") is None
    }


if __name__ == "__main__":
    sys.exit(main())
