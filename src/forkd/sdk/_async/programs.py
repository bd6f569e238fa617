"""Programs and code that run in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from forkd.sdk._async.evaluating import Evaluation
from forkd.sdk._async.life import AsyncLife
from forkd.sdk._async.ports import AsyncPort
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._async.running import Run
from forkd.sdk._forwarding import AsyncForward, listen
from forkd.sdk._requests import build, checked_port, explicit, program, shell
from forkd.sdk._results import judged
from forkd.wire import v2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from socket import socket

    from forkd.errors import ForkdError
    from forkd.sdk._requests import ExecOptions
    from forkd.sdk._results import CodeContext, EvalResult, ExecResult


class AsyncPrograms(AsyncLife):
    """The part of a sandbox that runs programs and code; `AsyncSandbox` has all of it.

    One rule about time holds for `run`, `exec` and `eval`.  Without `timeout_s` there is no limit
    but the sandbox's own life.  What exceeds its `timeout_s` is ended and raises `ExecTimeout`,
    whose `result` has the output so far; with `check=False` that result is returned instead.
    """

    timeout: float | None = None
    """Time limit of an `eval` that names none, in seconds; None for no limit."""

    @overload
    async def run(
        self,
        line: str,
        *,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        text: Literal[True] = True,
    ) -> ExecResult[str]: ...

    @overload
    async def run(
        self,
        line: str,
        *,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        text: Literal[False],
    ) -> ExecResult[bytes]: ...

    @explicit
    async def run(  # noqa: PLR0913 - how a program can be run
        self,
        line: str,
        *,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[Any], object] | None = None,
        on_stderr: Callable[[Any], object] | None = None,
        text: bool = True,
    ) -> ExecResult[Any]:
        """Have a shell run a line, such as `ls | wc -l`; wait for it, and return what it wrote.

        Args:
            line: What `/bin/sh -c` reads.
            check: True: also raise `CommandError` for an exit code other than 0.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Kill the program after this time; None: never.
            env: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
            stdin: The program's whole input.
            on_stdout: Called with each piece of output, as it comes.
            on_stderr: Called with each piece of error output, as it comes.
            text: True: output is text, and bytes that are not UTF-8 become U+FFFD.  False: it is
                bytes.

        Raises:
            ExecTimeout: Its time ran out.
            CommandError: It exited with another code than 0, and `check` is true.
            InvalidRequest: There is no such user or folder.
        """
        options: ExecOptions = {"env": env, "cwd": cwd, "user": user}
        program_run = Run(
            shell(line), options, timeout_s, stdin, on_stdout, on_stderr, check=check, text=text
        )
        return await program_run.to_the_end(self._http, self._path)

    @overload
    async def exec(
        self,
        args: Sequence[str] | str,
        *more: str,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        text: Literal[True] = True,
    ) -> ExecResult[str]: ...

    @overload
    async def exec(
        self,
        args: Sequence[str] | str,
        *more: str,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        text: Literal[False],
    ) -> ExecResult[bytes]: ...

    @explicit
    async def exec(  # noqa: PLR0913 - how a program can be run
        self,
        args: Sequence[str] | str,
        *more: str,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[Any], object] | None = None,
        on_stderr: Callable[[Any], object] | None = None,
        text: bool = True,
    ) -> ExecResult[Any]:
        """Run a program without a shell, wait for it, and return what it wrote.

        At most 8 MiB of each output are kept, see `truncated`; `on_stdout` gets all of it.  A
        program that the program leaves in the background lives on; its later output is dropped.

        Args:
            args: The program and its arguments, as `["ls", "-l"]` or as `"ls", "-l"`.
            more: Further arguments, if `args` is the program alone.
            check: True: also raise `CommandError` for an exit code other than 0.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Kill the program after this time; None: never.
            env: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
            stdin: The program's whole input.
            on_stdout: Called with each piece of output, as it comes.
            on_stderr: Called with each piece of error output, as it comes.
            text: True: output is text, and bytes that are not UTF-8 become U+FFFD.  False: it is
                bytes.

        Raises:
            ExecTimeout: Its time ran out.
            CommandError: It exited with another code than 0, and `check` is true.
            NotFound: There is no such program; `context["program"]` names it.
            InvalidRequest: There is no such user or folder.
            GuestError: The program cannot be executed.
        """
        options: ExecOptions = {"env": env, "cwd": cwd, "user": user}
        program_run = Run(
            program(args, more),
            options,
            timeout_s,
            stdin,
            on_stdout,
            on_stderr,
            check=check,
            text=text,
        )
        return await program_run.to_the_end(self._http, self._path)

    @explicit
    def exec_stream(  # noqa: PLR0913 - how a program can be run
        self,
        args: Sequence[str] | str,
        *more: str,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> AsyncProcess:
        """Return a program with its streams attached; iterating it, or entering it, starts it.

        Args:
            args: The program and its arguments, as `["ls", "-l"]` or as `"ls", "-l"`.
            more: Further arguments, if `args` is the program alone.
            stdin: Whether it will be written to; else its standard input is /dev/null.
            tty: Rows and columns of the terminal it gets; None for pipes.
            timeout_s: Kill the program after this time; None: never.
            env: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
        """
        size = None if tty is None else build(v2.TerminalSize, rows=tty[0], columns=tty[1])
        request = build(
            v2.ExecStart,
            args=program(args, more),
            stdin=stdin,
            tty=size,
            timeout_secs=timeout_s,
            env=env,
            cwd=cwd,
            user=user,
        )
        return AsyncProcess(self._http, f"{self._path}/exec/stream", request)

    @explicit
    def connect_port(self, port: int) -> AsyncPort:
        """Return a connection to the program that listens on a port; entering it connects.

        Args:
            port: A TCP port of the sandbox's loopback address, 1 to 65535.
        """
        return AsyncPort(self._http, f"{self._path}/ports/{checked_port(port)}")

    @explicit
    def forward(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        host_port: int = 0,
        listener: socket | None = None,
        on_error: Callable[[ForkdError], object] | None = None,
    ) -> AsyncForward:
        """Return a port of this host that goes to a program's; entering it listens.

        The program need not listen yet: each connection looks for it anew.

        Args:
            port: A TCP port of the sandbox's loopback address, 1 to 65535.
            host: The address to listen on: the default serves this host alone.
            host_port: The port to listen on; 0 for a free one, which is `port` of the result.
            listener: A socket that listens already, instead of `host` and `host_port`.
            on_error: Called with what refuses or breaks a connection, which is then reset.
        """
        return AsyncForward(
            self._http.endpoint,
            f"{self._path}/ports/{checked_port(port)}",
            port,
            lambda: listen(host, host_port) if listener is None else listener,
            on_error,
        )

    @explicit
    async def eval(  # noqa: PLR0913 - how code can be run
        self,
        code: str,
        *,
        runtime: str | None = None,
        context: str | CodeContext | None = None,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
    ) -> EvalResult:
        """Run code in the warm runtime, which keeps its names from one call to the next.

        An exception that the code raises is in the result; `check=True` or `result.check()`
        raises it.

        Args:
            code: Statements; a last expression is the value.
            runtime: Refuse the code if the warm runtime is another one, such as `node`; None:
                whatever it is.
            context: Where it runs, with names and a working directory of their own: what
                `create_code_context` returned, or a name, whose first use makes it.
            check: True: also raise `GuestError` for an exception in the code.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Interrupt the code after this time; None: never.
            env: Variables of the environment, for this code alone.
            on_stdout: Called with each piece of output, as it comes.
            on_stderr: Called with each piece of error output, as it comes.

        Raises:
            Conflict: There is no warm runtime, or none of this name, or it knows no `env`.
            ExecTimeout: Its time ran out; variables that it has set are kept.
            GuestError: It raised, and `check` is true.
        """
        limit_s = self.timeout if timeout_s is None else timeout_s
        evaluation = Evaluation(code, runtime, context, limit_s, env, on_stdout, on_stderr)
        result = await evaluation.to_the_end(self._http, self._path)
        return judged(result, check=check)


class AsyncCommands:
    """The programs of a sandbox, under the name that E2B and the reference's package have."""

    def __init__(self, programs: AsyncPrograms) -> None:
        self._programs = programs

    @explicit
    async def run(  # noqa: PLR0913 - E2B's
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        check: bool | None = None,
    ) -> ExecResult[str]:
        """Run a line of the shell, or a list without one, and return what it wrote.

        Args:
            cmd: A line for the shell; or a program and its arguments.
            timeout: Kill the program after this time, in seconds; None: never.
            envs: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
            stdin: The program's whole input.
            on_stdout: Called with each piece of output, as it comes.
            on_stderr: Called with each piece of error output, as it comes.
            check: True: also raise `CommandError` for an exit code other than 0, as E2B does.
                False: raise nothing, not even `ExecTimeout`.
        """
        words = shell(cmd) if isinstance(cmd, str) else program(cmd)
        return await self._programs.exec(
            words,
            timeout_s=timeout,
            env=envs,
            cwd=cwd,
            user=user,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            check=check,
        )
