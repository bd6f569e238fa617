"""Let a coding agent try several patches at once, each on a branch of its work, and keep one.

    python recipes/coding-agent-fork/run.py [SNAPSHOT [COMMAND]]

The agent's sandbox has a repository with a failing test.  The model proposes patches; each is
written and tested in a branch; the first that passes is promoted, and the agent goes on there.
`ScriptedModel` stands in for a real model.
"""

from __future__ import annotations

import difflib
import sys

from forkd import Sandbox, Sandboxes

REPO, TARGET = "/srv/repo", "/srv/repo/slug.py"

FILES = {
    "slug.py": "def slug(title):\n    return title.replace(' ', '-')\n",
    "test_slug.py": """\
import unittest
from slug import slug

class SlugTest(unittest.TestCase):
    def test_one_word(self):
        self.assertEqual(slug("Forks"), "forks")
    def test_spaces_in_a_row_are_one_dash(self):
        self.assertEqual(slug("  Fast   forks "), "fast-forks")
""",
}

COMMAND = f"cd {REPO} && python3 -m unittest"


class ScriptedModel:
    """A model that answers with the patches of a script: each is the whole of a file."""

    def propose(self, source: str, failure: str) -> list[str]:
        """Return patches of `source`, given how its tests fail."""
        print("the model is shown", len(source), "characters of code, and how they fail:")
        print(failure)
        return [
            source.replace("title.replace", "title.lower().replace"),
            "def slug(title):\n    return '-'.join(title.lower().split())\n",
            "def slug(title)\n    return title.lower()\n",
        ]


def try_patches(branches: Sandboxes, patches: list[str], command: str) -> list[bool]:
    """Write and test one patch in each branch, all at the same time; return which passed."""
    for branch, patch in zip(branches, patches, strict=True):
        branch.files.write(TARGET, patch)
    return [result.exit_code == 0 for result in branches.run(command)]


def main(snapshot: str = "numpy", command: str = COMMAND) -> str:
    """Return the change that the agent keeps, as a diff; empty if no patch passed."""
    with Sandbox(snapshot) as agent:
        for name, text in FILES.items():
            agent.files.write(f"{REPO}/{name}", text, make_parents=True)
        before = agent.files.read_text(TARGET)
        failure = agent.run(command)
        patches = ScriptedModel().propose(before, failure.stderr)

        branches = agent.branch(len(patches))
        passed = try_patches(branches, patches, command)
        print("patches that pass:", passed)
        if True in passed:
            branches[passed.index(True)].promote()  # takes the agent's id; the others end
        else:
            branches.kill()

        after = agent.files.read_text(TARGET)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new", "", "")
        return "\n".join(lines)


if __name__ == "__main__":
    print(main(*sys.argv[1:3]))
