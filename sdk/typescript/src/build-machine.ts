/** What a step of a build does in its machine: run a program, copy files. */
import { createWriteStream } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, posix } from "node:path";
import { pipeline } from "node:stream/promises";
import { BUILD_CONTEXT_BYTES_MAX, type Context } from "./build-context.js";
import { type CopyAction, isWhole, type Part } from "./build-copying.js";
import { END, type Look, type Owner, Packer, type Pieces } from "./build-packing.js";
import type { RunAction, Step } from "./dockerfile-plan.js";
import { literally, Malformed, wrong } from "./dockerfile-words.js";
import { BuildError, ForkdError, InvalidRequest, NotFound } from "./errors.js";
import type { Progress } from "./http.js";
import type { BuildStep } from "./results.js";
import type { Sandbox } from "./sandbox.js";
import { TarFile } from "./tar-reader.js";
import { asBytes, cited } from "./text.js";

/** How many lines of a failed step's output are in its error. */
const LAST_LINES = 20;

/** How much of a line that a step prints is told. */
const LINE_CHARS_MAX = 200;

/** What programs say that find no network. */
const OFFLINE = ["resolve", "resolution", "network is unreachable", "network unreachable"];

/** Where a script is while a step runs it. */
const SCRIPT = "/tmp/.forkd-build-script";

/** How many files that could not be made an error names. */
const SKIPPED_SHOWN = 3;

const ROOT = "0:0";

/** What a build has done, and who is told. */
export class Seen {
  /** What was done. */
  readonly steps: BuildStep[] = [];
  readonly #onStep: ((step: BuildStep) => unknown) | undefined;
  readonly #onProgress: ((step: Progress) => unknown) | undefined;
  #last: string[] = [];

  constructor(
    onStep: ((step: BuildStep) => unknown) | undefined,
    onProgress: ((step: Progress) => unknown) | undefined,
  ) {
    this.#onStep = onStep;
    this.#onProgress = onProgress;
  }

  /** Note an instruction that is done. */
  step(step: BuildStep): void {
    this.steps.push(step);
    this.#onStep?.(step);
  }

  /** Tell what happens now. */
  progress(stage: string, message: string): void {
    const said = message.slice(0, LINE_CHARS_MAX);
    this.#onProgress?.({ event: "progress", stage, message: said, fraction: null });
  }

  /** Forget what was printed. */
  begin(): void {
    this.#last = [];
  }

  /** Tell what a program prints. */
  output(text: string): void {
    for (const line of text.split(/\r\n|\r|\n/)) {
      if (line.trim() === "") continue;
      this.#last = [...this.#last, line.slice(0, LINE_CHARS_MAX)].slice(-LAST_LINES);
      this.progress("run", line);
    }
  }

  /** Return the end of what a program has printed, and what that may mean. */
  said(): string {
    const text = this.#last.join("\n") || "it printed nothing";
    if (!OFFLINE.some((words) => text.toLowerCase().includes(words))) return text;
    const advice = 'steps have no network unless the build is given one: network: "internet"';
    return `${text}\n${advice}`;
  }
}

/** The sandbox of a step. */
export class Machine {
  readonly #sandbox: Sandbox;
  readonly #file: string;
  readonly #line: number;
  readonly #seen: Seen;
  readonly #options: { signal?: AbortSignal };

  /**
   * @param file The Dockerfile, for errors.
   * @param line Where the step is in it.
   */
  constructor(
    sandbox: Sandbox,
    file: string,
    line: number,
    seen: Seen,
    signal: AbortSignal | undefined,
  ) {
    this.#sandbox = sandbox;
    this.#file = file;
    this.#line = line;
    this.#seen = seen;
    this.#options = signal === undefined ? {} : { signal };
  }

  /** Make working directories that are missing. */
  async makeFolders(folders: readonly string[]): Promise<void> {
    for (const folder of folders) {
      await this.#sandbox.files.makeDir(folder, { parents: true, user: ROOT, ...this.#options });
    }
  }

  /**
   * Run a program.
   *
   * @throws {BuildError} It failed; the end of what it printed is in the message.
   */
  async run(step: Step, action: RunAction, timeoutS: number): Promise<void> {
    const env = { ...action.env, ...action.hidden };
    if (action.script === null) {
      await this.execute(step, action.args, env, timeoutS);
      return;
    }
    const { files } = this.#sandbox;
    const options = { mode: 0o755, makeParents: true, ...this.#options };
    await files.write(SCRIPT, action.script, options);
    await this.execute(step, [SCRIPT], env, timeoutS);
    await files.remove(SCRIPT, this.#options);
  }

  /** Run a program with the folder and the user of a step; throws as `run`. */
  async execute(
    step: Pick<Step, "shown" | "config">,
    args: readonly string[],
    env: Readonly<Record<string, string>>,
    timeoutS: number,
  ): Promise<void> {
    const seen = this.#seen;
    seen.begin();
    const result = await this.#within(
      step.shown,
      this.#sandbox.exec(args, {
        check: false,
        timeoutS,
        env,
        cwd: step.config.cwd,
        user: step.config.user,
        onStdout: (text: string) => seen.output(text),
        onStderr: (text: string) => seen.output(text),
        ...this.#options,
      }),
    );
    if (result.exitCode === 0) return;
    const how = result.timedOut
      ? `was not done after ${timeoutS.toFixed(0)} s`
      : `exited with ${result.exitCode}`;
    throw this.#failed(`${step.shown}: ${how}\n${seen.said()}`);
  }

  /**
   * Copy files of the context.
   *
   * @throws {BuildError} One could not be made.
   * @throws {InvalidRequest} One cannot be read, or was changed meanwhile.
   */
  async copy(step: Step, action: CopyAction, context: Context): Promise<void> {
    const packers: [Part, Packer][] = [];
    for (const part of action.parts) {
      packers.push([part, new Packer(await this.#look(action, part))]);
    }
    const [first] = action.parts;
    const [folder, name] = await this.#place(action, first !== undefined && isWhole(first));
    await this.#write(step, folder, packed(packers, context, name));
  }

  /**
   * Copy files of another machine.
   *
   * @throws {BuildError} There are none, or one could not be made.
   */
  async copyFrom(step: Step, action: CopyAction, source: Sandbox): Promise<void> {
    for (const part of action.parts) {
      const look = await this.#look(action, part);
      const paths = await this.#matches(source, part.said);
      if (paths.length > 1 && !action.isFolder) {
        const said = cited(part.said);
        throw this.#wrong(
          `COPY: ${said} matches several, so that ${cited(action.target)} must end with /`,
        );
      }
      for (const path of paths) await this.#copyOne(step, action, source, path, look);
    }
  }

  async #copyOne(
    step: Step,
    action: CopyAction,
    source: Sandbox,
    path: string,
    look: Look,
  ): Promise<void> {
    const skipped: string[] = [];
    const here = await mkdtemp(join(tmpdir(), "forkd-build-"));
    try {
      const file = join(here, "tar");
      await this.#fetch(source, path, file);
      await using archive = await this.#opened(file);
      const [first] = await archive.members();
      const whole = first === undefined || first.kind === "folder";
      const [folder, name] = await this.#place(action, whole);
      const called = whole ? undefined : (name ?? posix.basename(path));
      await this.#write(step, folder, ended(new Packer(look).ofArchive(archive, called, skipped)));
    } finally {
      await rm(here, { recursive: true, force: true });
    }
    for (const said of skipped) this.#seen.progress("copy", `left out of ${path}: ${said}`);
  }

  async #opened(file: string): Promise<TarFile> {
    return await TarFile.open(asBytes(file), BUILD_CONTEXT_BYTES_MAX);
  }

  /** Write the archive of what is at a path to a file. */
  async #fetch(source: Sandbox, path: string, file: string): Promise<void> {
    const most = BUILD_CONTEXT_BYTES_MAX;
    const tooLarge = this.#failed(`${path} holds more than ${most} bytes`);
    const pieces = source.files.openArchive(path, this.#options);
    async function* counted(): Pieces {
      let size = 0;
      for await (const piece of pieces) {
        size += piece.length;
        if (size > most) throw tooLarge;
        yield piece;
      }
    }
    try {
      await pipeline(counted, createWriteStream(file));
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
      throw this.#failed(`COPY: no ${cited(path)} where it copies from`, error);
    }
  }

  /** Return the paths that a source means: patterns are in its last name alone. */
  async #matches(source: Sandbox, path: string): Promise<string[]> {
    const { dir, base } = posix.parse(path);
    if (!/[*?[]/.test(path)) return [path];
    if (/[*?[]/.test(dir)) throw this.#wrong(`${cited(path)} has a pattern before its last name`);
    const pattern = matcher(base);
    let found: string[];
    try {
      found = (await source.files.list(dir, this.#options)).map((each) => each.name);
    } catch (error) {
      if (!(error instanceof ForkdError)) throw error;
      throw this.#failed(`COPY: ${error.message}`, error);
    }
    const matching = found.filter((each) => pattern.test(each));
    if (matching.length > 0) return matching.map((each) => posix.join(dir, each));
    throw this.#failed(`COPY: nothing matches ${cited(path)} where it copies from`);
  }

  async #write(step: Step, folder: string, pieces: Pieces): Promise<void> {
    let fault: unknown;
    async function* watched(): Pieces {
      try {
        yield* pieces;
      } catch (error) {
        fault = error;
        throw error;
      }
    }
    const options = { user: ROOT, keepOwner: true, ...this.#options };
    try {
      const made = await this.#sandbox.files.writeArchive(folder, watched(), options);
      if (made.skipped.length === 0) return;
      const some = made.skipped.slice(0, SKIPPED_SHOWN);
      const said = some.map((each) => `${each.path}: ${each.reason}`).join(", ");
      throw this.#failed(`${step.shown}: not all could be made: ${said}`);
    } catch (error) {
      if (fault instanceof Malformed) throw this.#wrong(fault.message);
      throw fault ?? error;
    }
  }

  /** Return the folder into which copies go, and what an only file is called there. */
  async #place(
    action: CopyAction,
    whole: boolean,
  ): Promise<[folder: string, name: string | undefined]> {
    const { target } = action;
    if (whole || action.isFolder || (await this.#isFolder(target))) return [target, undefined];
    return [posix.dirname(target), posix.basename(target)];
  }

  async #isFolder(path: string): Promise<boolean> {
    const { files } = this.#sandbox;
    try {
      const found = await files.stat(path, this.#options);
      if (found.kind !== "symlink") return found.kind === "directory";
      await files.list(path, this.#options);
      return true;
    } catch (error) {
      if (error instanceof ForkdError) return false;
      throw error;
    }
  }

  /** Return whose copies are, and their permissions. */
  async #look(action: CopyAction, part: Part): Promise<Look> {
    const { owner, mode } = action;
    if (owner === null) {
      return { owner: part.unpacked ? undefined : { uid: 0, gid: 0 }, mode };
    }
    const isNumeric = /^[\d:]+$/.test(owner);
    const passwd = isNumeric ? "" : await this.#text("/etc/passwd");
    const group = isNumeric ? "" : await this.#text("/etc/group");
    try {
      return { owner: ownerOf(owner, passwd, group), mode };
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      throw this.#failed(`--chown=${owner}: ${error.message}`);
    }
  }

  async #text(path: string): Promise<string> {
    try {
      return new TextDecoder().decode(await this.#sandbox.files.read(path, this.#options));
    } catch (error) {
      if (error instanceof NotFound) return "";
      throw error;
    }
  }

  async #within<T>(shown: string, work: Promise<T>): Promise<T> {
    try {
      return await work;
    } catch (error) {
      const isOurs = error instanceof NotFound || error instanceof InvalidRequest;
      throw isOurs ? this.#failed(`${shown}: ${error.message}`, error) : error;
    }
  }

  #failed(message: string, cause?: unknown): BuildError {
    return new BuildError(`${this.#file}:${this.#line}: ${message}`, { cause });
  }

  #wrong(message: string): InvalidRequest {
    return wrong(this.#file, this.#line, message);
  }
}

async function* ended(pieces: Pieces): Pieces {
  yield* pieces;
  yield END;
}

/** Yield the archive of what a step copies from the context. */
async function* packed(
  packers: readonly [Part, Packer][],
  context: Context,
  name: string | undefined,
): Pieces {
  for (const [part, packer] of packers) yield* packer.ofContext(context, part, name ?? part.name);
  yield END;
}

/** Return what a pattern of names matches, as in a shell. */
function matcher(pattern: string): RegExp {
  const said = pattern.replace(
    /\*|\?|\[(!?)([^\]]+|\][^\]]*)\]|[\s\S]/gu,
    (char, negated: string | undefined, inside: string | undefined) => {
      if (char === "*") return ".*";
      if (char === "?") return ".";
      if (inside === undefined) return literally(char);
      return `[${negated ? "^" : ""}${inside.replace(/[\\[\]^]/g, "\\$&")}]`;
    },
  );
  return new RegExp(`^${said}$`, "su");
}

/**
 * Return the numbers of a user and a group.
 *
 * @param text Names or numbers, with `:` and a group or without.
 * @param passwd The machine's `/etc/passwd`.
 * @param group Its `/etc/group`.
 * @throws {Malformed} The machine has no such user or group.
 */
export function ownerOf(text: string, passwd: string, group: string): Owner {
  const [user = "", wanted = ""] = text.split(":");
  const fields = (table: string, name: string, least: number): string[] | undefined =>
    table
      .split("\n")
      .map((line) => line.split(":"))
      .findLast((each) => each[0] === name && each.length > least);
  let owner: Owner;
  const account = fields(passwd, user, 3);
  if (/^\d+$/.test(user)) owner = { uid: Number(user), gid: Number(user) };
  else if (account !== undefined) owner = { uid: Number(account[2]), gid: Number(account[3]) };
  else throw new Malformed(`the image has no user ${cited(user)}`);
  if (wanted === "") return owner;
  if (/^\d+$/.test(wanted)) return { ...owner, gid: Number(wanted) };
  const found = fields(group, wanted, 2);
  if (found === undefined) throw new Malformed(`the image has no group ${cited(wanted)}`);
  return { ...owner, gid: Number(found[2]) };
}
