"""Every limit that a request, a guest or a disk can run into, by name."""

from __future__ import annotations

FORK_COUNT_MAX = 10_000
"""Most children of one fork; the control protocol takes no more in one request."""

FORK_DEADLINE_S_MAX = 3_600.0
"""Longest that a child may take from its clone until its agent has answered."""

TTL_S_MIN = 0.1
"""Shortest life that a sandbox may be given."""

TTL_S_MAX = 365 * 24 * 3_600.0
"""Longest life that a sandbox may be given: a year; without one it has no end."""

TREE_LIVE_DEFAULT = 1_000
"""Most live descendants of one sandbox, unless the daemon is told otherwise."""

TREE_DEPTH_DEFAULT = 32
"""Most branches between a sandbox and its oldest ancestor, unless told otherwise."""

TREE_PRIVATE_MIB_DEFAULT = 16 * 1_024
"""Most memory that the sandboxes of one tree may hold, not shared, unless told otherwise."""

DIFF_ENTRIES_MAX = 1_000_000
"""Most files of one sandbox that a comparison looks at."""

DIFF_CHANGES_MAX = 10_000
"""Most differences that a comparison answers; it counts the others."""

MEMORY_LIMIT_MIB_MIN = 32
"""Least memory limit of a sandbox: below it the VMM itself does not start."""

MEMORY_LIMIT_MIB_MAX = 1 << 20
"""Greatest memory limit of a sandbox, 1 TiB: the largest guest the VMM boots."""

DISK_LIMIT_MIB_MAX = 1 << 24
"""Greatest size of a sandbox's private disk layer, 16 TiB: the limit of ext4 with 4 KiB blocks."""

CPU_LIMIT_MAX = 1_024.0
"""Greatest CPU limit of a sandbox, in cores."""

PIDS_LIMIT_MIN = 8
"""Least number of threads that one VMM process needs, with room for its workers."""

PIDS_LIMIT_MAX = 4_096
"""Greatest number of threads of one VMM process."""

PIDS_LIMIT_DEFAULT = 64
"""Threads of one VMM process if none are asked for: 8 vCPUs and their devices fit many times."""

EXEC_ARGS_MAX = 4_096
"""Most arguments of one command."""

EXEC_BYTES_MAX = 512 * 1024
"""Most bytes of arguments and environment together; they travel in one frame."""

EXEC_TIMEOUT_S_MAX = 7 * 24 * 3_600.0
"""Longest timeout of a command or an evaluation: a week."""

TTY_CELLS_MAX = 4_096
"""Most rows, and most columns, of a terminal."""

STDIN_CHUNK_BYTES_MAX = 64 * 1024
"""Largest piece in which input is handed to the guest; longer input is cut into several."""

EVAL_CODE_BYTES_MAX = 512 * 1024
"""Longest code of one evaluation; it travels in one frame."""

EVAL_OUTPUT_BYTES_MAX = 1024 * 1024
"""Most bytes kept of an evaluation's stdout, and as many of its stderr; the rest is dropped."""

PATH_BYTES_MAX = 4_096
"""Longest path inside a guest: Linux's PATH_MAX."""

SANDBOXES_MAX = 20_000
"""Most sandboxes alive on one host: twice the largest fork."""

SNAPSHOTS_MAX = 10_000
"""Most snapshots in one store."""

CHAIN_DEPTH_MAX = 64
"""Most snapshots under one: each is a file to verify and a zygote to derive at a cold start."""

LINK_EXEC_TIMEOUT_S = 600.0
"""How long the command between two links of a chain may take if nothing is said of it."""

WRITING_WAIT_S = 600.0
"""How long a fork waits for a snapshot that is being written: as long as a write may take."""

EXITED_KEPT_MAX = 1_000
"""Most sandboxes remembered after they ended by themselves; the oldest are forgotten first."""
