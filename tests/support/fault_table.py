"""Which calls can fail, and how: functions of the interpreter, after the manual pages.

Errors are those that a healthy forkd on a healthy kernel can meet.  Those that would say something
untrue (that a process is gone which lives, that nobody listens where somebody does) are left out:
`fault_processes` makes them true instead.  EINTR is not among them, since the interpreter
repeats what a signal interrupts (PEP 475).
"""

from __future__ import annotations

from errno import (
    EADDRINUSE,
    EAGAIN,
    ECONNRESET,
    EIO,
    EMFILE,
    ENOBUFS,
    ENOLCK,
    ENOMEM,
    ENOSPC,
    EOPNOTSUPP,
    EPERM,
    EROFS,
)

MODULES = frozenset(
    (
        "posix", "_posixsubprocess", "fcntl", "resource", "select", "_signal", "_socket", "_thread",
        "_io", "io", "_sqlite3", "sqlite3", "_ctypes", "mmap",
    )
)  # fmt: skip
"""Where functions that ask the kernel are."""

ERRORS: dict[str, tuple[int, ...]] = {
    # Descriptors
    "io.open": (EMFILE, EIO, ENOSPC),
    "posix.open": (EMFILE, EIO, ENOSPC),
    "posix.pipe": (EMFILE,),
    "posix.pipe2": (EMFILE,),
    "posix.eventfd": (EMFILE, ENOMEM),
    "posix.pidfd_open": (EMFILE, ENOMEM),
    "socket.socket": (EMFILE, ENOBUFS),
    "select.epoll": (EMFILE,),
    "select.epoll.register": (ENOSPC, ENOMEM),
    "select.epoll.modify": (ENOMEM,),
    # Folders and names
    "posix.listdir": (EMFILE, EIO),
    "posix.scandir": (EMFILE, EIO),
    "posix.mkdir": (ENOSPC, EIO),
    "posix.rmdir": (EIO, ENOMEM),
    "posix.link": (ENOSPC, EIO),
    "posix.symlink": (ENOSPC, EIO),
    "posix.readlink": (EIO, ENOMEM),
    "posix.rename": (ENOSPC, EIO),
    "posix.unlink": (EIO, ENOMEM),
    "posix.stat": (EIO, ENOMEM),
    "posix.lstat": (EIO, ENOMEM),
    "posix.DirEntry.stat": (EIO, ENOMEM),
    "posix.statvfs": (EIO, ENOMEM),
    "posix.chmod": (EIO, EROFS),
    "posix.chown": (EIO, EROFS),
    "posix.lchown": (EIO, EROFS),
    "posix.utime": (EIO, EROFS),
    # Contents
    "posix.fstat": (EIO, ENOMEM),
    "posix.fchmod": (EIO, EROFS),
    "posix.fchown": (EIO, EROFS),
    "posix.fsync": (EIO, ENOSPC),
    "syncfs": (EIO, ENOSPC),
    "posix.posix_fallocate": (ENOSPC, EIO),
    "posix.truncate": (EIO, EROFS),
    "posix.ftruncate": (EIO, EROFS),
    "posix.sendfile": (EIO, ENOMEM),
    "posix.read": (EIO,),
    "posix.pread": (EIO,),
    "posix.write": (EIO, ENOSPC),
    "_io.BufferedReader.read": (EIO, ENOMEM),
    "_io.BufferedReader.readinto": (EIO,),
    "_io.BufferedRandom.read": (EIO,),
    "_io.TextIOWrapper.read": (EIO, ENOMEM),
    "_io._IOBase.readlines": (EIO,),
    "_io.FileIO.read": (EIO,),
    "_io.FileIO.readall": (EIO,),
    "_io.FileIO.write": (EIO, ENOSPC),
    "_io.BufferedWriter.write": (EIO, ENOSPC),
    "_io.BufferedWriter.flush": (EIO, ENOSPC),
    "_io.TextIOWrapper.write": (EIO, ENOSPC),
    "fcntl.flock": (ENOLCK,),
    "fcntl.ioctl": (EOPNOTSUPP, ENOSPC),
    # Processes and threads
    "_posixsubprocess.fork_exec": (EAGAIN, ENOMEM),
    "_thread.start_new_thread": (EAGAIN,),
    "_signal.pidfd_send_signal": (EPERM,),
    "posix.sched_getscheduler": (EPERM,),
    "posix.sched_setscheduler": (EPERM,),
    "posix.kill": (EPERM,),
    "posix.killpg": (EPERM,),
    "resource.setrlimit": (EPERM,),
    # Sockets
    "_socket.socket.connect": (EAGAIN, ENOMEM),
    "_socket.socket.bind": (ENOMEM,),
    "_socket.socket.listen": (EADDRINUSE,),
    "_socket.socket.send": (ENOBUFS,),
    "_socket.socket.sendmsg": (ENOBUFS,),
    "_socket.socket.recv": (ECONNRESET, ENOMEM),
    "_socket.if_nameindex": (ENOBUFS,),
    # The database
    "_sqlite3.connect": (EIO,),
    "sqlite3.Connection.execute": (EIO, ENOSPC),
    "sqlite3.Connection.executemany": (EIO, ENOSPC),
    "sqlite3.Connection.executescript": (EIO, ENOSPC),
    "sqlite3.Cursor.fetchone": (EIO,),
    "sqlite3.Cursor.fetchall": (EIO,),
}
"""What each function can give.  Of several errors that mean the same, one."""

AFTERWARDS: dict[str, tuple[int, ...]] = {"_io._IOBase.__exit__": (EIO, ENOSPC)}
"""Functions that do what they are to do and then may say that not all of it worked: a file that is
closed writes what it still has."""

SAFE = (
    # They ask about this process, or nobody.
    "posix.fspath", "posix._path_normpath", "posix.getpid", "posix.gete", "posix.getcwd",
    "posix.sysconf", "posix.cpu_count", "posix.sched_getaffinity", "posix.uname", "posix.umask",
    "posix.waitstatus_to_exitcode", "posix.WIF", "posix.WE", "posix.fsencode", "posix.putenv",
    "posix.strerror", "posix.minor", "posix.major", "posix.get_", "posix.isatty", "posix.getppid",
    "resource.getrlimit", "io.text_encoding", "_ctypes.", "_signal.get", "_signal.set_wakeup_fd",
    "_signal.signal", "_signal.siginterrupt", "_signal.default_int_handler",
    # They wait, or hold, and nothing that they use up is the kernel's.
    "_thread.lock", "_thread.RLock", "_thread.allocate_lock", "_thread.get_", "_thread._set",
    "_thread._local", "_thread._", "posix.urandom", "select.epoll.poll", "select.poll",
    "posix.eventfd_write", "posix.lseek", "_io.BufferedReader.seek", "_io.BufferedRandom.seek",
    "_io.BufferedReader.tell",
    # A descriptor is gone, and a watch over, whatever they say.
    "posix.close", "select.epoll.close", "select.epoll.unregister", "_socket.socket.close",
    "_socket.socket.detach", "_socket.close", "_io.BufferedReader.close", "_io.FileIO.close",
    "posix.ScandirIterator", "_socket.socket.shutdown", "sqlite3.Connection.close",
    "sqlite3.Cursor.close",
    # They ask about, or set, what is in memory.
    "_socket.socket.fileno", "_socket.socket.setblocking", "_socket.socket.gettimeout",
    "_socket.socket.settimeout", "_socket.socket.getsock", "_socket.socket.getpeername",
    "_socket.socket.setsockopt", "posix.set_blocking", "posix.get_blocking",
    "posix.set_inheritable", "posix.DirEntry.is_", "posix.DirEntry.__fspath__",
    "_io.BufferedReader.fileno", "_io.BufferedReader.readable", "_io.BufferedWriter.fileno",
    "_io.BufferedWriter.writable", "_io.BufferedRandom.fileno", "_io.FileIO.fileno",
    "_io.FileIO.seekable", "_io.FileIO.readable", "_io.FileIO.writable", "_io.TextIOWrapper.fileno",
    "_io.BytesIO", "_io.StringIO", "_io._IOBase.__enter__", "_io._IOBase.__del__", "fcntl.fcntl",
    # They read our own program.
    "io.open_code",
    # They say no, and raise nothing.
    "posix.access",
    # What they say of a process is what is true of it.
    "posix.waitid", "posix.waitpid", "posix.wait",
)  # fmt: skip
"""How the names begin of those that cannot fail, or whose failure means nothing; by reason."""
