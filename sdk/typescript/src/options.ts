/** The options of forks and branches, and how they travel. */
import type { CallOptions, Progress } from "./http.js";
import type { Image } from "./image.js";
import type { Reach } from "./network.js";
import { checkedCount, members } from "./wire.js";

/** A time to live, in seconds; null: until it is killed; "default": the daemon's default. */
export type Ttl = number | "default" | null;

/** What a running sandbox may take of its host. */
export interface LimitOptions {
  /** Memory of the sandbox and its VMM, in MiB; no swap. */
  memoryLimitMib?: number;
  /** CPU time, in cores. */
  cpuLimit?: number;
  /** Share of CPU time beside other sandboxes; 100 if undefined. */
  cpuWeight?: number;
  /** Threads of its process on the host, not of its guest. */
  pidsLimit?: number;
  /** Disk bandwidth, each way, in MiB a second. */
  ioLimitMibS?: number;
  /** Disk operations, each way, in a second. */
  ioLimitOps?: number;
  /** Network bandwidth, each way, in millions of bits a second. */
  bandwidthLimitMbit?: number;
}

/** What each sandbox of one fork gets. */
export interface ForkOptions extends LimitOptions, CallOptions {
  /** Its private disk layer, in MiB; the host's limit if undefined. */
  diskLimitMib?: number;
  /** What it may reach. */
  network?: Reach;
  /** Whether it may reach nothing until that is changed. */
  holdEgress?: boolean;
  /** Names of secrets that it may use; the host puts them into its requests. */
  secrets?: readonly string[];
  /** Variables that every program in it gets, below the program's own. */
  env?: Readonly<Record<string, string>>;
  /** Names and values by which it can be found. */
  labels?: Readonly<Record<string, string>>;
  /** It is ended after this time. */
  ttlS?: Ttl;
  /** It is ended once nobody has used it for this time, in seconds; null: never. */
  idleTtlS?: number | null;
  /** Time it has until its agent has answered, in seconds. */
  deadlineS?: number;
  /** Wait for a snapshot that is being written (the default), instead of throwing `Conflict`. */
  wait?: boolean;
}

/** What one sandbox gets. */
export interface SandboxOptions extends ForkOptions {
  /** The snapshot to fork; else `FORKD_TAG`, else `pyagent`. */
  tag?: string;
  /**
   * Instead of a tag: an image of a registry, such as `python:3.12-slim`, a recipe of the daemon's
   * host, or an `Image`.  Its snapshot is made the first time, and kept for as long as there is
   * room.
   */
  image?: string | Image;
  /** Called with each step, if the image's snapshot has to be made. */
  onProgress?: (step: Progress) => unknown;
  /** What it can be found by, beside its id; no other live one may have it. */
  name?: string;
}

/** E2B's names for options of a sandbox. */
export interface E2bOptions {
  /** E2B's name for `tag`. */
  template?: string;
  /** E2B's name for `ttlS`, in milliseconds. */
  timeoutMs?: number;
  /** E2B's name for `labels`. */
  metadata?: Readonly<Record<string, string>>;
  /** E2B's name for `env`. */
  envs?: Readonly<Record<string, string>>;
  /** True is `network: "internet"`. */
  allowInternetAccess?: boolean;
}

/** How siblings of a running sandbox are made. */
export interface BranchOptions extends CallOptions {
  /** Each is ended after this time. */
  ttlS?: Ttl;
  /** Labels of each; those of the source if undefined. */
  labels?: Readonly<Record<string, string>>;
  /** What each may reach, as of a fork; what the source may if undefined. */
  network?: Reach;
  /** Whether each may reach nothing until it is promoted. */
  holdEgress?: boolean;
  /** Time each has until its agent has answered, in seconds. */
  deadlineS?: number;
}

/** How up to so many siblings are made, and the same instant is written down. */
export interface TryBranchOptions extends BranchOptions {
  /** Name of the snapshot; none if undefined. */
  tag?: string;
  /** Whether to return when the snapshot is ready (the default), or while it is being written. */
  wait?: boolean;
}

const LIMITS: Record<keyof LimitOptions, true> = {
  memoryLimitMib: true,
  cpuLimit: true,
  cpuWeight: true,
  pidsLimit: true,
  ioLimitMibS: true,
  ioLimitOps: true,
  bandwidthLimitMbit: true,
};

/** @internal */
export const LIMIT_OPTIONS: Record<keyof (LimitOptions & CallOptions), true> = {
  ...LIMITS,
  signal: true,
};

/** @internal */
export const FORK_OPTIONS: Record<keyof ForkOptions, true> = {
  ...LIMIT_OPTIONS,
  diskLimitMib: true,
  network: true,
  holdEgress: true,
  secrets: true,
  env: true,
  labels: true,
  ttlS: true,
  idleTtlS: true,
  deadlineS: true,
  wait: true,
};

/** @internal */
export const SANDBOX_OPTIONS: Record<keyof SandboxOptions, true> = {
  ...FORK_OPTIONS,
  tag: true,
  image: true,
  onProgress: true,
  name: true,
};

/** @internal */
export const E2B_OPTIONS: Record<keyof E2bOptions, true> = {
  template: true,
  timeoutMs: true,
  metadata: true,
  envs: true,
  allowInternetAccess: true,
};

/** @internal */
export const BRANCH_OPTIONS: Record<keyof BranchOptions, true> = {
  ttlS: true,
  labels: true,
  network: true,
  holdEgress: true,
  deadlineS: true,
  signal: true,
};

/** @internal */
export const TRY_BRANCH_OPTIONS: Record<keyof TryBranchOptions, true> = {
  ...BRANCH_OPTIONS,
  tag: true,
  wait: true,
};

/** Return the request for a fork. */
export function forkRequest(
  tag: string,
  n: number,
  options: ForkOptions & { name?: string },
  allOrNothing: boolean,
): Record<string, unknown> {
  const { signal: _, ...rest } = options;
  return { snapshot_tag: tag, ...members({ n: checkedCount(n), allOrNothing, ...rest }) };
}

/** Return the request for a branch. */
export function branchRequest(
  n: number,
  options: TryBranchOptions,
  allOrNothing: boolean,
): Record<string, unknown> {
  const { signal: _, ...rest } = options;
  return members({ n: checkedCount(n), allOrNothing, ...rest });
}
