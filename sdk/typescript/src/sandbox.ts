/** A sandbox: fork it, branch it, run programs and code in it, read and write its files, end it. */
import { randomBytes } from "node:crypto";
import { FORK_DEADLINE_S_DEFAULT } from "./answers.gen.js";
import type { Client } from "./client.js";
import { EngineError, InvalidRequest, NotFound } from "./errors.js";
import {
  EVAL_OPTIONS,
  type EvalOptions,
  evaluated,
  messages,
  nameOf,
  RUN_CODE_OPTIONS,
  type RunCodeOptions,
} from "./evaluating.js";
import { Files } from "./files.js";
import { bytes, type CallOptions, Http, type Progress, quoted } from "./http.js";
import { type Image, imageReference } from "./image.js";
import { Network } from "./network.js";
import {
  BRANCH_OPTIONS,
  type BranchOptions,
  branchRequest,
  E2B_OPTIONS,
  type E2bOptions,
  type ForkOptions,
  forkRequest,
  LIMIT_OPTIONS,
  type LimitOptions,
  SANDBOX_OPTIONS,
  type SandboxOptions,
  TRY_BRANCH_OPTIONS,
  type TryBranchOptions,
  type Ttl,
} from "./options.js";
import { checkedPort, FORWARD_OPTIONS, Forward, type ForwardOptions, Port } from "./ports.js";
import type { Process } from "./process.js";
import { CodeContext, type EvalResult, type ExecResult, judged } from "./results.js";
import { pause } from "./retries.js";
import {
  program,
  RUN_OPTIONS,
  type RunOptions,
  STREAM_OPTIONS,
  type StreamOptions,
  shell,
  stream,
  TIMEOUT_MARGIN_S,
  toTheEnd,
} from "./running.js";
import { checkOptions, type Info, members } from "./wire.js";

/** Time a fork may take for each of its children; a host without hardware help needs much of it. */
const FORK_SECS_PER_CHILD = 1;

/** Time the daemon has beyond a child's own deadline, to clean up after those that failed. */
const FORK_MARGIN_S = 60;

/** Time a branch may take for each sibling. */
const BRANCH_SECS_PER_CHILD = 1;

/** Time that writing a snapshot may take. */
const SNAPSHOT_TIMEOUT_S = 3_600;

/** Time that ending the losers of a promotion and renaming its winner may take. */
const PROMOTION_TIMEOUT_S = 180;

/** Sandboxes that are asked at the same time, unless a call says otherwise. */
const PARALLEL_MAX = 32;

/** How long after a sandbox was found alive it is looked at again; doubled each time. */
const WAIT_PAUSE_S_MIN = 0.05;
const WAIT_PAUSE_S_MAX = 1;

/** The snapshot of a sandbox that names none. */
const TAG_DEFAULT = "pyagent";

/** The warm runtime that has contexts. */
const CONTEXTS_RUNTIME = "python";

/** Which daemon is asked. */
export interface ClientOption {
  /** The client whose daemon is asked; else the daemon that `new Client()` finds. */
  client?: Client;
}

/** What became of a branch. */
export interface Branch {
  /** The siblings that became ready. */
  sandboxes: Sandboxes;
  /** Why the others did not. */
  failures: Info<"SandboxFailure">[];
  /** How long the source was paused. */
  pauseMs: number;
  /** The longest time for which its guest saw itself paused; null if that is not known. */
  stallMs: number | null;
  /** Its instant as a snapshot, if one was asked for. */
  snapshot: Info<"SnapshotInfo"> | null;
}

const CREATE_OPTIONS: Record<keyof (SandboxOptions & E2bOptions & ClientOption), true> = {
  ...SANDBOX_OPTIONS,
  ...E2B_OPTIONS,
  client: true,
};

/**
 * One sandbox, forked from a snapshot.  `await using` kills it at the end of its block.
 *
 * ```ts
 * await using sandbox = await Sandbox.create("numpy");
 * console.log(String(await sandbox.run("ls | wc -l")));
 * ```
 *
 * It has five minutes to live, unless `ttlS` says otherwise.
 *
 * One rule about time holds for `run`, `exec` and `eval`.  Without `timeoutS` there is no limit
 * but the sandbox's own life.  What exceeds its `timeoutS` is ended and throws `ExecTimeout`, whose
 * `result` has the output so far; with `check: false` that result is returned instead.
 */
export class Sandbox implements AsyncDisposable {
  /** Its programs, under E2B's names. */
  readonly commands: Commands;
  readonly #http: Http;
  #info: Info<"SandboxInfo">;
  #files: Files;
  #network: Network;

  /** @internal */
  constructor(http: Http, info: Info<"SandboxInfo">) {
    this.#http = http;
    this.#info = info;
    this.#files = new Files(http, this.#path);
    this.#network = new Network(http, this.#path);
    this.commands = new Commands(this);
  }

  /**
   * Return a new sandbox, forked from a snapshot.
   *
   * @throws {NotFound} There is no snapshot of that tag.
   * @throws {CapacityError} The host has no room for it.
   * @throws {EngineError} It did not become ready.
   */
  static async create(
    tag: string,
    options?: SandboxOptions & E2bOptions & ClientOption,
  ): Promise<Sandbox>;
  static async create(options?: SandboxOptions & E2bOptions & ClientOption): Promise<Sandbox>;
  static async create(
    tagOrOptions: string | (SandboxOptions & E2bOptions & ClientOption) = {},
    more: SandboxOptions & E2bOptions & ClientOption = {},
  ): Promise<Sandbox> {
    const isNamed = typeof tagOrOptions === "string";
    const given = isNamed ? more : tagOrOptions;
    checkOptions("create", given, CREATE_OPTIONS);
    const { client, template, timeoutMs, metadata, envs, allowInternetAccess, ...rest } = given;
    const options: SandboxOptions = { ...rest };
    if (isNamed) options.tag = either("tag", options.tag, "the first argument", tagOrOptions);
    options.tag = either("tag", options.tag, "template", template);
    options.labels = either("labels", options.labels, "metadata", metadata);
    options.env = either("env", options.env, "envs", envs);
    const timeoutS = timeoutMs === undefined ? undefined : timeoutMs / 1000;
    options.ttlS = either("ttlS", options.ttlS, "timeoutMs", timeoutS);
    if (allowInternetAccess) options.network ??= "internet";
    return await forkOne(httpOf(client), options);
  }

  /**
   * Return a sandbox that is there.
   *
   * @param id Its id, a beginning of its id that no other has, or its name.
   * @throws {NotFound} There is none.
   */
  static async connect(id: string, options: ClientOption & CallOptions = {}): Promise<Sandbox> {
    const http = httpOf(options.client);
    const parts = { signal: options.signal };
    const info = await http.call("SandboxInfo", "GET", `/v2/sandboxes/${quoted(id)}`, parts);
    return new Sandbox(http, info);
  }

  /** Its file system. */
  get files(): Files {
    return this.#files;
  }

  /** What it may reach. */
  get network(): Network {
    return this.#network;
  }

  /** The sandbox as the daemon last described it; `refresh` asks again. */
  get info(): Info<"SandboxInfo"> {
    return this.#info;
  }

  /** Its id. */
  get id(): string {
    return this.#info.id;
  }

  /** Its id, under E2B's name. */
  get sandboxId(): string {
    return this.#info.id;
  }

  /** The snapshot it was forked from. */
  get tag(): string {
    return this.#info.snapshotTag;
  }

  /** What it can be found by, beside its id; null if it has no name. */
  get name(): string | null {
    return this.#info.name ?? null;
  }

  /** Names and values by which it can be found. */
  get labels(): Record<string, string> {
    return { ...this.#info.labels };
  }

  toString(): string {
    return `${this.id}  ${this.tag}  ${condition(this.#info)}`;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }

  /**
   * Ask the daemon how the sandbox is, and return that.
   *
   * @throws {NotFound} It was killed.
   */
  async refresh(options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.#become("GET", this.#path, { signal: options.signal });
  }

  /** Return what `refresh` does, under E2B's name. */
  async getInfo(options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.refresh(options);
  }

  /** Return whether it runs now. */
  async isRunning(options: CallOptions = {}): Promise<boolean> {
    try {
      return condition(await this.refresh(options)) === "running";
    } catch (error) {
      if (error instanceof NotFound) return false;
      throw error;
    }
  }

  /**
   * Wait until the sandbox has ended, and return why; it is asked for each second.
   *
   * @param options `timeoutS`: wait no longer than this; undefined: for as long as it takes.
   * @returns Why it ended, "deleted" if the daemon knows no more of it; null if it lives still.
   */
  async wait(options: CallOptions & { timeoutS?: number | null } = {}): Promise<string | null> {
    checkOptions("wait", options, { timeoutS: true, signal: true });
    const untilMs = performance.now() + (options.timeoutS ?? Number.POSITIVE_INFINITY) * 1000;
    for (let pauseS = WAIT_PAUSE_S_MIN; ; pauseS = Math.min(2 * pauseS, WAIT_PAUSE_S_MAX)) {
      try {
        const info = await this.refresh(options);
        if (condition(info) === "exited") return info.exitReason ?? "exited";
      } catch (error) {
        if (error instanceof NotFound) return "deleted";
        throw error;
      }
      const leftS = (untilMs - performance.now()) / 1000;
      if (leftS <= 0) return null;
      await pause(Math.min(pauseS, leftS), options.signal);
    }
  }

  /**
   * End the sandbox and remove everything that was its own; return whether it was there.
   *
   * A sandbox that has ended already is no error.
   */
  async kill(options: CallOptions = {}): Promise<boolean> {
    let wasThere = true;
    try {
      await this.#http.send("DELETE", this.#path, { signal: options.signal });
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
      wasThere = false;
    }
    const gone = { status: "exited", paused: false, pid: null, exitReason: "deleted" } as const;
    this.#info = { ...this.#info, ...gone };
    return wasThere;
  }

  /** Change when it is ended, and return it as it is then. */
  async setTtl(ttlS: Ttl, options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.#change({ ttl_secs: null, ...members({ ttlS }) }, options);
  }

  /**
   * Change for how long nobody may use it before it is ended (null: it is not), and return it as
   * it is then.
   */
  async setIdleTtl(
    idleTtlS: number | null,
    options: CallOptions = {},
  ): Promise<Info<"SandboxInfo">> {
    return await this.#change({ idle_ttl_secs: null, ...members({ idleTtlS }) }, options);
  }

  /** Do what `setTtl` does, under E2B's name: in milliseconds. */
  async setTimeout(timeoutMs: number, options: CallOptions = {}): Promise<void> {
    await this.setTtl(timeoutMs / 1000, options);
  }

  /**
   * Give it another name, and return it as it is then; null: it has none any more.
   *
   * @throws {Conflict} Another live sandbox has the name.
   */
  async rename(name: string | null, options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.#change({ name }, options);
  }

  /** Give it other labels in the place of those that it has; return it as it is then. */
  async setLabels(
    labels: Readonly<Record<string, string>>,
    options: CallOptions = {},
  ): Promise<Info<"SandboxInfo">> {
    return await this.#change({ labels }, options);
  }

  /** Set some labels, and remove those that are null; return it as it is then. */
  async changeLabels(
    changes: Readonly<Record<string, string | null>>,
    options: CallOptions = {},
  ): Promise<Info<"SandboxInfo">> {
    return await this.#change({ label_changes: changes }, options);
  }

  /**
   * Stop its virtual CPUs and keep its memory; return it as it is then.
   *
   * Until it is resumed, what needs the guest throws `Conflict`.  Its time to live goes on.
   */
  async pause(options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.#become("POST", `${this.#path}/pause`, { signal: options.signal });
  }

  /** Let it go on where it was paused; return it as it is then. */
  async resume(options: CallOptions = {}): Promise<Info<"SandboxInfo">> {
    return await this.#become("POST", `${this.#path}/resume`, { signal: options.signal });
  }

  /** Ask the agent in the guest how it is. */
  async ping(options: CallOptions = {}): Promise<Info<"Pong">> {
    const parts = { signal: options.signal };
    return await this.#http.call("Pong", "POST", `${this.#path}/ping`, parts);
  }

  /** Return what it uses of the host: CPU time, memory, disk, network. */
  async usage(options: CallOptions = {}): Promise<Info<"UsageInfo">> {
    const parts = { signal: options.signal };
    return await this.#http.call("UsageInfo", "GET", `${this.#path}/usage`, parts);
  }

  /** Change what it may take of the host, at once; limits that are undefined stay as they are. */
  async setLimits(limits: LimitOptions & CallOptions): Promise<Info<"SandboxInfo">> {
    checkOptions("setLimits", limits, LIMIT_OPTIONS);
    const { signal, ...rest } = limits;
    return await this.#become("PATCH", `${this.#path}/limits`, { body: members(rest), signal });
  }

  /** Return the end of what the guest wrote to its console, as text. */
  async console(options: CallOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.logs(options));
  }

  /** Yield the console's text so far, then what is added, until the sandbox ends. */
  async *followConsole(options: CallOptions = {}): AsyncGenerator<string, void, void> {
    const decoder = new TextDecoder();
    for await (const piece of this.followLogs(options)) {
      const text = decoder.decode(piece, { stream: true });
      if (text !== "") yield text;
    }
    const rest = decoder.decode();
    if (rest !== "") yield rest;
  }

  /** Return the end of what the guest wrote to its console, at most 1 MiB. */
  async logs(options: CallOptions = {}): Promise<Uint8Array> {
    return await bytes(await this.#http.streamed(`${this.#path}/logs`, { signal: options.signal }));
  }

  /** Yield the console's log so far, then what is added, until the sandbox ends. */
  async *followLogs(options: CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    const parts = { query: { follow: true }, signal: options.signal };
    const answer = await this.#http.streamed(`${this.#path}/logs`, parts);
    try {
      yield* answer.body;
    } finally {
      answer.discard();
    }
  }

  /**
   * Have a shell run a line, such as `ls | wc -l`; wait for it, and return what it wrote.
   *
   * @throws {ExecTimeout} Its time ran out.
   * @throws {CommandError} It exited with another code than 0, and `check` is true.
   */
  async run(
    line: string,
    options: RunOptions<Uint8Array> & { text: false },
  ): Promise<ExecResult<Uint8Array>>;
  async run(line: string, options?: RunOptions): Promise<ExecResult>;
  async run(
    line: string,
    options: RunOptions<never> = {},
  ): Promise<ExecResult<string | Uint8Array>> {
    checkOptions("run", options, RUN_OPTIONS);
    return await toTheEnd(this.#http, this.#path, shell(line), options);
  }

  /**
   * Run a program without a shell, wait for it, and return what it wrote.
   *
   * At most 8 MiB of each output are kept, see `truncated`; `onStdout` gets all of it.
   *
   * @param args The program and its arguments, as `["ls", "-l"]`.
   * @throws {ExecTimeout} Its time ran out.
   * @throws {CommandError} It exited with another code than 0, and `check` is true.
   * @throws {NotFound} There is no such program; `context.program` names it.
   */
  async exec(
    args: string | readonly string[],
    options: RunOptions<Uint8Array> & { text: false },
  ): Promise<ExecResult<Uint8Array>>;
  async exec(args: string | readonly string[], options?: RunOptions): Promise<ExecResult>;
  async exec(
    args: string | readonly string[],
    options: RunOptions<never> = {},
  ): Promise<ExecResult<string | Uint8Array>> {
    checkOptions("exec", options, RUN_OPTIONS);
    return await toTheEnd(this.#http, this.#path, program(args), options);
  }

  /** Return a program with its streams attached; iterating it, or writing to it, starts it. */
  execStream(args: string | readonly string[], options: StreamOptions = {}): Process {
    checkOptions("execStream", options, STREAM_OPTIONS);
    return stream(this.#http, this.#path, program(args), options);
  }

  /**
   * Return a connection to the program that listens on a port.
   *
   * @param port A TCP port of the sandbox's loopback address, 1 to 65535.
   * @throws {Conflict} Nothing listens on the port, or the sandbox does not run.
   * @throws {Busy} The sandbox has too many connections to its ports.
   */
  async connectPort(port: number, options: CallOptions = {}): Promise<Port> {
    return await Port.open(this.#http, this.#portPath(port), options.signal);
  }

  /**
   * Return a port of this host that leads to a program's; it listens until it is closed.
   *
   * The program need not listen yet: each connection looks for it anew.
   *
   * @param port A TCP port of the sandbox's loopback address, 1 to 65535.
   * @throws {InvalidRequest} The address is none, none of this host's, or needs root.
   * @throws {Conflict} Another program listens there.
   */
  async forward(port: number, options: ForwardOptions = {}): Promise<Forward> {
    checkOptions("forward", options, FORWARD_OPTIONS);
    return await Forward.open(this.#http, this.#portPath(port), port, options);
  }

  /**
   * Run code in the warm runtime, which keeps its names from one call to the next.
   *
   * An exception that the code raises is in the result; `check: true` or `result.check()` throws
   * it.
   *
   * @param code Statements; a last expression is the value.
   * @throws {ExecTimeout} Its time ran out; variables that it has set are kept.
   * @throws {GuestError} It raised, and `check` is true.
   * @throws {Conflict} There is no warm runtime, or none of the name `runtime`.
   */
  async eval(code: string, options: EvalOptions = {}): Promise<EvalResult> {
    checkOptions("eval", options, EVAL_OPTIONS);
    return await evaluated(this.#http, this.#path, code, options);
  }

  /**
   * Run code as `eval` does, under E2B's name; `timeoutMs` is in milliseconds.
   *
   * @throws {ExecTimeout} Its time ran out; variables that it has set are kept.
   */
  async runCode(code: string, options: RunCodeOptions = {}): Promise<EvalResult> {
    checkOptions("runCode", options, RUN_CODE_OPTIONS);
    const { timeoutMs, language, context, envs, onResult, onError, signal } = options;
    const result = await this.eval(code, {
      runtime: language,
      context,
      check: false,
      timeoutS: seconds(timeoutMs),
      env: envs,
      onStdout: messages(options.onStdout, false),
      onStderr: messages(options.onStderr, true),
      signal,
    });
    for (const each of result.results) await onResult?.(each);
    if (result.error !== null && !result.timedOut) await onError?.(result.error);
    return judged(result, undefined);
  }

  /**
   * Make a context: code in it has names and a working directory of its own.
   *
   * Contexts are in one process: modules are loaded once for all, one evaluation runs at a time,
   * and code that ends the process ends all of them.  Branches of the sandbox have its contexts.
   *
   * @throws {InvalidRequest} There is no folder `cwd`, or there are too many contexts.
   * @throws {Conflict} The warm runtime is not Python.
   */
  async createCodeContext(
    options: CallOptions & { cwd?: string; language?: string } = {},
  ): Promise<CodeContext> {
    const { cwd = "", language = CONTEXTS_RUNTIME, signal } = options;
    const made = new CodeContext(`ctx-${randomBytes(8).toString("hex")}`, language, cwd);
    return await this.#beginContext(made, { signal });
  }

  async #beginContext(context: CodeContext, options: CallOptions): Promise<CodeContext> {
    const { id, language, cwd } = context;
    const move = cwd === "" ? "" : `__import__('os').chdir(${JSON.stringify(cwd)})\n`;
    const made = await this.eval(`${move}__import__('os').getcwd()`, {
      ...options,
      runtime: language,
      context,
    });
    if (made.error !== null) {
      await this.removeCodeContext(context);
      throw new InvalidRequest(`cwd: ${made.error}`, { context: { field: "cwd" } });
    }
    return new CodeContext(id, language, String(made.value));
  }

  /** Return the contexts that there are, besides that of the warm-up. */
  async listCodeContexts(options: CallOptions = {}): Promise<CodeContext[]> {
    const found = (await this.#ofContexts("contexts()", options)) as { id: string; cwd: string }[];
    return found.map(({ id, cwd }) => new CodeContext(id, CONTEXTS_RUNTIME, cwd ?? ""));
  }

  /** Forget a context with all its names; say whether there was one. */
  async removeCodeContext(
    context: string | CodeContext,
    options: CallOptions = {},
  ): Promise<boolean> {
    const call = `remove_context(${JSON.stringify(nameOf(context))})`;
    return Boolean(await this.#ofContexts(call, options));
  }

  /** Empty a context: its names are forgotten, and its code starts in its first folder. */
  async restartCodeContext(context: CodeContext, options: CallOptions = {}): Promise<CodeContext> {
    await this.removeCodeContext(context, options);
    return await this.#beginContext(context, options);
  }

  async #ofContexts(call: string, options: CallOptions): Promise<unknown> {
    const code = `__import__('forkd').${call}`;
    return (await this.eval(code, { ...options, runtime: CONTEXTS_RUNTIME, check: true })).value;
  }

  /**
   * Branch it into `n` siblings while it runs: all of them, or an error and none.
   *
   * They have what it had at one instant, and go on from there; it is paused for some
   * milliseconds, and goes on, too.  They have its limits and its variables.
   *
   * @throws {BudgetError} Its tree may not grow so much.
   * @throws {Conflict} It does not run.
   * @throws {EngineError} At least one did not become ready.
   */
  async branch(n = 1, options: BranchOptions = {}): Promise<Sandboxes> {
    checkOptions("branch", options, BRANCH_OPTIONS);
    return (await this.#branch(n, options, true)).sandboxes;
  }

  /**
   * Branch it into up to `n` siblings, and write the same instant down under `tag`.
   *
   * @throws {EngineError} Not one became ready, and there is no tag.
   */
  async tryBranch(n = 1, options: TryBranchOptions = {}): Promise<Branch> {
    checkOptions("tryBranch", options, TRY_BRANCH_OPTIONS);
    return await this.#branch(n, options, false);
  }

  /**
   * Write it down under `tag` while it runs; only what differs from its parent is stored.
   *
   * @param options `wait`: whether to return when it is ready (the default), or while it is being
   *   written.
   * @throws {Conflict} The tag is taken, or it does not run.
   * @throws {CapacityError} The disk is full; nothing was left on it.
   */
  async snapshot(
    tag: string,
    options: CallOptions & { wait?: boolean } = {},
  ): Promise<Info<"SnapshotInfo">> {
    const made = await this.#branch(0, { tag, wait: options.wait, signal: options.signal }, false);
    if (made.snapshot === null) throw new EngineError("the daemon answered without the snapshot");
    return made.snapshot;
  }

  /**
   * Take it back to where it was forked or branched; return how long, in milliseconds.
   *
   * It keeps its id and its address.  What runs in it, and connections to it, end.
   *
   * @throws {Conflict} It does not run, or the process that held its instant was killed.
   */
  async reset(options: CallOptions & { deadlineS?: number } = {}): Promise<number> {
    const { deadlineS, signal } = options;
    const timeoutS = (deadlineS ?? FORK_DEADLINE_S_DEFAULT) + TIMEOUT_MARGIN_S;
    const parts = { body: members({ deadlineS }), timeoutS, signal };
    return (await this.#http.call("ResetInfo", "POST", `${this.#path}/reset`, parts)).resetMs;
  }

  /**
   * Let it take its parent's id, name, address and place; return who ended for that.
   *
   * The parent ends, and whatever else was branched from it.  From now on this object is the
   * sandbox of that id.
   *
   * @throws {Conflict} It has no parent, that is gone, or it does not run.
   */
  async promote(options: CallOptions = {}): Promise<string[]> {
    const parts = { timeoutS: PROMOTION_TIMEOUT_S, signal: options.signal };
    const path = `${this.#path}/promote`;
    const done = await this.#http.call("PromotionInfo", "POST", path, parts);
    this.#info = done.sandbox;
    this.#files = new Files(this.#http, this.#path);
    this.#network = new Network(this.#http, this.#path);
    return done.ended;
  }

  get #path(): string {
    return `/v2/sandboxes/${quoted(this.#info.id)}`;
  }

  #portPath(port: number): string {
    return `${this.#path}/ports/${checkedPort(port)}`;
  }

  async #become(method: string, path: string, parts: object): Promise<Info<"SandboxInfo">> {
    this.#info = await this.#http.call("SandboxInfo", method, path, parts);
    return this.#info;
  }

  async #change(body: object, options: CallOptions): Promise<Info<"SandboxInfo">> {
    return await this.#become("PATCH", this.#path, { body, signal: options.signal });
  }

  async #branch(n: number, options: TryBranchOptions, allOrNothing: boolean): Promise<Branch> {
    const { tag, wait, deadlineS, signal } = options;
    const made = await this.#http.call("BranchInfo", "POST", `${this.#path}/branch`, {
      body: branchRequest(n, options, allOrNothing),
      creates: true,
      timeoutS:
        (deadlineS ?? FORK_DEADLINE_S_DEFAULT) +
        TIMEOUT_MARGIN_S +
        BRANCH_SECS_PER_CHILD * n +
        (tag !== undefined && wait !== false ? SNAPSHOT_TIMEOUT_S : 0),
      signal,
    });
    const [ready, failures] = sorted(made.sandboxes);
    return {
      sandboxes: sandboxesOf(this.#http, ready),
      failures,
      pauseMs: made.pauseMs,
      stallMs: made.stallMs ?? null,
      snapshot: made.snapshot ?? null,
    };
  }
}

/** The programs of a sandbox, under the names that E2B has. */
export class Commands {
  readonly #sandbox: Sandbox;

  /** @internal */
  constructor(sandbox: Sandbox) {
    this.#sandbox = sandbox;
  }

  /**
   * Run a line of the shell, or a list without one, and return what it wrote.
   *
   * @param options As of `Sandbox.run`, with `envs` for `env` and `timeoutMs` for `timeoutS`.
   */
  async run(
    cmd: string | readonly string[],
    options: Omit<RunOptions, "env" | "timeoutS" | "text"> & {
      envs?: Readonly<Record<string, string>>;
      timeoutMs?: number;
    } = {},
  ): Promise<ExecResult> {
    const { envs, timeoutMs, ...rest } = options;
    const words = typeof cmd === "string" ? shell(cmd) : program(cmd);
    return await this.#sandbox.exec(words, { ...rest, env: envs, timeoutS: seconds(timeoutMs) });
  }
}

/**
 * Sandboxes that were made together: a sequence, which asks all of them at the same time.
 *
 * ```ts
 * await using sandboxes = await client.fork("numpy", 10);
 * console.log((await sandboxes.eval("numpy.zeros(5).sum()")).map((each) => each.value));
 * ```
 *
 * `await using` kills all of them at the end of its block.  Results come in the order of the
 * sandboxes.  If a call fails for some, it goes on for the others, and then throws the first error.
 */
export class Sandboxes implements ArrayLike<Sandbox>, Iterable<Sandbox>, AsyncDisposable {
  readonly [index: number]: Sandbox;
  readonly #all: readonly Sandbox[];

  /** @internal */
  constructor(all: Iterable<Sandbox>) {
    this.#all = [...all];
    Object.assign(this, this.#all);
  }

  /** How many there are. */
  get length(): number {
    return this.#all.length;
  }

  /** Return one of them; a negative index counts from the end. */
  at(index: number): Sandbox | undefined {
    return this.#all.at(index);
  }

  /** Return some of them. */
  slice(start?: number, end?: number): Sandboxes {
    return new Sandboxes(this.#all.slice(start, end));
  }

  [Symbol.iterator](): Iterator<Sandbox> {
    return this.#all[Symbol.iterator]();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }

  toString(): string {
    return this.#all.join("\n");
  }

  /**
   * Call a function with each sandbox, at the same time; return what it gives.
   *
   * @param options `parallelMax`: how many calls may run at the same time.
   * @throws What the function threw for the first sandbox for which it did.
   */
  async map<R>(
    ask: (sandbox: Sandbox, index: number) => Promise<R>,
    options: { parallelMax?: number } = {},
  ): Promise<R[]> {
    const parallelMax = options.parallelMax ?? PARALLEL_MAX;
    if (!(parallelMax >= 1)) {
      const context = { field: "parallelMax" };
      throw new InvalidRequest("parallelMax must be at least 1", { context });
    }
    const outcomes: PromiseSettledResult<R>[] = new Array(this.#all.length);
    const left = this.#all.entries();
    const work = async (): Promise<void> => {
      for (const [index, sandbox] of left) {
        [outcomes[index]] = (await Promise.allSettled([ask(sandbox, index)])) as [
          PromiseSettledResult<R>,
        ];
      }
    };
    await Promise.all(Array.from({ length: Math.min(parallelMax, this.length) }, work));
    return outcomes.map((each) => {
      if (each.status === "rejected") throw each.reason;
      return each.value;
    });
  }

  /** Have a shell in each run a line; as `Sandbox.run`. */
  async run(line: string, options?: RunOptions): Promise<ExecResult[]> {
    return await this.map((sandbox) => sandbox.run(line, options));
  }

  /** Run a program in each without a shell; as `Sandbox.exec`. */
  async exec(args: string | readonly string[], options?: RunOptions): Promise<ExecResult[]> {
    return await this.map((sandbox) => sandbox.exec(args, options));
  }

  /** Run code in each one's warm runtime; as `Sandbox.eval`. */
  async eval(code: string, options?: EvalOptions): Promise<EvalResult[]> {
    return await this.map((sandbox) => sandbox.eval(code, options));
  }

  /** End all of them; return which were there. */
  async kill(options: CallOptions = {}): Promise<boolean[]> {
    return await this.map((sandbox) => sandbox.kill(options));
  }
}

/** @internal */
export function sandboxesOf(http: Http, ready: readonly Info<"SandboxInfo">[]): Sandboxes {
  return new Sandboxes(ready.map((info) => new Sandbox(http, info)));
}

/**
 * Fork sandboxes; return those that are ready, and why others are not.
 *
 * @internal
 */
export async function fork(
  http: Http,
  tag: string,
  n: number,
  options: ForkOptions & { name?: string },
  allOrNothing: boolean,
): Promise<[Sandboxes, Info<"SandboxFailure">[]]> {
  const deadlineS = options.deadlineS ?? FORK_DEADLINE_S_DEFAULT;
  const found = await http.outcomes(["SandboxInfo", "SandboxFailure"], "/v2/sandboxes", {
    body: forkRequest(tag, n, options, allOrNothing),
    creates: true,
    timeoutS: deadlineS + FORK_MARGIN_S + FORK_SECS_PER_CHILD * n,
    signal: options.signal,
  });
  const [ready, failed] = sorted(found);
  return [sandboxesOf(http, ready), failed];
}

/**
 * Fork one sandbox, of a tag or an image.
 *
 * @internal
 */
export async function forkOne(http: Http, options: SandboxOptions): Promise<Sandbox> {
  const { tag, image, onProgress, ...rest } = options;
  const named = await snapshotOf(http, tag, image, onProgress, options.signal);
  const ttlS = rest.ttlS === undefined ? "default" : rest.ttlS;
  const [ready, failed] = await fork(http, named, 1, { ...rest, ttlS }, true);
  const [first] = ready;
  if (first === undefined) {
    throw new EngineError(`the sandbox did not become ready: ${failed[0]?.error ?? "none came"}`);
  }
  return first;
}

async function snapshotOf(
  http: Http,
  tag: string | undefined,
  image: string | Image | undefined,
  onProgress: ((step: Progress) => unknown) | undefined,
  signal: AbortSignal | undefined,
): Promise<string> {
  if (image === undefined) return tag ?? (process.env.FORKD_TAG || TAG_DEFAULT);
  if (tag !== undefined) {
    throw new InvalidRequest("give a tag or an image, not both", { context: { field: "image" } });
  }
  const named = await imageReference(http, image, onProgress, signal);
  return (await imageSnapshot(http, { image: named }, onProgress, signal)).tag;
}

/**
 * Return a ready snapshot of an image, baked the first time that it is asked for.
 *
 * @internal
 */
export async function imageSnapshot(
  http: Http,
  request: object,
  onProgress?: (step: Progress) => unknown,
  signal?: AbortSignal,
): Promise<Info<"SnapshotInfo">> {
  const path = "/v2/snapshots:image";
  const done = await http.events("SnapshotEvent", "snapshot", path, request, onProgress, signal);
  return done.snapshot;
}

const CONNECTIONS = new WeakMap<object, Http>();

/**
 * Note the connections of a client.
 *
 * @internal
 */
export function keepHttp(client: object, http: Http): void {
  CONNECTIONS.set(client, http);
}

function httpOf(client: Client | undefined): Http {
  if (client === undefined) return Http.default();
  const found = CONNECTIONS.get(client);
  if (found === undefined) {
    throw new InvalidRequest("client: is no Client", { context: { field: "client" } });
  }
  return found;
}

type Outcome = Info<"SandboxInfo"> | Info<"SandboxFailure">;

function sorted(outcomes: readonly Outcome[]): [Info<"SandboxInfo">[], Info<"SandboxFailure">[]] {
  const ready: Info<"SandboxInfo">[] = [];
  const failed: Info<"SandboxFailure">[] = [];
  for (const each of outcomes) {
    if ("error" in each) failed.push(each);
    else ready.push(each);
  }
  return [ready, failed];
}

function condition(info: Info<"SandboxInfo">): string {
  return info.status === "running" && info.paused ? "paused" : info.status;
}

function seconds(timeMs: number | undefined): number | undefined {
  return timeMs === undefined ? undefined : timeMs / 1000;
}

function either<T>(name: string, value: T | undefined, otherName: string, other: T | undefined) {
  if (value !== undefined && other !== undefined) {
    throw new InvalidRequest(`${otherName} is another name of ${name}; give one of them`, {
      context: { field: name },
    });
  }
  return value === undefined ? other : value;
}
