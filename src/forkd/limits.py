"""Every limit and default of a request, a guest, a store or a client, by name and once.

The REST API's types, the model and the engine all take them from here; clients may rely on them.
What one package alone knows (a timeout, a queue's length) is declared where it is used.  Those of
the protocols and of packs are in `crates/proto/src/limits.rs` and `forkd.packs.limits`.
"""

from __future__ import annotations

# Sandboxes

FORK_COUNT_MAX = 10_000
"""Most children of one fork; the control protocol takes no more in one request."""

FORK_DEADLINE_S_DEFAULT = 60.0
"""Time a child has, from its clone until its agent has answered, when the caller names none."""

FORK_DEADLINE_S_MIN = 0.1
"""Shortest such time that may be asked for."""

FORK_DEADLINE_S_MAX = 3_600.0
"""Longest that a child may take from its clone until its agent has answered."""

TTL_S_MIN = 0.1
"""Shortest life that a sandbox may be given."""

TTL_S_MAX = 365 * 24 * 3_600.0
"""Longest life that a sandbox may be given: a year; without one it has no end."""

SANDBOXES_MAX = 20_000
"""Most sandboxes alive on one host: twice the largest fork."""

UIDS_MIN = 65_536
"""Least users of a range for jailed processes: half for forks of snapshots, half for siblings, and
a part of both for each zygote."""

UIDS_DEFAULT = "1879048192:262144000"
"""Users for jailed processes: above all that systemd gives to containers (524288 to 1879048191)."""

BUILDS_MAX = 4
"""Most images that are built, or found built, at the same time."""

BUILD_UIDS = 65_536
"""Users of each build, as its root file system's files have them: all that 16 bits can name."""

BUILD_UIDS_DEFAULT = "2141192192:262400"
"""Users of builds and packs: those that follow on the ones of machines, for as many as may be."""

BUILD_PIDS_MAX = 4_096
"""Most processes and threads of one build: some compilers start dozens for each processor."""

BUILD_MEMORY_BYTES_MAX = 8 << 30
"""Most memory of one build, what it keeps in `/tmp` included; its files on disk do not count."""

BUILD_MEMORY_BYTES_MIN = 1 << 30
"""Least memory that a build is given: one whose tenant may not have so much is refused."""

EXITED_KEPT_MAX = 1_000
"""Most sandboxes remembered after they ended by themselves; the oldest are forgotten first."""

SANDBOX_ID_PATTERN = r"^sb-[a-z2-7]{26}$"
"""Ids of sandboxes."""

SANDBOX_NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
"""Names that users give to sandboxes; what is an id of a sandbox is refused besides."""

LABELS_MAX = 64
"""Most labels of one sandbox, and most that a list is filtered by."""

LABEL_KEY_CHARS_MAX = 63
"""Longest key of a label."""

LABEL_VALUE_CHARS_MAX = 256
"""Longest value of a label."""

SANDBOX_ENV_BYTES_MAX = 64 * 1024
"""Most bytes of the environment that one sandbox keeps for its execs, names included."""

SANDBOX_TTL_S_DEFAULT = 300.0
"""How long a sandbox lives whose `ttl_secs` is `default`, unless the daemon is told otherwise."""

ID_CHARS_MAX = 64
"""Longest id of a sandbox that a client must be ready for."""

MEMORY_LIMIT_MIB_MIN = 32
"""Least memory limit of a sandbox: below it the VMM itself does not start."""

MEMORY_LIMIT_MIB_MAX = 1 << 20
"""Greatest memory limit of a sandbox, 1 TiB: the largest guest the VMM boots."""

DISK_LIMIT_MIB_MAX = 1 << 24
"""Greatest size of a sandbox's private disk layer, 16 TiB: the limit of ext4 with 4 KiB blocks."""

DISK_LIMIT_MIB_DEFAULT = 10_240
"""Disk blocks that a sandbox may have of its own if nobody says how many."""

DISK_RESERVE_MIB_DEFAULT = 1_024
"""What guests' writes leave free of the file system that holds them."""

MEMORY_RESERVE_MIB_DEFAULT = 256
"""Memory of the host that must be available before anything new is started."""

MEMORY_OVERCOMMIT_MAX = 10_000.0
"""Greatest multiple of the host's memory that guests may be promised."""

MEMORY_PRESSURE_MAX_DEFAULT = 20.0
"""Memory pressure (PSI, `full avg10`) above which new work is refused, in percent."""

CPU_LIMIT_MAX = 1_024.0
"""Greatest CPU limit of a sandbox, in cores."""

CPU_WEIGHT_MIN = 1
"""Least weight that the kernel's scheduler knows."""

CPU_WEIGHT_MAX = 10_000
"""Greatest such weight."""

CPU_WEIGHT_DEFAULT = 100
"""What every group has that is given none, by the kernel's choice."""

IO_LIMIT_MIB_S_MIN = 1
"""Least that a sandbox may read, and write, of its disk in a second."""

IO_LIMIT_MIB_S_MAX = 1 << 20
"""Greatest such limit, 1 TiB/s: no disk has as much."""

IO_LIMIT_OPS_MIN = 100
"""Least operations in a second, each way: what was written and waits, 4 MiB at most in pages of
4 KiB, is on the disk ten seconds later."""

IO_LIMIT_OPS_MAX = 100_000_000
"""Greatest such limit: no disk does as many."""

PIDS_LIMIT_MIN = 8
"""Least number of threads that one VMM process needs, with room for its workers."""

PIDS_LIMIT_MAX = 4_096
"""Greatest number of threads of one VMM process."""

PIDS_LIMIT_DEFAULT = 64
"""Threads of one VMM process if none are asked for: 32 vCPUs and their devices fit."""

BANDWIDTH_LIMIT_MBIT_MIN = 1
"""Least bandwidth that a sandbox may be given, in millions of bits a second."""

BANDWIDTH_LIMIT_MBIT_MAX = 100_000
"""Greatest such bandwidth; a tap has less."""

VMM_MEMORY_MIB = 64
"""Memory of a VMM process beside its guest's, which a sandbox may have if no limit is asked for."""

VMM_MEMORY_SHARE = 64
"""What part of its guest's memory a VMM process may have besides, for page tables: two levels of
them, of 8 bytes a page of 4 KiB each, are the 256th part."""

VMM_MEMORY_USED_MIB = 24
"""What a VMM process needs of a limit that is less than its guest's memory; the rest is the
guest's."""

VMM_CPUS = 1.0
"""CPU time in cores that a VMM process may have beside its vCPUs, if no limit is asked for."""

# At once, on one host

ZYGOTES_DEFAULT = 128
"""Most zygotes at once, each with the memory of a snapshot, unless the daemon is told otherwise."""

ZYGOTES_MIN = 65
"""Least number of zygotes that a daemon may be told: the longest chain has one for each link."""

EXECS_MAX = 1_000
"""Most execs at once, attached ones included: each of a thousand children may run one."""

EVALS_MAX = 1_000
"""Most evals at once, as with execs."""

PORT_CONNECTIONS_MAX = 1_000
"""Most connections at once to programs that listen in sandboxes, on one host."""

PORT_CONNECTIONS_PER_SANDBOX_MAX = 256
"""Most of them in one sandbox: half of what its agent serves, so that programs can be run."""

PORT_MAX = 65_535
"""Greatest port of TCP."""

FORWARDS_MAX = 64
"""Most ports that one command forwards."""

LOG_FOLLOWERS_MAX = 256
"""Most clients that follow consoles at once; each has a file read four times a second."""

BAKES_MAX = 32
"""Most bakes at once, those included that wait for an image or a machine."""

BAKED_MACHINES_MAX = 4
"""Most machines that are booted and warmed up at once; a bake that finds as many waits."""

DIFFS_MAX = 4
"""Most comparisons at once; each makes two machines and a process with a gigabyte."""

PACKS_MAX = 4
"""Most packs that are written, or read, at once; each is a process that compresses all it can."""

SHORT_RETRY_S = 1
"""When to try again what takes moments and found every place taken."""

LONG_RETRY_S = 10
"""When to try again what takes minutes and found every place taken."""

# Tenants

NAME_CHARS_MAX = 64
"""Longest name of a tenant or a token."""

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names of tenants and tokens."""

TOKEN_LIFE_S_MAX = 10 * 365 * 24 * 3_600
"""Longest life of a token that expires: ten years."""

QUOTA_MAX = 1 << 40
"""Greatest quota of a tenant: more than any host has of anything."""

TOKENS_MAX = 10_000
"""Most tokens of one host."""

TENANTS_MAX = 10_000
"""Most tenants of one host that have quotas."""

EVENTS_KEPT_MAX = 100_000
"""Most events that are kept; whoever asks for an earlier one is told that there is a gap."""

EVENT_ID_MAX = (1 << 63) - 1
"""Greatest id of an event: what SQLite, and JSON readers elsewhere, can hold."""

EVENTS_KEPT_S = 24 * 3_600.0
"""How long events are kept."""

# Trees of sandboxes

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

# Snapshots

TAG_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
"""Names of snapshots.  A tag is a folder's name in the store; `..` is refused besides."""

SNAPSHOTS_MAX = 10_000
"""Most snapshots in one store."""

CHAIN_DEPTH_MAX = 64
"""Most snapshots under one: each is a file to verify and a zygote to derive at a cold start."""

WRITING_WAIT_S = 600.0
"""How long a fork waits for a snapshot that is being written: as long as a write may take."""

LINK_EXEC_CHARS_MAX = 128 * 1024
"""Command between two links of a chain; one argument of a program is no longer."""

LINK_EXEC_TIMEOUT_S_DEFAULT = 600.0
"""How long the command between two links of a chain may take if nothing is said of it."""

TRUSTED_CHARS_MAX = 64 * 65
"""The keys that one request to unpack trusts: 64 of them, each 64 hex digits and a comma."""

# Machines that are baked, and the recipes that say how

VCPUS_MAX = 32
"""Most virtual CPUs of a machine."""

MEMORY_MIB_MIN = 128
"""Least memory of a machine: a stock kernel and its initramfs do not fit in less."""

MEMORY_MIB_MAX = 1 << 20
"""Most memory of a machine, 1 TiB."""

MEMORY_MIB_STEP = 2
"""Memory comes in huge pages of 2 MiB."""

DISK_MIB_MIN = 16
"""Smallest disk: an ext4 file system of this size still holds a small image."""

DISK_MIB_MAX = 1 << 24
"""Largest disk, 16 TiB: the limit of ext4 with 4 KiB blocks."""

RUN_LINES_MAX = 256
"""Most shell lines that one bake runs before it freezes the machine."""

RUN_LINE_CHARS_MAX = 32 * 1024
"""Longest of these lines; at four bytes a character it is one argument of a program."""

RUN_LINE_TIMEOUT_S = 3_600.0
"""Time limit of each of these lines."""

RECIPE_NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names of recipes.  A recipe that is named by a request is in a folder of that name."""

RECIPE_BASES_MAX = 1
"""Most recipes below one another under a recipe: a base has no base itself."""

RECIPE_UPLOAD_BYTES_MAX = 2 * 1024 * 1024 * 1024
"""Archive of one uploaded recipe: an image of a recipe's own fits in it."""

RECIPE_ENTRIES_MAX = 10_000
"""Files, folders and links in the archive of one uploaded recipe."""

RECIPE_PATH_BYTES_MAX = 255
"""Path of a file in the archive of an uploaded recipe, which the header of a plain tar holds."""

RECIPES_UPLOADED_MAX = 10_000
"""Most uploaded recipes that one host keeps."""

IMAGE_CACHE_MIB_DEFAULT = 20_480
"""What the image cache may take if the operator says nothing: some forty images of half a GiB, each
as root file system and as snapshot."""

IMAGE_CACHE_MIB_MAX = 1 << 30
"""Greatest such size, 1 PiB."""

IMAGE_KEY_PATTERN = r"^[0-9a-f]{32}$"
"""Keys of images."""

REGISTRY_NAME_CHARS_MAX = 255
"""Longest registry and repository together, by the registries' own specification."""

IMAGE_REFERENCE_CHARS_MAX = 512
"""Longest reference to an image of a registry: name, tag and digest, each of the longest."""

ROOM_BYTES_MIN = 256 * 1024 * 1024
"""Space that a pack or a recipe from elsewhere leaves free for the database and machines."""

# Builds of Dockerfiles

IMAGE_CONFIG_BYTES_MAX = 256 * 1024
"""Longest configuration of an image that a snapshot keeps, as JSON: variables, labels, program."""

BUILD_KEY_PATTERN = r"^[0-9a-f]{64}$"
"""Keys of steps of builds."""

# Programs and code in a guest

EXEC_ARGS_MAX = 4096
"""Arguments of one exec."""

EXEC_ARG_BYTES_MAX = 128 * 1024 - 1
"""One argument, or variable with its name; with its NUL it is Linux' MAX_ARG_STRLEN."""

EXEC_BYTES_MAX = 512 * 1024
"""Most bytes of arguments and environment together; they travel in one frame."""

EXEC_ENV_MAX = 1024
"""Variables of the environment that one exec may add."""

EXEC_USER_CHARS_MAX = 64
"""A user's name or `uid:gid`."""

EXEC_STDIN_CHARS_MAX = 512 * 1024
"""Input given in the body of a buffered exec; more than that is streamed."""

STDIN_CHUNK_BYTES_MAX = 64 * 1024
"""Largest piece in which input is handed to the guest; longer input is cut into several."""

EXEC_TIMEOUT_S_DEFAULT = 30.0
"""Time an exec or an eval has when the caller names none."""

EXEC_TIMEOUT_S_MAX = 7 * 24 * 3600.0
"""Longest time an exec or an eval may ask for."""

EXEC_OUTPUT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of each output kept by a buffered exec; the rest is drained, dropped and said to be."""

OUTPUTS_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of output that all buffered execs and evals together keep at once; the rest is dropped."""

TTY_CELLS_MAX = 4096
"""Rows or columns of a terminal."""

EVAL_CODE_BYTES_MAX = 512 * 1024
"""Code of one eval: it must fit one frame of the guest protocol, whatever JSON makes of it."""

RUNTIME_NAME_PATTERN = r"^[a-z][a-z0-9._-]{0,31}$"
"""Names of warm runtimes: one of forkd's, or a program of the image's that is called so."""

EVAL_CONTEXT_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
"""Names of contexts, in which code has names and a working directory of its own."""

EVAL_CONTEXTS_MAX = 64
"""Contexts of one warm runtime, beside that of the warm-up."""

EVAL_WAITING_MAX = 64
"""Most evals that wait for the one interpreter of a sandbox; one more is refused."""

EVAL_WAIT_S_MAX = 45.0
"""Longest time that an eval waits for its turn: less than clients allow beyond its own time."""

EVAL_RESULTS_MAX = 32
"""Results of one evaluation: its value, figures, and what it displays; more are counted."""

EVAL_FORMS_MAX = 16
"""Forms of one result of an evaluation, such as HTML and PNG."""

EVAL_RESULTS_BYTES_MAX = 655_360
"""Forms of all results of one evaluation, as JSON; a form that exceeds it is left out."""

EVAL_OUTPUT_BYTES_MAX = 1024 * 1024
"""Most bytes kept of an evaluation's stdout, and as many of its stderr; the rest is dropped."""

FILE_MODE_MAX = 0o7777
"""Greatest permissions of a file in a guest: all twelve bits."""

PATH_BYTES_MAX = 4096
"""A path, on the host or in a guest; Linux allows no longer one (PATH_MAX)."""

# The reference's protocol

REFERENCE_FORK_COUNT_MAX = 1_000
"""Most children of one fork over `/v1`, as in the reference."""

BOOT_WAIT_SECS_DEFAULT = 10
"""What a bake over `/v1` says by default of a wait that it does not need."""

BOOT_WAIT_SECS_MAX = 60
"""Most that it may say of it, as in the reference."""

# Requests

BODY_BYTES_MAX = 2 * 1024 * 1024
"""Body of a request, file contents aside: the guest's frame of 1 MiB, escaped as JSON."""

BODIES_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of the bodies of all requests together, files, packs and recipes aside."""

ANSWERS_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of answers to `GET` that one address has whole in memory while clients read them."""

LIST_LIMIT_MAX = 1_000
"""Most elements of one page of a list; without a `limit` the list is whole."""

CURSOR_CHARS_MAX = 1_024
"""Longest `after` of a list: more than any `Forkd-Next` has."""

IDEMPOTENCY_KEY_CHARS_MAX = 128
"""Longest `Idempotency-Key`."""

IDEMPOTENCY_KEYS_MAX = 10_000
"""Most requests of one tenant whose answers are kept by their key; the oldest are forgotten."""

IDEMPOTENCY_BYTES_MAX = 32 * 1024 * 1024
"""Bytes, compressed, of one tenant's answers that are kept by a key; the oldest are forgotten."""

IDEMPOTENCY_KEPT_S = 24 * 3_600.0
"""How long the answer to a request with an `Idempotency-Key` is kept."""

IDEMPOTENT_AT_ONCE_MAX = 1_000
"""Most requests with an `Idempotency-Key` that are being done at once."""

MESSAGE_BYTES_MAX = 1024 * 1024 + 1
"""One WebSocket message: a kind and the payload of one frame of the guest protocol."""

# Network policies

NETWORK_RULES_MAX = 512
"""Most rules of one sandbox's network policy."""

NETWORK_NAMES_MAX = 256
"""Most names of one sandbox's network policy."""

NETWORK_PORTS_MAX = 16
"""Most ports or ranges of ports in one rule of a network policy."""

REFUSED_NAMES_MAX = 256
"""Most names that are listed of those that a sandbox asked for and did not get."""

RESOLVER_QUESTIONS_MAX = 256
"""Most questions that the resolver asks upstream at once, for all sandboxes; a tenant has half of
what others leave, and more wait."""

RESOLVER_QUESTIONS_PER_SANDBOX_MAX = 16
"""Most questions of one sandbox that the resolver asks upstream at once; more wait."""

RESOLVER_WAITING_MAX = 16_384
"""Most questions that are asked upstream or wait for that, for all sandboxes; a tenant has half of
what others leave."""

RESOLVER_WAITING_PER_SANDBOX_MAX = 512
"""Most questions of one sandbox that are asked upstream or wait for that; more fail."""

RESOLVER_CACHED_MAX = 4_096
"""Most answers that the resolver keeps; a tenant has half of what others leave."""

RESOLVER_QUESTIONS_PER_S_MAX = 100
"""Most questions of one sandbox in a second, over time; more are dropped, and wait over TCP."""

RESOLVER_QUESTIONS_BURST_MAX = 1_000
"""Most questions of one sandbox at once, after it asked nothing for a while."""

NETWORK_CONNECTIONS_MAX = 4_096
"""Most connections that one sandbox has open through the host at once, questions for names
included; more are refused."""

NETWORK_SLOTS_DEFAULT = 128
"""Network slots that are kept ready unless settings say otherwise: enough for a fork of 100."""

NETWORK_SLOTS_MAX = 1_024
"""Most that settings may say: each is a tap of the host, and all go when the daemon stops."""

# Secrets

SECRETS_PER_TENANT_MAX = 256
"""Most secrets of one tenant."""

SECRET_HOSTS_MAX = 16
"""Most hosts of one secret."""

SECRET_VALUE_BYTES_MIN = 8
"""Shortest value of a secret: in answers it is masked, and a shorter one stands there by chance."""

SECRET_VALUE_BYTES_MAX = 8_192
"""Longest value of a secret: servers take no longer headers."""

SECRET_HEADER_CHARS_MAX = 64
"""Longest name of the header that a secret is put into."""

SECRET_ENV_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"  # noqa: S105 - a pattern of names
"""Names of the environment variables that hold placeholders in guests."""

SECRETS_PER_SANDBOX_MAX = 16
"""Most secrets that one sandbox uses."""

PROXY_CONNECTIONS_PER_SANDBOX_MAX = 128
"""Most connections of one sandbox through the egress proxy at once; more are reset."""

PROXY_CONNECTIONS_MAX = 2_048
"""Most connections through the egress proxy at once, for all sandboxes; a tenant has half of what
others leave."""

PROXY_HEAD_BYTES_MAX = 64 * 1024
"""Longest head of a request or an answer that the egress proxy reads."""

# The MCP server

MCP_TTL_S_DEFAULT = 3_600.0
"""How long a sandbox lives that a tool forks or branches, unless the call says otherwise: an agent
forgets its sandboxes."""

MCP_OUTPUT_BYTES_MAX = 32 * 1024
"""How much of one output an answer has, half of it the head and half the tail; models read it all,
and pay for it."""

MCP_OUTPUT_FILE_BYTES_MAX = 1024 * 1024 * 1024
"""How much of one output is kept in a file of the sandbox."""

MCP_OUTPUT_FILES_MAX = 16
"""Most outputs that are kept in one sandbox; the oldest are removed."""

MCP_READ_BYTES_DEFAULT = 32 * 1024
"""How much of a file one call reads, unless it says otherwise."""

MCP_READ_BYTES_MAX = 512 * 1024
"""Most that one call reads of a file."""

MCP_PICTURE_BYTES_MAX = 4 * 1024 * 1024
"""Largest picture that an answer has as a picture; clients take few that are larger."""

MCP_RESOURCE_BYTES_MAX = 1024 * 1024
"""Longest file that is read as a resource, and how much of the end of a console is."""

MCP_WRITE_CHARS_MAX = 1024 * 1024
"""Longest contents that one call writes into a file."""

MCP_LISTED_MAX = 500
"""Most elements of a list that an answer has: files, sandboxes, snapshots, changes; it counts the
others."""

MCP_FORK_COUNT_MAX = 100
"""Most sandboxes that one call forks or branches: an answer describes each."""

MCP_WAIT_S_MAX = 3_600.0
"""Longest time for which a call waits for a text."""

MCP_MARKER_CHARS_MAX = 4_096
"""Longest text that a call waits for."""

MCP_CALLS_MAX = 256
"""Most calls of one client at once; more wait."""
