/**
 * The TypeScript SDK of forkd: fork(2) for virtual machines.
 *
 * ```ts
 * import { Sandbox } from "@forkd/sdk";
 *
 * await using sandbox = await Sandbox.create("numpy");
 * console.log((await sandbox.eval("numpy.zeros(5).sum()")).value);
 * ```
 */
export type { Copied } from "./archive.js";
export type { BuildOptions, Builds } from "./builds.js";
export { Client, type ClientOptions } from "./client.js";
export type {
  Images,
  LinkOptions,
  MachineOptions,
  ProgressOptions,
  QuotaChanges,
  QuotaOptions,
  Recipes,
  SandboxCollection,
  SandboxFilter,
  SecretOptions,
  Secrets,
  SnapshotOptions,
  Snapshots,
  Tenants,
  TokenScope,
  Tokens,
} from "./collections.js";
export type { Endpoint, EndpointOptions } from "./endpoint.js";
export * from "./errors.gen.js";
export { type ErrorContext, ForkdError } from "./errors.js";
export type { EvalOptions, RunCodeOptions } from "./evaluating.js";
export type { EventOptions } from "./events.js";
export type { Contents, FileEntry, Files } from "./files.js";
export type { CallOptions, Progress } from "./http.js";
export { Image, type Texts } from "./image.js";
export type { Network, NetworkChange, Reach } from "./network.js";
export type {
  BranchOptions,
  E2bOptions,
  ForkOptions,
  LimitOptions,
  SandboxOptions,
  TryBranchOptions,
  Ttl,
} from "./options.js";
export type { Forward, ForwardOptions, Port } from "./ports.js";
export type { ExecExit, Process } from "./process.js";
export type { Archive } from "./recipe-archive.js";
export type {
  BuildResult,
  BuildStep,
  CodeContext,
  EvalError,
  EvalResult,
  ExecResult,
  Json,
  Output,
  OutputMessage,
  Result,
} from "./results.js";
export type { ProgramOptions, RunOptions, StreamOptions } from "./running.js";
export {
  type Branch,
  type ClientOption,
  type Commands,
  Sandbox,
  type Sandboxes,
} from "./sandbox.js";
export type { Content } from "./transport.js";
export type { Info } from "./wire.js";
