"""What the suite of the runtime contract says in each language."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.docs import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent.parent

SCRIPTS = ROOT / "crates" / "agent" / "runtime"

Json = object

VALUE: Json = [1, 2.5, "a", None, {"a": True}]


@dataclass(frozen=True)
class Dialect:
    """One runtime, and how its language says what every language can say.

    Attributes:
        command: How it is started.
        keep: Remembers the word `kept`.
        recall: Prints what was remembered.
        raises: Fails, three levels deep or at once.
        fault: The type, a part of the message and a part of the traceback of that.
        malformed: Is no program.
        output: Prints `out`, has a child process print `child`, prints `err` on standard error.
        forever: Prints `now`, then never ends.
        loops: Other code that never ends.
        started: Prints `now`.
        waits: Prints `now`, then waits for the file /tmp/go, then prints `gone on`.
        much: Prints so many bytes of `x`, a thousand to a line.
        descriptors: Has a child process list its descriptors, `->` before what each is.
        random: Prints a random number of the language's own generator; empty if there is none.
        read: Prints `end` when standard input is at its end.
        die: Ends the process with status 3.
        values: Code, and its value as JSON.
        foreign: Code whose value JSON cannot say.
        silent: Code without a value.
        variable: Has a child process print the variables A and B, `none` for one that is not
            there; empty if the runtime has no variables for one cell.
        set_variables: Sets a variable, of which `NAME` and `VALUE` are the name and the value.
        long: Code whose value, and its text, are longer than may be sent.
        reseeds: A name that `post_fork` gives back.
        programs: All that is on its path, by name; empty for what this host has.
        page: Where the program is, if it is an example of the documentation.
        needs: A program that it starts, which this host may lack.
    """

    command: tuple[str, ...]
    keep: str
    recall: str
    raises: str
    fault: tuple[str, str, str]
    malformed: str
    output: str
    forever: str
    loops: tuple[str, ...]
    started: str
    much: Callable[[int], str]
    descriptors: str
    random: str
    read: str
    die: str
    values: tuple[tuple[str, Json], ...] = ()
    foreign: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    long: str = ""
    reseeds: str = ""
    variable: str = ""
    set_variables: str = ""
    waits: str = ""
    page: str = ""
    needs: str = ""
    programs: tuple[tuple[str, str], ...] = ()

    def set_variable(self, name: str, value: str) -> str:
        """Return code that sets a variable of the environment."""
        return self.set_variables.replace("NAME", name).replace("VALUE", value)

    def environment(self, folder: Path) -> dict[str, str]:
        """Return what it is started with; `folder` gets its programs."""
        path = os.environ["PATH"]
        if self.programs:
            path = str(folder / "bin")
            (folder / "bin").mkdir()
            for name, program in self.programs:
                (folder / "bin" / name).symlink_to(shutil.which(program) or program)
        return {"PATH": path, "LANG": "C.UTF-8", "HOME": "/root"}

    def started_from(self, folder: Path) -> tuple[str, ...]:
        """Return the command; a program that a page shows is put into `folder`."""
        if not self.page:
            return self.command
        (block,) = blocks(ROOT / self.page, "perl runtime")
        (folder / "runtime").write_text(block.code, encoding="utf-8")
        return (self.command[0], str(folder / "runtime"))


PYTHON = Dialect(
    command=(sys.executable, str(SCRIPTS / "python.py")),
    keep="word = 'kept'",
    recall="print(word)",
    raises="def fail(n):\n    return 1 / n\n\nfail(0)",
    fault=("ZeroDivisionError", "division by zero", "return 1 / n"),
    malformed="1 +",
    output="import subprocess, sys\nprint('out')\nsubprocess.run(['echo', 'child'])\n"
    "print('err', file=sys.stderr)",
    forever="import time\nprint('now')\ntime.sleep(3600)",
    started="print('now')\n",
    loops=("while True: pass", "import asyncio\nawait asyncio.sleep(3600)"),
    much=lambda size: f"for _ in range({size // 1000}): print('x' * 999)",
    descriptors="import subprocess\nsubprocess.run(['ls', '-l', '/proc/self/fd'], close_fds=False)",
    random="import random\nprint(random.random())",
    waits="import os, time\nprint('now')\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\n"
    "print('gone on')",
    read="import sys\nprint(repr(sys.stdin.read()).replace(\"''\", 'end'))",
    die="import os\nos._exit(3)",
    variable="import os; _ = os.system('echo ${A-none} ${B-none}')",
    set_variables="import os; os.environ['NAME'] = 'VALUE'",
    values=(("6 * 7", 42), ("[1, 2.5, 'é', None, {'a': True}]", [1, 2.5, "é", None, {"a": True}])),
    foreign=("object()", "float('nan')", "{1, 2}"),
    silent=("x = 1", "None"),
    long="'x' * 300_000",
    reseeds="python.random",
)

PERL = Dialect(
    command=("perl",),
    keep="$word = 'kept';",
    recall='print "$word\n"; undef',
    raises="sub fail { die 'not today' }\nfail();",
    fault=("Error", "not today", "line 1"),
    malformed="1 +",
    output="print \"out\\n\"; system('echo', 'child'); print STDERR \"err\\n\"; undef",
    forever='print "now\n"; sleep 3600;',
    started='print "now\n";',
    loops=("1 while 1",),
    much=lambda size: f"print 'x' x 999, \"\\n\" for 1 .. {size // 1000}; undef",
    descriptors="system('ls', '-l', '/proc/self/fd'); undef",
    random='print rand(), "\n"; undef',
    read="print defined(<STDIN>) ? 'more' : 'end', \"\\n\"; undef",
    die="exit 3",
    values=(("6 * 7", 42), ("[1, 2.5, 'a', undef, {a => JSON::PP::true}]", VALUE)),
    foreign=("sub { 1 }",),
    silent=("undef",),
    long="'x' x 300_000",
    reseeds="perl.rand",
    page="docs/howto/add-a-runtime.md",
)

NODE = Dialect(
    command=("node", str(SCRIPTS / "node.js")),
    keep="let word = 'kept';",
    recall="console.log(word)",
    raises="function fail() {\n  throw new TypeError('not today');\n}\nfail()",
    fault=("TypeError", "not today", "at fail (cell-"),
    malformed="1 +",
    output="console.log('out');\nrequire('child_process').spawnSync('echo', ['child'], "
    "{ stdio: 'inherit' });\nconsole.error('err')",
    forever="console.log('now');\nawait new Promise(() => setTimeout(() => {}, 3.6e6))",
    started="console.log('now');\n",
    loops=("while (true) {}", "new Promise(() => {})"),
    much=lambda size: f"for (let n = {size // 1000}; n; n -= 1) console.log('x'.repeat(999))",
    descriptors="require('child_process').spawnSync('ls', ['-l', '/proc/self/fd'], "
    "{ stdio: 'inherit' }); undefined",
    random="console.log(Math.random())",
    waits="console.log('now');\nwhile (!require('fs').existsSync('/tmp/go')) "
    "await new Promise((done) => setTimeout(done, 50));\nconsole.log('gone on')",
    read="console.log(require('fs').readFileSync(0).length ? 'more' : 'end')",
    die="process.reallyExit(3)",
    variable="require('child_process').spawnSync('sh', ['-c', 'echo ${A-none} ${B-none}'], "
    "{stdio: 'inherit'}); undefined",
    set_variables="process.env.NAME = 'VALUE'",
    values=(
        ("6 * 7", 42),
        ("[1, 2.5, 'a', null, { a: true }]", VALUE),
        ("Promise.resolve(1)", 1),
        ("const late = await new Promise((f) => setTimeout(() => f('late'))); late", "late"),
    ),
    foreign=("() => 1", "NaN", "1n", "new Map()", "({ a: undefined })", "Symbol('a')", "[,]"),
    silent=("undefined", "let x = 1"),
    long="'x'.repeat(300_000)",
    reseeds="node.math",
)

SHELL = Dialect(
    command=(str(ROOT / "build" / "bin" / "forkd-agent"), "shell"),
    keep='cd /tmp\nword=kept\nsay() { echo "$word"; }',
    recall='[ "$PWD" = /tmp ] && say',
    raises="fail() {\n  return 3\n}\nfail",
    fault=("ExitStatus", "ended with status 3", "status 3"),
    malformed="if true; then",
    output="echo out\n/bin/echo child\necho err >&2",
    forever="echo now\nsleep 3600",
    started="echo now\n",
    loops=("while true; do sleep 0.1; done", "while :; do :; done", "f() { sleep 9; }; f; f"),
    much=lambda size: f"head -c {size // 1000 * 999} /dev/zero | tr '\\0' x | fold -w 999; echo",
    descriptors="ls -l /proc/self/fd",
    random="echo $RANDOM$RANDOM",
    waits="echo now\nuntil [ -e /tmp/go ]; do sleep 0.1; done\necho gone on",
    read="if read -r line; then echo more; else echo end; fi",
    die="exit 3",
    reseeds="bash.RANDOM",
)

JAVA = Dialect(
    command=(str(ROOT / "recipes" / "java" / "lib" / "runtimes" / "java"),),
    needs="java",
    keep='String word = "kept";',
    recall="System.out.println(word);",
    raises="int fail(int n) {\n    return 1 / n;\n}\n\nfail(0)",
    fault=("java.lang.ArithmeticException", "/ by zero", "fail (cell "),
    malformed="1 +",
    output='System.out.println("out"); new ProcessBuilder("echo", "child").inheritIO().start()'
    '.waitFor(); System.err.println("err");',
    forever='System.out.println("now");\nThread.sleep(3_600_000);',
    started='System.out.println("now");\n',
    loops=(
        "while (true) {}",
        "new Object() { synchronized void hang() throws Exception { wait(); } }.hang();",
        "while (true) { try { Thread.sleep(9_999); } catch (InterruptedException error) {} }",
    ),
    much=lambda size: (
        f'for (int n = 0; n < {size // 1000}; n++) System.out.println("x".repeat(999));'
    ),
    descriptors='new ProcessBuilder("ls", "-l", "/proc/self/fd").inheritIO().start().waitFor();',
    random="System.out.println(Math.random());",
    waits='System.out.println("now");\n'
    'while (!Files.exists(Path.of("/tmp/go"))) Thread.sleep(50);\n'
    'System.out.println("gone on");',
    read='System.out.println(System.in.read() < 0 ? "end" : "more");',
    die="System.exit(3);",
    values=(
        ("6 * 7", 42),
        ('Arrays.asList(1, 2.5, "a", null, Map.of("a", true))', VALUE),
        ("new long[] {1, 2}", [1, 2]),
        ("int a = 1; a + 1", 2),
        ('String late = "late";\nlate', "late"),
        ("null", None),
    ),
    foreign=("new Object()", "0.0 / 0", "'a'", "Set.of(1)", "List.of('a')", '"\\ud800"'),
    silent=("int b = 1;", "void f() {}", "// nothing", "import java.time.*;", "f();"),
    long='"x".repeat(300_000)',
    reseeds="java.math",
)

TOOLS = ("fold", "head", "ls", "sleep", "tr")

DASH = replace(
    SHELL,
    reseeds="",
    random="",
    programs=(("sh", "dash"), *((name, name) for name in TOOLS)),
)

DIALECTS = {
    "dash": DASH,
    "java": JAVA,
    "node": NODE,
    "perl": PERL,
    "python": PYTHON,
    "shell": SHELL,
}


def missing(dialect: Dialect) -> str | None:
    """Return the program that this host lacks for a dialect."""
    program = dialect.needs or dialect.command[0]
    return None if shutil.which(program) else program
