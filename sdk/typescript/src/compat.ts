/**
 * The names of the reference's TypeScript package, `@deeplethe/forkd`, for programs written for it.
 *
 * It speaks the reference's protocol, which the daemon serves under `/v1`; answers have the names
 * of the wire.  New code uses `@forkd/sdk` itself.
 */
import { Buffer } from "node:buffer";
import { discover, type Endpoint } from "./endpoint.js";
import { Transport } from "./transport.js";
import { checkOptions } from "./wire.js";

const TIMEOUT_MS_DEFAULT = 60_000;

const EXEC_TIMEOUT_SECS_DEFAULT = 30;

/** Time the daemon has beyond a program's own timeout. */
const TIMEOUT_MARGIN_S = 10;

const ERROR_STATUS = 400;

const NOT_FOUND = 404;

/** A snapshot. */
export interface SnapshotInfo {
  tag: string;
  dir: string;
  created_at_unix: number;
  /** The source sandbox's id, of a branch. */
  branched_from?: string | null;
  /** How long the source was paused. */
  pause_ms?: number | null;
  [member: string]: unknown;
}

/** A sandbox. */
export interface SandboxInfo {
  id: string;
  snapshot_tag: string;
  netns: string | null;
  guest_addr: string;
  created_at_unix: number;
  pid: number | null;
  memory_limit_mib: number | null;
  [member: string]: unknown;
}

/** What a program wrote, and its exit code. */
export interface ExecResult {
  stdout: string;
  stderr: string;
  exit_code: number;
}

/** What code gave: the `repr` of its last expression. */
export interface EvalResult {
  result: unknown;
  error: string | null;
  exit_code: number;
}

/** What the agent in the guest says. */
export type PingResult = Record<string, unknown>;

/** How a branch is written down. */
export interface BranchOptions {
  tag?: string;
  mode?: "full" | "diff" | "live";
  diff?: boolean;
  measure_diff?: boolean;
  /** May be false only if `mode` is "live". */
  wait?: boolean;
}

/** What is forked.  The last three options have no effect. */
export interface SpawnOptions {
  snapshotTag: string;
  n?: number;
  /** Whether each has a network. */
  perChildNetns?: boolean;
  memoryLimitMib?: number;
  prewarm?: boolean;
  liveFork?: boolean;
  hugepages?: boolean;
}

/** Where the daemon is. */
export interface ControllerOptions {
  /** Where it is; without one it is found as `Client` finds it. */
  baseUrl?: string;
  /** Its bearer token, over TCP. */
  token?: string;
  /** Time that an answer may take; programs have their own besides. */
  timeoutMs?: number;
  /** What makes requests instead, over TCP. */
  fetch?: typeof fetch;
}

const CONTROLLER_OPTIONS: Record<keyof ControllerOptions, true> = {
  baseUrl: true,
  token: true,
  timeoutMs: true,
  fetch: true,
};

const SPAWN_OPTIONS: Record<keyof SpawnOptions, true> = {
  snapshotTag: true,
  n: true,
  perChildNetns: true,
  memoryLimitMib: true,
  prewarm: true,
  liveFork: true,
  hugepages: true,
};

/** The daemon refused. */
export class ControllerError extends Error {
  /** The HTTP status. */
  readonly status: number;
  /** What it answered: an object with `error`, or text. */
  readonly body: unknown;
  /** What was asked. */
  readonly url: string;

  constructor(status: number, body: unknown, url: string) {
    super(`${url}: HTTP ${status}: ${typeof body === "string" ? body : JSON.stringify(body)}`);
    this.name = "ControllerError";
    this.status = status;
    this.body = body;
    this.url = url;
  }
}

/** A daemon's snapshots and sandboxes. */
export class Controller {
  readonly baseUrl: string;
  readonly timeoutMs: number;
  readonly #endpoint: Endpoint;
  readonly #transport: Transport;
  readonly #fetch: typeof fetch | undefined;

  constructor(options: ControllerOptions = {}) {
    checkOptions("Controller", options, CONTROLLER_OPTIONS);
    const { baseUrl: url, token, timeoutMs = TIMEOUT_MS_DEFAULT } = options;
    this.#endpoint = discover({ url, token });
    this.#transport = new Transport(this.#endpoint);
    this.#fetch = options.fetch;
    this.baseUrl = this.#endpoint.url.replace(/\/+$/, "");
    this.timeoutMs = timeoutMs;
  }

  /** Return every snapshot. */
  async listSnapshots(): Promise<SnapshotInfo[]> {
    return (await this.#ask("GET", "/snapshots")) as SnapshotInfo[];
  }

  /** Remove a snapshot. */
  async deleteSnapshot(tag: string): Promise<void> {
    await this.#ask("DELETE", `/snapshots/${encodeURIComponent(tag)}`);
  }

  /** Fork `n` sandboxes: all of them, or an error and none. */
  async spawnSandboxes(options: SpawnOptions): Promise<SandboxInfo[]> {
    checkOptions("spawnSandboxes", options, SPAWN_OPTIONS);
    const { snapshotTag, n = 1, perChildNetns = false, memoryLimitMib } = options;
    return (await this.#ask("POST", "/sandboxes", {
      snapshot_tag: snapshotTag,
      n,
      per_child_netns: perChildNetns,
      memory_limit_mib: memoryLimitMib,
      prewarm: options.prewarm,
      live_fork: options.liveFork,
      hugepages: options.hugepages,
    })) as SandboxInfo[];
  }

  /** Return every sandbox that has not ended. */
  async listSandboxes(): Promise<SandboxInfo[]> {
    return (await this.#ask("GET", "/sandboxes")) as SandboxInfo[];
  }

  /** Return one sandbox. */
  async getSandbox(sandboxId: string): Promise<SandboxInfo> {
    return (await this.#ask("GET", at(sandboxId))) as SandboxInfo;
  }

  /** End a sandbox. */
  async killSandbox(sandboxId: string): Promise<void> {
    await this.#ask("DELETE", at(sandboxId));
  }

  /** Write a running sandbox down as a snapshot; it goes on.  `diff` is ignored beside `mode`. */
  async branchSandbox(sandboxId: string, options: BranchOptions = {}): Promise<SnapshotInfo> {
    const { tag, mode, diff = false, measure_diff = false, wait = true } = options;
    const body = { tag, mode, diff: diff && mode === undefined, measure_diff, wait };
    return (await this.#ask("POST", `${at(sandboxId)}/branch`, body)) as SnapshotInfo;
  }

  /** Run a program; return what it wrote. */
  async execCommand(
    sandboxId: string,
    args: string[],
    options: { timeoutSecs?: number } = {},
  ): Promise<ExecResult> {
    const secs = options.timeoutSecs ?? EXEC_TIMEOUT_SECS_DEFAULT;
    const body = { args, timeout_secs: secs };
    const waitMs = Math.max(this.timeoutMs, (secs + TIMEOUT_MARGIN_S) * 1000);
    return (await this.#ask("POST", `${at(sandboxId)}/exec`, body, waitMs)) as ExecResult;
  }

  /** Run code in the warm runtime. */
  async evalCode(sandboxId: string, code: string): Promise<EvalResult> {
    return (await this.#ask("POST", `${at(sandboxId)}/eval`, { code })) as EvalResult;
  }

  /** Ask the agent in the guest how it is. */
  async pingSandbox(sandboxId: string): Promise<PingResult> {
    return (await this.#ask("POST", `${at(sandboxId)}/ping`)) as PingResult;
  }

  async #ask(
    method: string,
    route: string,
    body?: object,
    waitMs = this.timeoutMs,
  ): Promise<unknown> {
    const path = `/v1${route}`;
    const content = body === undefined ? undefined : JSON.stringify(body);
    const headers: Record<string, string> =
      content === undefined ? {} : { "content-type": "application/json" };
    const request = { method, path, headers, content, waitMs };
    const [status, text] = await (this.#fetch === undefined
      ? this.#sent(request)
      : this.#fetched(this.#fetch, request));
    if (status >= ERROR_STATUS)
      throw new ControllerError(status, parsed(text), this.baseUrl + path);
    return text === "" ? null : JSON.parse(text);
  }

  async #sent(request: Asked): Promise<[number, string]> {
    const { method, path, headers, content, waitMs } = request;
    const answer = await this.#transport.send({
      method,
      path,
      headers,
      content: content === undefined ? undefined : Buffer.from(content),
      timeoutS: waitMs / 1000,
    });
    const pieces: Uint8Array[] = [];
    for await (const piece of answer.body) pieces.push(piece);
    return [answer.status, Buffer.concat(pieces).toString()];
  }

  async #fetched(ask: typeof fetch, request: Asked): Promise<[number, string]> {
    const { method, path, headers, content, waitMs } = request;
    const answer = await ask(this.baseUrl + path, {
      method,
      headers: { ...headers, ...this.#endpoint.headers },
      body: content,
      signal: AbortSignal.timeout(waitMs),
    });
    return [answer.status, await answer.text()];
  }
}

interface Asked {
  method: string;
  path: string;
  headers: Record<string, string>;
  content: string | undefined;
  waitMs: number;
}

function at(sandboxId: string): string {
  return `/sandboxes/${encodeURIComponent(sandboxId)}`;
}

function parsed(text: string): unknown {
  try {
    return text === "" ? {} : JSON.parse(text);
  } catch {
    return text;
  }
}

/** One sandbox. */
export class Sandbox {
  readonly id: string;
  readonly info: SandboxInfo;
  readonly #controller: Controller;
  #isKilled = false;

  constructor(controller: Controller, info: SandboxInfo) {
    this.#controller = controller;
    this.info = info;
    this.id = info.id;
  }

  /** Return a new sandbox. */
  static async create(options: Omit<SpawnOptions, "n"> & ControllerOptions): Promise<Sandbox> {
    const { baseUrl, token, timeoutMs, fetch, ...rest } = options;
    const controller = new Controller({ baseUrl, token, timeoutMs, fetch });
    const [info] = await controller.spawnSandboxes({ ...rest, n: 1 });
    if (info === undefined) throw new Error("the daemon forked no sandbox");
    return new Sandbox(controller, info);
  }

  /** Call a function with a new sandbox, which is ended afterwards; return what it gives. */
  static async with<T>(
    options: Omit<SpawnOptions, "n"> & ControllerOptions,
    use: (sandbox: Sandbox) => Promise<T>,
  ): Promise<T> {
    const sandbox = await Sandbox.create(options);
    try {
      return await use(sandbox);
    } finally {
      await sandbox.kill();
    }
  }

  /** Run a program; return what it wrote. */
  async exec(args: string[], options: { timeoutSecs?: number } = {}): Promise<ExecResult> {
    return await this.#controller.execCommand(this.id, args, options);
  }

  /** Return the `repr` of the last expression of `code`; throws what the code raised. */
  async eval(code: string): Promise<unknown> {
    const { result, error } = await this.#controller.evalCode(this.id, code);
    if (error) throw new Error(`eval error: ${error}`);
    return result;
  }

  /** Ask the agent in the guest how it is. */
  async ping(): Promise<PingResult> {
    return await this.#controller.pingSandbox(this.id);
  }

  /** Write it down as a snapshot; it goes on. */
  async branch(options: BranchOptions = {}): Promise<SnapshotInfo> {
    return await this.#controller.branchSandbox(this.id, options);
  }

  /** End it; idempotent. */
  async kill(): Promise<void> {
    if (this.#isKilled) return;
    this.#isKilled = true;
    try {
      await this.#controller.killSandbox(this.id);
    } catch (error) {
      if (!(error instanceof ControllerError && error.status === NOT_FOUND)) throw error;
    }
  }
}
