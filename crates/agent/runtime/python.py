"""Evaluate Python in one namespace that lives as long as the guest.

The agent starts this file once, while the guest is warmed up, with one end of
a socket pair as a file descriptor, and speaks `protocol/runtime/CONTRACT.md` over it.

Standard output and error are not ours: they are pipes that the agent reads, so
the output of C extensions and of child processes is captured like `print`'s.

Everything happens in the main thread, because only it receives signals; that is
how an evaluation is interrupted without losing the namespace.

After a fork every byte written to memory costs a page of its own, so the
paths that a child takes are rehearsed before the snapshot (`freeze`), and what was
allocated until then is hidden from the garbage collector.

Only the standard library, Python 3.8 and later.
"""

import _signal
import _thread
import ast
import gc
import json
import linecache
import os
import select
import signal
import struct
import sys
import traceback
import types

# The other half of this program is beside it, wherever the image has modules looked for.
HERE = __file__.rpartition("/")[0]
sys.path.insert(0, HERE)
writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
from _forkd_contexts import CONTEXTS_MAX, Context, Variables, folder_of  # noqa: E402 - found now
from _forkd_results import REPR_MAX, Results, as_json, cut, to_json  # noqa: E402 - found now

sys.path.remove(HERE)
sys.dont_write_bytecode = writes_bytecode

REQUEST, REPLY, ERROR, CONTROL, DATA = 1, 2, 3, 5, 32
SIGINT = int(signal.SIGINT)
NUMBERS = sorted(set(map(int, signal.valid_signals())) - {SIGINT})
HEADER = struct.Struct("<IB3x")

CELLS_MAX = 64
"""Cells that are kept; older ones are compiled anew, and show no source in tracebacks."""

REHEARSALS = 16
"""Runs of each path before the snapshot; the interpreter settles its bytecode within 8."""

COMPILE_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CO_COROUTINE = 0x80  # of code that awaits, as in `inspect`, which takes long to import

CELL_START = "<cell "
CELL_NAME = CELL_START + "%d>"

LANGUAGE = "Python " + sys.version.split()[0]
HELLO = to_json({"contract": 1, "language": LANGUAGE, "contexts": True, "env": True})

# The answer to `eval`, and what its parts are, as JSON text, until the code has said otherwise.
# Put together by hand: a value is encoded while it is measured, and twice is once too many.
EVAL_REPLY = (
    '{"has_value": %(has_value)s, "repr": %(repr)s, "value": %(value)s, '
    '"value_is_json": %(value_is_json)s, "error": %(error)s, "timed_out": %(timed_out)s}'
)
NOTHING_SAID = {
    "has_value": "false",
    "repr": "null",
    "value": "null",
    "value_is_json": "false",
    "error": "null",
    "timed_out": "false",
}


class Channel:
    """Frames over a file descriptor."""

    def __init__(self, fd):
        self._fd = fd
        self._buffer = b""
        self._writing = _thread.allocate_lock()

    def read(self):
        """Return the next (kind, payload), or None when the agent has gone."""
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            chunk = os.read(self._fd, self._wanted())
            if not chunk:
                return None
            self._buffer += chunk

    def take_interrupt(self):
        """Say whether the agent has asked for an interruption; its request is used up."""
        while select.select([self._fd], [], [], 0)[0]:
            chunk = os.read(self._fd, 4096)
            if not chunk:
                return False
            self._buffer += chunk
        asked = False
        while len(self._buffer) >= HEADER.size and HEADER.unpack_from(self._buffer)[1] == CONTROL:
            if self._take() is None:
                break
            asked = True
        return asked

    def write(self, kind, text):
        """Send JSON text as one frame."""
        payload = text.encode("utf-8", "replace")
        rest = HEADER.pack(len(payload), kind) + payload
        with self._writing:
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def _wanted(self):
        """How much to read: little for most requests, all of a long one."""
        if len(self._buffer) < HEADER.size:
            return 4096
        length, _ = HEADER.unpack_from(self._buffer)
        return HEADER.size + length - len(self._buffer)

    def _take(self):
        if len(self._buffer) < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._buffer)
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = self._buffer[HEADER.size : end]
        self._buffer = self._buffer[end:]
        return kind, payload


class Interruption:
    """SIGINT raises KeyboardInterrupt in the user's code, and nowhere else."""

    def __init__(self):
        self.armed = False
        self.fired = False
        self.cancel = None  # cancels what is awaited, unless raising is better: False
        self.install()

    def install(self):
        """Listen to SIGINT, whatever the user's code has made of it meanwhile."""
        # The C function, because the other looks the handler up in an enumeration first.
        if _signal.getsignal(SIGINT) != self._on_signal:
            signal.signal(SIGINT, self._on_signal)

    def _on_signal(self, _number, frame):
        if self.armed:
            self.fired = True
            if self.cancel is None or not self.cancel(frame):
                raise KeyboardInterrupt


class Handlers:
    """The user's signal handlers, which are put aside between two cells.

    One that raises there would end this process.  What comes meanwhile is sent again afterwards.
    """

    def __init__(self):
        self._aside = {}
        self._came = []

    def put_aside(self):
        """Replace every handler in Python but that of SIGINT."""
        while True:
            try:
                for number in NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler) and handler != self._note:
                        self._aside[number] = handler
                        _signal.signal(number, self._note)
            except BaseException:  # what a handler raises that was still in place
                continue
            else:
                return

    def give_back(self):
        """Undo it, and send again what came meanwhile.  What a handler raises goes on from here."""
        aside, came, self._aside, self._came = self._aside, self._came, {}, []
        for number, handler in aside.items():
            _signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)

    def _note(self, number, _frame):
        if number not in self._came:
            self._came.append(number)


class Awaiting:
    """The event loop of cells that await: made for the first of them, and kept."""

    def __init__(self, interruption):
        self._interruption = interruption
        self._loop = None

    def run(self, coroutine):
        """Run a cell to its end and return its value."""
        import asyncio  # noqa: PLC0415 - most guests never await

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        self._interruption.cancel = self._canceller(loop, task)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError as error:
            if not self._interruption.fired:
                raise
            raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
        finally:
            self._interruption.cancel = None
            self._finish(loop, task)

    def _finish(self, loop, task):
        """Let nothing of the cell go on in the next one, if something was raised in the loop."""
        if not task.done():
            self._loop = None  # left behind, with what does not let itself be cancelled
            task.cancel()
            loop.call_soon(loop.call_soon, loop.stop)
            loop.run_forever()
            if task.done():
                self._loop = loop
        if task.done() and not task.cancelled():
            task.exception()  # or the loop complains later of one that nobody looked at

    def _canceller(self, loop, task):
        asked = []

        def cancel(frame):
            """Cancel the task, once, unless code of a cell is what runs; that is interrupted."""
            while frame is not None and not frame.f_code.co_filename.startswith(CELL_START):
                frame = frame.f_back
            if asked or frame is not None:
                return False
            asked.append(loop.call_soon_threadsafe(task.cancel))
            return True

        return cancel


class Cells:
    """The last cells, compiled, with their source where tracebacks look for it.

    Code that is run again, as in a loop over a sandbox, is not compiled again: compiling is most
    of the work of a short cell, and much of the memory that it writes to.
    """

    def __init__(self):
        self._kept = {}
        self._count = 0

    def compiled(self, code):
        """Return the statements and the last expression of `code`, either perhaps None, and a name.

        Raises SyntaxError, or whatever else the compiler says.
        """
        found = self._kept.get(code)
        if found is None:
            found = self._compile(code)
            self._keep(code, found)
        return found

    def clear(self):
        """Forget all cells."""
        for _, _, name in self._kept.values():
            linecache.cache.pop(name, None)
        self._kept.clear()

    def _keep(self, code, found):
        # Without a modification time the cache believes us and never looks for a file.
        name = found[2]
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        self._kept[code] = found
        if len(self._kept) > CELLS_MAX:
            _, _, oldest = self._kept.pop(next(iter(self._kept)))
            linecache.cache.pop(oldest, None)

    def _compile(self, code):
        self._count += 1
        name = CELL_NAME % self._count
        try:
            # Most cells are one expression, and compiling it at once is the cheapest way.
            return None, compile(code, name, "eval", COMPILE_FLAGS, True), name
        except SyntaxError:
            tree = compile(code, name, "exec", COMPILE_FLAGS | ast.PyCF_ONLY_AST, True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compile(ast.Expression(tree.body.pop().value), name, "eval", COMPILE_FLAGS, True)
        return compile(tree, name, "exec", COMPILE_FLAGS, True), last, name


class Runtime:
    """The namespace, and the four things that can be done to it."""

    def __init__(self, channel):
        self._channel = channel
        self._interruption = Interruption()
        self._handlers = Handlers()
        self._awaiting = Awaiting(self._interruption)
        self._pid = os.getpid()
        self._cells = Cells()
        self._on_fork = []
        self._results = Results()
        self._results.install()
        self._main = self._current = Context()
        self._contexts = {}
        self._folder = folder_of(os.getcwd)
        self._operations = {
            "hello": lambda _: (REPLY, HELLO),
            "warm": self.warm,
            "freeze": self.freeze,
            "post_fork": self.post_fork,
            "eval": self.evaluate_as,
        }
        sys.modules["__main__"] = self._main.module
        sys.modules["forkd"] = self._guest_module()

    def serve(self):
        """Answer requests until the agent goes away."""
        while True:
            frame = self._channel.read()
            if frame is None:
                return
            kind, payload = frame
            # An interruption that came after its evaluation had ended is nobody's.
            if kind == DATA:
                self._answer(self.evaluate, payload.decode())
            elif kind == REQUEST:
                request = json.loads(payload)
                self._answer(self._operations.get(request["op"], self.refuse), request)

    def _answer(self, operation, request):
        kind, text = operation(request)
        flush()
        if os.getpid() != self._pid:
            # The code called os.fork() and both of it came back; only one may answer.
            os._exit(0)
        self._channel.write(kind, text)

    def evaluate(self, code):
        """Run one cell and describe its value."""
        said = dict(NOTHING_SAID)
        self._results.begin()
        error = self._guarded(lambda: self._describe(code, said))
        if error is not None:
            said = dict(NOTHING_SAID, error=to_json(error))
        if self._interruption.fired and self._channel.take_interrupt():
            said["timed_out"] = "true"
        return REPLY, self._results.added_to(EVAL_REPLY % said)

    def evaluate_as(self, request):
        """Run one cell with variables of its own, or in a context."""
        code, name = request["code"], request.get("context")
        with Variables(request.get("env", {})):
            return self.evaluate(code) if name is None else self._evaluate_in(name, code)

    def _evaluate_in(self, name, code):
        """Run one cell in a context, which is made by its first."""
        context = self._contexts.get(name)
        if context is None:
            if len(self._contexts) >= CONTEXTS_MAX:
                message = (
                    f"there are {CONTEXTS_MAX} contexts, and no more are possible: remove some"
                )
                refused = {"code": "invalid_request", "message": message, "field": "context"}
                return ERROR, to_json(refused)
            context = self._contexts[name] = Context(self._folder)
        self._current = context
        context.enter(self._main)
        try:
            return self.evaluate(code)
        finally:
            self._current = self._main
            self._main.enter(context)

    def refuse(self, request):
        """Refuse what only a later agent asks."""
        return refusal("protocol", f"this runtime does not know {request['op']}")

    def warm(self, request):
        """Run the image's warm-up."""
        error = self._guarded(lambda: self._run(request["code"]))
        return (REPLY, "{}") if error is None else refusal("warm_up_failed", error["traceback"])

    def freeze(self, _request):
        """Make this process cheap to fork."""
        for _ in range(REHEARSALS):
            self._cells.clear()
            self.evaluate("[0.0, 'rehearsal']")
            self.evaluate("_ = 0\n_")
            self.evaluate("1 / 0")
            # Nothing is lost: whatever state the generators have, each fork will reseed them.
            to_json({"reseeded": reseed(os.urandom(64)), "hook": json.loads('"none"')})
        self._current.namespace.pop("_", None)
        self._cells.clear()
        # A collection in a child would write to the header of every object that it visits, and so
        # copy every page.  What is frozen is never visited again.
        gc.collect()
        gc.freeze()
        return REPLY, "{}"

    def post_fork(self, request):
        """Take an identity of its own, unlike the siblings': reseed, then run the image's hook."""
        try:
            reseeded = reseed(bytes.fromhex(request["seed"]))
        except Exception:  # whatever numpy and the like may raise
            return refusal("reseed_failed", cut(traceback.format_exc()))
        code = request.get("code")
        for callback in self._on_fork:
            error = self._guarded(callback)
            if error is not None:
                return refusal("hook_failed", error["traceback"])
        if code is not None:
            error = self._guarded(lambda: self._run(code))
            if error is not None:
                return refusal("hook_failed", error["traceback"])
        hook = "none" if code is None and not self._on_fork else "ran"
        return REPLY, to_json({"reseeded": reseeded, "hook": hook})

    def _describe(self, code, said):
        try:
            value = self._run(code)
        except Exception:
            self._results.add_figures()  # those that were made until then
            raise
        if value is not None:
            said["repr"] = to_json(cut(repr(value), REPR_MAX))
            text = as_json(value)
            if text is not None:
                said["value"] = text
                said["value_is_json"] = "true"
            said["has_value"] = "true"
            self._results.add_value(value)
        self._results.add_figures()

    def _run(self, code):
        """Run `code` in the namespace; return the value of its last expression, or None."""
        statements, expression, _ = self._cells.compiled(code)
        if awaits(statements) or awaits(expression):
            return self._awaiting.run(self._run_in_loop(statements, expression))
        if statements is not None:
            exec(statements, self._current.namespace)
        return None if expression is None else eval(expression, self._current.namespace)

    async def _run_in_loop(self, statements, expression):
        """Run both parts of a cell in the loop, whichever of them awaits."""
        for code in (statements, expression):
            value = None if code is None else eval(code, self._current.namespace)
            if awaits(code):
                value = await value
        return value

    def _guarded(self, call):
        """Call, and return the exception that came out of it as data, or None."""
        self._interruption.fired = False
        self._interruption.install()
        try:
            try:
                self._interruption.armed = True
                self._handlers.give_back()
                call()
            finally:
                self._interruption.armed = False
                # Nothing of the user's runs between two jobs because of a signal.
                self._interruption.install()
                self._handlers.put_aside()
        except BaseException as error:  # SystemExit, too: exit() must not end the runtime
            return as_data(error)
        return None

    def _guest_module(self):
        """Return the module `forkd` as code inside the guest sees it."""
        module = types.ModuleType("forkd", "What code in a guest can ask of forkd.")

        def on_fork(callback):
            """Call `callback()` in each fork of this guest, before it answers anything."""
            if not callable(callback):
                raise TypeError("on_fork needs a callable")
            self._on_fork.append(callback)
            if os.getpid() == self._pid and len(self._on_fork) == 1:
                self._channel.write(CONTROL, '{"on_fork": true}')
            return callback

        def contexts():
            """Return the contexts of this runtime, and where code in each goes on."""
            return [{"id": name, "cwd": each.folder} for name, each in self._contexts.items()]

        def remove_context(name):
            """Forget a context with all its names; say whether there was one."""
            return self._contexts.pop(name, None) is not None

        module.on_fork = on_fork
        module.contexts = contexts
        module.remove_context = remove_context
        return module


def awaits(code):
    """Say whether evaluating `code`, which may be None, gives a coroutine that has yet to run."""
    return code is not None and code.co_flags & CO_COROUTINE


def refusal(code, message):
    """Return an ERROR."""
    return ERROR, to_json({"code": code, "message": message})


def reseed(seed):
    """Reseed every generator that is loaded; return their names.

    `secrets`, `os.urandom` and `uuid.uuid4` ask the kernel each time, and hashes
    hold no randomness.  PYTHONHASHSEED cannot be changed in a living interpreter; it defends
    against crafted keys, not against siblings.  Generators that the user's code made for itself
    (`random.Random()`, `numpy.random.default_rng()`) cannot be found from here: `forkd.on_fork` is
    for them.
    """
    names = []
    modules = sys.modules
    if "random" in modules:
        # An integer, because bytes are hashed first, and hashing is a library of its own to wake.
        modules["random"].seed(int.from_bytes(seed, "little"))
        names.append("python.random")
    if "numpy.random" in modules:
        words = [int.from_bytes(seed[at : at + 4], "little") for at in range(0, len(seed), 4)]
        modules["numpy.random"].seed(words)
        names.append("numpy.random")
    if "torch" in modules and hasattr(modules["torch"], "manual_seed"):
        modules["torch"].manual_seed(int.from_bytes(seed[:8], "little") >> 1)
        names.append("torch")
    if "_ssl" in modules:
        # OpenSSL notices a fork by its process id, which is the same in every sibling.
        modules["_ssl"].RAND_add(seed, float(len(seed)))
        names.append("openssl")
    if "tempfile" in modules:
        # Its generator of names also goes by the process id.
        modules["tempfile"]._name_sequence = None
        names.append("tempfile")
    if "uuid" in modules:
        # uuid1: libuuid, which is asked first, keeps its node and its sequence out of our reach, so
        # Python's own takes its place, with a random node (RFC 4122, 4.5) and no last instant.
        modules["uuid"]._generate_time_safe = None
        modules["uuid"]._node = int.from_bytes(os.urandom(6), "big") | 1 << 40
        modules["uuid"]._last_timestamp = None
        names.append("uuid")
    return names


def as_data(error):
    """Describe an exception, without our own frames in its traceback."""
    trace = error.__traceback__
    ours = (__file__, getattr(sys.modules.get("asyncio.base_events"), "__file__", None))
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        message = str(error)
    except BaseException:  # the exception's own methods may fail
        text = message = "an exception that cannot be described"
    return {"type": type(error).__qualname__, "message": cut(message), "traceback": cut(text)}


def flush():
    """Hand buffered output to the pipes; the code may have closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # whatever stands there now
            continue


def main():
    """Serve the descriptor named on the command line."""
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    sys.argv = [""]
    # Imports are looked for in the working directory, as in an interactive interpreter, and not
    # beside this file.
    sys.path[0] = ""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    Runtime(Channel(fd)).serve()


main()
