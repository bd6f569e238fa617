/** Builds of Dockerfiles: each step in a fork of the snapshot that the step before it has left. */
import { randomBytes } from "node:crypto";
import { open, stat } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { reasonOf } from "./archive.js";
import { Context } from "./build-context.js";
import { Ignore, parseIgnore } from "./build-ignore.js";
import { Machine, Seen } from "./build-machine.js";
import type { MachineOptions } from "./collections.js";
import {
  type Base,
  type Bases,
  type Plan,
  plan,
  type StagePlan,
  type Step,
  Wish,
} from "./dockerfile-plan.js";
import { DOCKERFILE_BYTES_MAX } from "./dockerfile-reading.js";
import { type Config, EMPTY, programOf } from "./dockerfile-settings.js";
import { parse } from "./dockerfile-stages.js";
import { BuildError, Conflict, InvalidRequest, NotFound } from "./errors.js";
import { type Http, quoted } from "./http.js";
import type { Reach } from "./network.js";
import type { BuildResult, BuildStep } from "./results.js";
import { forkOne, imageSnapshot, type Sandbox } from "./sandbox.js";
import { checkOptions, type Info, members } from "./wire.js";

/** Time that one step may take, unless a call says otherwise. */
const STEP_TIMEOUT_S = 3_600;

/** Time that writing a link may take. */
const WRITE_TIMEOUT_S = 3_600;

/** How long a step's sandbox outlives its time, if the program that builds is gone. */
const TTL_MARGIN_S = 600;

/** Where the image's own program writes in the machine, if it is started. */
const PROGRAM_LOG = "/tmp/forkd-program.log";

const DOCKERFILE = "Dockerfile";
const IGNORE_FILE = ".dockerignore";

const TAG = /^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$/;
const RESERVED = /^image-[0-9a-f]{12}$/;

/** What names an image of this host. */
const LOCAL =
  /^(?:oci:|oci-archive:|docker-archive:|\.{0,2}\/)|\.(?:tar|tar\.gz|tgz|tar\.xz|tar\.bz2)$/i;

/** How a Dockerfile is built. */
export interface BuildOptions extends MachineOptions {
  /** The Dockerfile; `Dockerfile` in the context if undefined. */
  dockerfile?: string;
  /**
   * Name of the snapshot; one that a build made is replaced.  Undefined: it has no name, and the
   * daemon may remove it for want of room.
   */
  tag?: string;
  /** Values of ARGs. */
  buildArgs?: Readonly<Record<string, string>>;
  /** The stage to build; the last one if undefined. */
  target?: string;
  /** Whether results of earlier builds are used (the default). */
  cache?: boolean;
  /** "always" asks the registry which image a FROM names now; "missing" is the default. */
  pull?: "missing" | "always";
  /** What steps may reach, as of `Client.fork`; nothing if undefined. */
  network?: Reach;
  /** Start the image's ENTRYPOINT and CMD, and have forks begin with it running. */
  warm?: boolean;
  /** Shell command that is repeated until it exits with 0, with `warm`. */
  ready?: string;
  /** Time that one step may take, in seconds; an hour if undefined. */
  stepTimeoutS?: number;
  /** Called with each instruction that is done. */
  onStep?: (step: BuildStep) => unknown;
}

const BUILD_OPTIONS: Record<keyof BuildOptions, true> = {
  dockerfile: true,
  tag: true,
  buildArgs: true,
  target: true,
  cache: true,
  pull: true,
  network: true,
  memoryMib: true,
  vcpus: true,
  diskMib: true,
  warm: true,
  ready: true,
  stepTimeoutS: true,
  onStep: true,
  onProgress: true,
  signal: true,
};

/** Builds of Dockerfiles by a daemon. */
export class Builds {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /**
   * Build a snapshot from a Dockerfile.
   *
   * Each RUN, COPY and ADD is done in a sandbox of its own, a fork of what the step before it has
   * left, and its result is kept.  A later build, also one of the Python SDK, goes on behind the
   * last step that is the same.  Forks of the result begin with the ENV, WORKDIR and USER of the
   * Dockerfile.
   *
   * @param context The folder that COPY and ADD take files from.
   * @throws {InvalidRequest} Something in the Dockerfile is wrong or not supported; file and line
   *   are named, and nothing was built.
   * @throws {NotFound} There is no such folder, file or image.
   * @throws {BuildError} A step failed; what the steps before it have left stays for the next build.
   * @throws {Conflict} The tag is taken by a snapshot that no build made, or that is in use.
   */
  async build(context = ".", options: BuildOptions = {}): Promise<BuildResult> {
    checkOptions("build", options, BUILD_OPTIONS);
    const { tag, warm, ready } = options;
    if (tag !== undefined && !TAG.test(tag)) {
      throw refused(`tag: ${JSON.stringify(tag)} is no name of a snapshot`, "tag");
    }
    if (tag !== undefined && RESERVED.test(tag)) {
      const said = "is kept for snapshots of the daemon; choose another name";
      throw refused(`tag: '${tag}' ${said}`, "tag");
    }
    if (ready !== undefined && !warm) {
      throw refused("ready goes with warm, which starts the program", "ready");
    }
    const wish = await openWish(context, options);
    const seen = new Seen(options.onStep, options.onProgress);
    return await new Build(this.#http, wish, options, seen).run();
  }
}

/** One build. */
class Build {
  readonly #http: Http;
  readonly #wish: Wish;
  readonly #options: BuildOptions;
  readonly #seen: Seen;
  /** The snapshot that each stage has ended with, by its number. */
  readonly #ends = new Map<number, string>();

  constructor(http: Http, wish: Wish, options: BuildOptions, seen: Seen) {
    this.#http = http;
    this.#wish = wish;
    this.#options = options;
    this.#seen = seen;
  }

  get #signal(): { signal?: AbortSignal } {
    return this.#options.signal === undefined ? {} : { signal: this.#options.signal };
  }

  get #stepTimeoutS(): number {
    return this.#options.stepTimeoutS ?? STEP_TIMEOUT_S;
  }

  async run(): Promise<BuildResult> {
    const { tag, warm = false, ready = null } = this.#options;
    await plan(this.#wish);
    const replaced = await this.#replaced();
    const bases = new Map<string, Base>();
    for (const [name, line] of await this.#wish.images()) {
      bases.set(name, await this.#base(name, line));
    }

    const made = await plan(this.#wish, bases);
    const { config } = made.last;
    if (warm && programOf(config).length === 0) {
      throw refused("warm: the image has no ENTRYPOINT and no CMD", "warm");
    }
    const key = made.imageKey(warm, ready);
    let snapshot = await this.#find(key, config, tag);
    if (snapshot === undefined) {
      checkUnused(replaced, bases);
      const end = await this.#end(made, made.last, bases);
      snapshot = await this.#finish(made, key, end, replaced);
    } else {
      for (const stage of made.stages) this.#tell(made, stage, stage.steps.length).end();
    }
    return { snapshot, steps: this.#seen.steps, warnings: [...made.warnings] };
  }

  /**
   * Return the snapshot that has the tag now.
   *
   * @throws {Conflict} No build made it.
   */
  async #replaced(): Promise<Info<"SnapshotInfoDetail"> | undefined> {
    const { tag } = this.#options;
    const found = tag === undefined ? undefined : await this.#infoIfThere(tag);
    if (found === undefined || found.buildKey) return found;
    throw new Conflict(
      `snapshot ${tag} exists, and no build made it; choose another tag, or delete it`,
      { context: { tag: found.tag } },
    );
  }

  async #info(tag: string): Promise<Info<"SnapshotInfoDetail">> {
    const path = `/v2/snapshots/${quoted(tag)}/info`;
    return await this.#http.call("SnapshotInfoDetail", "GET", path, this.#signal);
  }

  async #infoIfThere(tag: string): Promise<Info<"SnapshotInfoDetail"> | undefined> {
    return await absentIfMissing(this.#info(tag));
  }

  /** Return the snapshot of an image that a FROM or a COPY names. */
  async #base(name: string, line: number): Promise<Base> {
    const where = `${this.#wish.dockerfile.file}:${line}`;
    const salt = this.#options.cache === false ? randomBytes(16).toString("hex") : "";
    const found = TAG.test(name) ? await this.#infoIfThere(name) : undefined;
    if (found !== undefined) return baseOf(found, salt, where);
    if (LOCAL.test(name)) {
      throw refused(
        `${where}: ${name} is an image of this host, which the TypeScript SDK does not upload: ` +
          "`forkd build` does",
        "dockerfile",
      );
    }
    const { memoryMib, vcpus, diskMib, pull = "missing", onProgress, signal } = this.#options;
    try {
      const request = members({ image: name, memoryMib, vcpus, diskMib, pull });
      const made = await imageSnapshot(this.#http, request, onProgress, signal);
      return baseOf(await this.#info(made.tag), salt, where);
    } catch (error) {
      for (const kind of [NotFound, BuildError, InvalidRequest]) {
        if (!(error instanceof kind) || error.message.startsWith(where)) continue;
        const said = `${where}: ${name}: ${error.message}`;
        throw new kind(said, { context: error.context, cause: error });
      }
      throw error;
    }
  }

  /** Return a result of an earlier build; undefined if it is not there. */
  async #find(
    key: string,
    config: Config,
    tag: string | undefined,
  ): Promise<Info<"SnapshotInfo"> | undefined> {
    return await absentIfMissing(this.#link(key, config, undefined, tag));
  }

  /**
   * Return a result, written from a sandbox unless it is there.
   *
   * @throws {NotFound} It is not there, and there is no sandbox.
   */
  async #link(
    key: string,
    config: Config,
    sandbox: string | undefined,
    tag: string | undefined,
  ): Promise<Info<"SnapshotInfo">> {
    return await this.#http.call("SnapshotInfo", "POST", "/v2/snapshots:build", {
      body: members({ key, config, sandbox, tag }),
      creates: sandbox !== undefined,
      timeoutS: WRITE_TIMEOUT_S,
      ...this.#signal,
    });
  }

  /** Return the snapshot that a stage ends with, after the steps that are not cached. */
  async #end(made: Plan, stage: StagePlan, bases: Bases): Promise<string> {
    const { index } = stage.stage;
    const known = this.#ends.get(index);
    if (known !== undefined) return known;
    let at = stage.steps.length;
    let found: string | undefined;
    for (; at > 0; at -= 1) {
      const key = stage.steps[at - 1]?.key ?? "";
      found = (await this.#find(key, stage.config, undefined))?.tag;
      if (found !== undefined) break;
    }
    let parent = found ?? (await this.#begin(made, stage, bases));
    const tell = this.#tell(made, stage, at);
    for (const step of stage.steps.slice(at)) {
      const begunMs = performance.now();
      parent = await this.#do(made, step, parent, bases);
      tell.step(step, Math.round(performance.now() - begunMs) / 1000, false);
    }
    tell.end();
    this.#ends.set(index, parent);
    return parent;
  }

  /** Return the snapshot that a stage begins with. */
  async #begin(made: Plan, stage: StagePlan, bases: Bases): Promise<string> {
    const { base } = stage;
    if (typeof base === "number") return await this.#end(made, made.of(base), bases);
    if (base !== undefined) return base.tag;
    throw refused("a stage has no base", "dockerfile");
  }

  /** Do a step; return the snapshot that it leaves. */
  async #do(made: Plan, step: Step, parent: string, bases: Bases): Promise<string> {
    this.#seen.progress("step", `[${step.number}/${made.total}] ${step.shown}`);
    const { action } = step;
    const from = action.kind === "copy" ? action.origin : null;
    let origin: string | undefined;
    if (typeof from === "number") origin = await this.#end(made, made.of(from), bases);
    else if (from !== null) origin = bases.get(from)?.tag;
    await using sandbox = await this.#fork(parent, action.kind === "run");
    const machine = this.#machine(sandbox, step.line);
    await machine.makeFolders(step.folders);
    if (action.kind === "run") {
      await machine.run(step, action, this.#stepTimeoutS);
    } else if (origin === undefined) {
      await machine.copy(step, action, this.#wish.context);
    } else {
      await using source = await this.#fork(origin, false);
      await machine.copyFrom(step, action, source);
    }
    return (await this.#link(step.key, step.config, sandbox.id, undefined)).tag;
  }

  async #fork(tag: string, isOnline: boolean): Promise<Sandbox> {
    const { network } = this.#options;
    const reach = isOnline && network !== undefined ? { network } : {};
    const ttlS = this.#stepTimeoutS + TTL_MARGIN_S;
    return await forkOne(this.#http, { tag, ttlS, ...reach, ...this.#signal });
  }

  #machine(sandbox: Sandbox, line: number): Machine {
    const { file } = this.#wish.dockerfile;
    return new Machine(sandbox, file, line, this.#seen, this.#options.signal);
  }

  /** Write the result: the last link, with the configuration, and the program if asked. */
  async #finish(
    made: Plan,
    key: string,
    end: string,
    replaced: Info<"SnapshotInfoDetail"> | undefined,
  ): Promise<Info<"SnapshotInfo">> {
    const { config, folders, stage } = made.last;
    const { tag, warm, ready } = this.#options;
    this.#seen.progress("save", "writing the result");
    await using sandbox = await this.#fork(end, false);
    const machine = this.#machine(sandbox, stage.from.line);
    await machine.makeFolders(folders);
    if (warm) {
      const program = programOf(config);
      this.#seen.progress("warm", program.join(" "));
      const args = ["/bin/sh", "-c", readyScript(ready), "sh", ...program];
      const step = { shown: "the image's program", config };
      await machine.execute(step, args, config.env, this.#stepTimeoutS);
    }
    if (replaced !== undefined) {
      const path = `/v2/snapshots/${quoted(replaced.tag)}`;
      await this.#http.send("DELETE", path, { timeoutS: WRITE_TIMEOUT_S, ...this.#signal });
    }
    return await this.#link(key, config, sandbox.id, tag);
  }

  /** Tell of the first steps of a stage, which were there. */
  #tell(made: Plan, stage: StagePlan, cached: number): Teller {
    const tell = new Teller(made, stage, this.#seen);
    for (const step of stage.steps.slice(0, cached)) tell.step(step, 0, true);
    return tell;
  }
}

/** Tells of the instructions of a stage in their order, those included that are no steps. */
class Teller {
  readonly #total: number;
  readonly #seen: Seen;
  readonly #notes: StagePlan["notes"][number][];

  constructor(made: Plan, stage: StagePlan, seen: Seen) {
    this.#total = made.total;
    this.#seen = seen;
    this.#notes = [...stage.notes];
  }

  /** Tell of a step that is done, and of what is before it. */
  step(step: Step, seconds: number, cached: boolean): void {
    this.#until(step.number);
    const { number, line, shown } = step;
    const total = this.#total;
    this.#seen.step({ number, total, line, text: shown, changesFiles: true, cached, seconds });
  }

  /** Tell of what is behind the last step. */
  end(): void {
    this.#until(this.#total + 1);
  }

  #until(behind: number): void {
    while ((this.#notes[0]?.number ?? behind) < behind) {
      const note = this.#notes.shift();
      if (note === undefined) return;
      const told = { changesFiles: false, cached: false, seconds: 0 };
      this.#seen.step({ ...note, total: this.#total, ...told });
    }
  }
}

/** Return what a call gives; undefined if what it asks for is not there. */
async function absentIfMissing<T>(asked: Promise<T>): Promise<T | undefined> {
  try {
    return await asked;
  } catch (error) {
    if (error instanceof NotFound) return undefined;
    throw error;
  }
}

/**
 * Return if a snapshot can be replaced.
 *
 * @throws {Conflict} Sandboxes or other snapshots need it, or the build itself does.
 */
function checkUnused(replaced: Info<"SnapshotInfoDetail"> | undefined, bases: Bases): void {
  if (replaced === undefined) return;
  const { tag } = replaced;
  if ([...bases.values()].some((base) => base.tag === tag)) {
    const said = "and cannot replace it; choose another tag";
    throw new Conflict(`the build begins with snapshot ${tag}, ${said}`, { context: { tag } });
  }
  const sandboxes = replaced.sandboxIds ?? [];
  const users = sandboxes.length > 0 ? sandboxes : (replaced.dependents ?? []);
  if (users.length === 0) return;
  throw new Conflict(
    `snapshot ${tag} is needed by ${users.slice(0, 5).join(", ")}, and cannot be replaced; choose ` +
      "another tag, or delete those first",
    { context: { tag } },
  );
}

/** Return a snapshot as what a stage begins with. */
function baseOf(info: Info<"SnapshotInfoDetail">, salt: string, where: string): Base {
  const { tag, status, config } = info;
  if (status !== "ready") throw refused(`${where}: snapshot ${tag} is ${status}`, "dockerfile");
  if (!config) {
    throw refused(
      `${where}: snapshot ${tag} does not say which variables and user its image has: it was made ` +
        "by an earlier release, or unpacked; make it again",
      "dockerfile",
    );
  }
  const keys = [info.imageKey, info.buildKey].map((key) => key ?? "None");
  const { stopSignal = "", ...said } = config;
  return {
    tag,
    identity: [tag, info.createdAtUnix, ...keys, salt].join(" "),
    config: { ...EMPTY, ...said, stop_signal: stopSignal },
    depth: info.chainDepth,
  };
}

/** Return what `sh` reads to start a program, its arguments, and to wait until it is ready. */
export function readyScript(ready: string | undefined, log = PROGRAM_LOG): string {
  const start = `"$@" </dev/null >${log} 2>&1 &\npid=$!\n`;
  if (ready === undefined) return start;
  const quotedReady = `'${ready.replaceAll("'", "'\\''")}'`;
  return `${start}until /bin/sh -c ${quotedReady}; do
  if ! kill -0 "$pid" 2>/dev/null; then
    wait "$pid"; code=$?
    cat ${log}; echo "the program has ended with $code"
    exit 1
  fi
  sleep 0.1
done
`;
}

/** Return what is asked for, as files of this host say. */
async function openWish(context: string, options: BuildOptions): Promise<Wish> {
  const { dockerfile, buildArgs = {}, target } = options;
  const root = resolve(context);
  const found = await stat(root).catch(() => undefined);
  if (!found?.isDirectory()) {
    const what = found === undefined ? "does not exist" : "is no folder";
    throw new NotFound(`the build context ${context} ${what}`, { context: { path: context } });
  }
  const file = dockerfile === undefined ? join(root, DOCKERFILE) : resolve(dockerfile);
  if (!(await isFile(file))) {
    throw new NotFound(`there is no Dockerfile at ${file}`, { context: { path: file } });
  }
  const said = parse(await textOf(file), dockerfile ?? DOCKERFILE);
  return new Wish(said, buildArgs, target, new Context(root, await ignoreOf(root, file)));
}

/** Return what is left out: a Dockerfile may have a list of its own. */
async function ignoreOf(root: string, file: string): Promise<Ignore> {
  const own = `${file.slice(dirname(file).length).replace(/^\//, "")}${IGNORE_FILE}`;
  for (const [folder, name] of [
    [dirname(file), own],
    [root, IGNORE_FILE],
  ] as const) {
    const path = join(folder, name);
    if (await isFile(path)) return parseIgnore(await textOf(path), name);
  }
  return new Ignore();
}

async function isFile(path: string): Promise<boolean> {
  return await stat(path).then(
    (found) => found.isFile(),
    () => false,
  );
}

/** Return what is in a file, as far as it is looked at. */
async function textOf(path: string): Promise<string> {
  try {
    await using file = await open(path);
    const data = new Uint8Array(DOCKERFILE_BYTES_MAX + 1);
    let length = 0;
    for (;;) {
      const { bytesRead } = await file.read(data, length, data.length - length, null);
      length += bytesRead;
      if (bytesRead === 0) break;
    }
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    return decoder.decode(data.subarray(0, length));
  } catch (error) {
    if (!(error instanceof Error)) throw error;
    if (!("syscall" in error)) throw refused(`${path} is not UTF-8 text`, "dockerfile");
    throw refused(`cannot read ${path}: ${reasonOf(error)}`, "dockerfile");
  }
}

function refused(message: string, field: string): InvalidRequest {
  return new InvalidRequest(message, { context: { field } });
}
