"""What the SDK's methods return and take, by name.

Their members are the API's: members are added, never renamed or removed.
"""

from forkd.sdk._archive import Copied
from forkd.sdk._async.builds import AsyncBuilds
from forkd.sdk._async.collections import (
    AsyncImages,
    AsyncSandboxCollection,
    AsyncSnapshots,
)
from forkd.sdk._async.connection import AsyncConnection
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.network import AsyncNetwork
from forkd.sdk._async.ports import AsyncPort
from forkd.sdk._async.programs import AsyncCommands
from forkd.sdk._async.recipes import AsyncRecipes
from forkd.sdk._async.rights import AsyncTenants, AsyncTokens
from forkd.sdk._async.secrets import AsyncSecrets
from forkd.sdk._endpoint import Endpoint
from forkd.sdk._forwarding import AsyncForward, Forward
from forkd.sdk._results import (
    Branch,
    BuildResult,
    BuildStep,
    CodeContext,
    DiffInfo,
    EvalError,
    EvalResult,
    ExecResult,
    FileEntry,
    Logs,
    Output,
    OutputMessage,
    Result,
    TreeInfo,
)
from forkd.sdk._sharing import Pushed
from forkd.sdk._sync.builds import Builds
from forkd.sdk._sync.collections import Images, SandboxCollection, Snapshots
from forkd.sdk._sync.connection import Connection
from forkd.sdk._sync.files import Files
from forkd.sdk._sync.network import Network
from forkd.sdk._sync.ports import Port
from forkd.sdk._sync.programs import Commands
from forkd.sdk._sync.recipes import Recipes
from forkd.sdk._sync.rights import Tenants, Tokens
from forkd.sdk._sync.secrets import Secrets
from forkd.wire.v2 import (
    ExecExit,
    ForkTimes,
    HostInfo,
    ImageInfo,
    Pong,
    ProgressEvent,
    RecipeInfo,
    RemovedInfo,
    SandboxFailure,
    SandboxInfo,
    SnapshotCpuInfo,
    SnapshotGcInfo,
    SnapshotInfo,
    SnapshotInfoDetail,
    Version,
)
from forkd.wire.v2_builds import ImageConfigInfo
from forkd.wire.v2_events import EventInfo, UsageInfo
from forkd.wire.v2_files import ArchiveWritten, SkippedEntry
from forkd.wire.v2_images import CachedImageInfo, HostRecipe
from forkd.wire.v2_network import NetworkInfo, RefusedDestination, RefusedName
from forkd.wire.v2_packs import Unpacked, UnpackedLink
from forkd.wire.v2_rights import Amounts, Quotas, TenantInfo, TokenCreated, TokenInfo
from forkd.wire.v2_secrets import SecretInfo
from forkd.wire.v2_trees import FileChange, TreeLimits, TreeNode

__all__ = [
    "Amounts",
    "ArchiveWritten",
    "AsyncBuilds",
    "AsyncCommands",
    "AsyncConnection",
    "AsyncFiles",
    "AsyncForward",
    "AsyncImages",
    "AsyncNetwork",
    "AsyncPort",
    "AsyncRecipes",
    "AsyncSandboxCollection",
    "AsyncSecrets",
    "AsyncSnapshots",
    "AsyncTenants",
    "AsyncTokens",
    "Branch",
    "BuildResult",
    "BuildStep",
    "Builds",
    "CachedImageInfo",
    "CodeContext",
    "Commands",
    "Connection",
    "Copied",
    "DiffInfo",
    "Endpoint",
    "EvalError",
    "EvalResult",
    "EventInfo",
    "ExecExit",
    "ExecResult",
    "FileChange",
    "FileEntry",
    "Files",
    "ForkTimes",
    "Forward",
    "HostInfo",
    "HostRecipe",
    "ImageConfigInfo",
    "ImageInfo",
    "Images",
    "Logs",
    "Network",
    "NetworkInfo",
    "Output",
    "OutputMessage",
    "Pong",
    "Port",
    "ProgressEvent",
    "Pushed",
    "Quotas",
    "RecipeInfo",
    "Recipes",
    "RefusedDestination",
    "RefusedName",
    "RemovedInfo",
    "Result",
    "SandboxCollection",
    "SandboxFailure",
    "SandboxInfo",
    "SecretInfo",
    "Secrets",
    "SkippedEntry",
    "SnapshotCpuInfo",
    "SnapshotGcInfo",
    "SnapshotInfo",
    "SnapshotInfoDetail",
    "Snapshots",
    "TenantInfo",
    "Tenants",
    "TokenCreated",
    "TokenInfo",
    "Tokens",
    "TreeInfo",
    "TreeLimits",
    "TreeNode",
    "Unpacked",
    "UnpackedLink",
    "UsageInfo",
    "Version",
]
