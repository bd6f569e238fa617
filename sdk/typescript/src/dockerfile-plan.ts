/**
 * What a build does: steps in their order, each with the key under which its result is cached.
 *
 * A step is an instruction that changes files: RUN, COPY, ADD.  Its key is a digest of the key of
 * the step before it, of what it does and with which files, variables, folder and user.  What else
 * an instruction changes is the image's configuration, which only the last link of a build has.
 *
 * A plan is made twice: before anything is asked of a daemon, when variables of base images are not
 * known, to find what is wrong; and afterwards, for the keys.  They are those of the Python SDK, so
 * that either finds what the other has built.
 */
import { createHash } from "node:crypto";
import { CHAIN_DEPTH_MAX } from "./answers.gen.js";
import type { Context } from "./build-context.js";
import { type CopyAction, copyAction, saidOf } from "./build-copying.js";
import { flag, type Instruction, shown } from "./dockerfile-reading.js";
import { apply, type Config, declared, EMPTY, pairs, parted } from "./dockerfile-settings.js";
import { type Dockerfile, PLATFORM, type Stage } from "./dockerfile-stages.js";
import { Expander, Malformed, split, wrong } from "./dockerfile-words.js";
import { InvalidRequest } from "./errors.js";
import { byCharacters, cited } from "./text.js";

/** Is part of each key: a change of what steps do needs other keys. */
const KEY_FORMAT = "forkd build 1";

/** Build arguments that each Dockerfile can declare without a value. */
const PLATFORM_ARGS: Readonly<Record<string, string>> = {
  TARGETPLATFORM: PLATFORM,
  BUILDPLATFORM: PLATFORM,
  TARGETOS: "linux",
  BUILDOS: "linux",
  TARGETARCH: "amd64",
  BUILDARCH: "amd64",
  TARGETVARIANT: "",
  BUILDVARIANT: "",
};

/** Build arguments that need not be declared, and are in no key. */
const PROXY_ARGS: ReadonlySet<string> = new Set(
  ["HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY"].flatMap((name) => [
    name,
    name.toLowerCase(),
  ]),
);

const SECRET = /(?:^|_)(?:apikey|auth|credentials?|key|passwd|password|secret|token)(?:_|$)/i;
const HEREDOC_ALONE = /^[0-9]*<<-?\S+$/;

type Variables = Readonly<Record<string, string>>;

/** A program that a step runs. */
export interface RunAction {
  kind: "run";
  /** It, with its arguments; the script's own arguments if there is one. */
  args: readonly string[];
  /** A program that is written to the machine for this, and removed; null for none. */
  script: string | null;
  /** All variables that it has. */
  env: Variables;
  /** Variables besides, which are in no key. */
  hidden: Variables;
}

/** A step. */
export interface Step {
  /** Which instruction of the build it is, from 1. */
  number: number;
  /** Where it is in the Dockerfile. */
  line: number;
  /** It, in one line. */
  shown: string;
  /** Names what comes of it. */
  key: string;
  /** The image's configuration where it is. */
  config: Config;
  /** Folders that are made before it. */
  folders: readonly string[];
  /** What is done. */
  action: RunAction | CopyAction;
}

/** A snapshot that a stage begins with. */
export interface Base {
  /** Its name. */
  tag: string;
  /** Names its contents. */
  identity: string;
  /** What it says of programs in it. */
  config: Config;
  /** How many snapshots are under it. */
  depth: number;
}

/** The snapshots of images, by the names that are given. */
export type Bases = ReadonlyMap<string, Base>;

/** An instruction that is no step. */
export interface Note {
  number: number;
  line: number;
  text: string;
}

/** What is done for one stage. */
export interface StagePlan {
  stage: Stage;
  /** The snapshot, or the stage, that it begins with; undefined while that is not known. */
  base: Base | number | undefined;
  /** What is done to it. */
  steps: readonly Step[];
  /** The instructions that are no steps. */
  notes: readonly Note[];
  /** Its configuration at the end. */
  config: Config;
  /** Folders that are made at the end. */
  folders: readonly string[];
  /** The key of its last step, or of what it begins with. */
  key: string;
  /** How many links are under its end. */
  depth: number;
}

/** What is done for a build. */
export class Plan {
  /** What is done for each stage that is needed, in order. */
  readonly stages: readonly StagePlan[];
  /** The stage that is wanted. */
  readonly last: StagePlan;
  /** How many instructions these have. */
  readonly total: number;
  /** What was understood, and has no effect here, or a risk. */
  readonly warnings: readonly string[];

  constructor(stages: readonly StagePlan[], total: number, warnings: readonly string[]) {
    const last = stages.at(-1);
    if (last === undefined) throw new Error("a Dockerfile has at least one stage");
    this.stages = stages;
    this.last = last;
    this.total = total;
    this.warnings = warnings;
  }

  /** Return the plan of a stage by its number in the Dockerfile. */
  of(index: number): StagePlan {
    return this.stages.find((each) => each.stage.index === index) ?? this.last;
  }

  /**
   * Return the key of the last link, which has the configuration.
   *
   * @param said What else its contents depend on.
   */
  imageKey(...said: (boolean | string | null)[]): string {
    const { key, config, folders } = this.last;
    return digest("image", key, said, config, folders);
  }
}

/** Return the digest of values that JSON has. */
function digest(...parts: unknown[]): string {
  return createHash("sha256")
    .update(canonical([KEY_FORMAT, ...parts]))
    .digest("hex");
}

/** Return a value as Python writes its JSON: in ASCII, without blanks, members by name. */
function canonical(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const members = Object.entries(value).sort(([a], [b]) => byCharacters(a, b));
    const said = members.map(([name, each]) => `${canonical(name)}:${canonical(each)}`);
    return `{${said.join(",")}}`;
  }
  return JSON.stringify(value ?? null).replace(
    /[\u007f-\uffff]/g,
    (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Do something; what is malformed in it is said with file and line. */
async function located<T>(file: string, each: Instruction, work: () => T | Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw wrong(file, each.line, `${each.keyword}: ${error.message}`);
  }
}

/** What is asked for. */
export class Wish {
  /** The Dockerfile. */
  readonly dockerfile: Dockerfile;
  /** Build arguments. */
  readonly args: Variables;
  /** Where COPY and ADD find files. */
  readonly context: Context;
  readonly #target: string | undefined;

  constructor(
    dockerfile: Dockerfile,
    args: Variables,
    target: string | undefined,
    context: Context,
  ) {
    this.dockerfile = dockerfile;
    this.args = args;
    this.context = context;
    this.#target = target;
  }

  /**
   * Return if each build argument is declared.
   *
   * @throws {InvalidRequest} One is not, or there is no such stage.
   */
  check(): void {
    const { file, before, stages } = this.dockerfile;
    this.dockerfile.target(this.#target);
    const lines = [...before, ...stages.flatMap((stage) => stage.instructions)];
    const declaring = lines.filter((each) => each.keyword === "ARG");
    const known = new Set(
      declaring.flatMap((each) => split(each.rest).map((word) => parted(word)[0])),
    );
    for (const name of Object.keys(this.args)) {
      if (known.has(name) || PROXY_ARGS.has(name)) continue;
      const there = [...known].sort(byCharacters).join(", ") || "none";
      const said = `no ARG declares the build argument ${cited(name)}; declared are: ${there}`;
      throw wrong(file, 1, said);
    }
  }

  /** Return the variables that FROM can use. */
  async globals(): Promise<Record<string, string>> {
    const found: Record<string, string> = { ...PLATFORM_ARGS };
    for (const each of this.dockerfile.before) {
      const words = new Expander(this.dockerfile.escape, found);
      const made = await located(this.dockerfile.file, each, () => declared(each, words));
      for (const [name, fallback] of made) {
        const value = this.arg(name) ?? fallback;
        if (value !== undefined) found[name] = value;
      }
    }
    return found;
  }

  /** Return the value that the caller gives to a build argument. */
  arg(name: string): string | undefined {
    return Object.hasOwn(this.args, name) ? this.args[name] : undefined;
  }

  /**
   * Return what a stage begins with: another stage, or the name of an image.
   *
   * @throws {InvalidRequest} A variable in it is not set, or no machine can be made of it.
   */
  async baseOf(stage: Stage): Promise<Stage | string> {
    const { file } = this.dockerfile;
    const words = new Expander(this.dockerfile.escape, await this.globals());
    const [name, platform] = await located(file, stage.from, () => [
      words.word(stage.base),
      words.word(flag(stage.from, "platform") || PLATFORM),
    ]);
    const { line } = stage.from;
    if (!name || words.unknown.size > 0) {
      const unset = [...words.unknown].sort(byCharacters).join(", ") || "nothing";
      throw wrong(
        file,
        line,
        `FROM ${stage.base} needs ${unset}, which is not set: declare it with ARG before FROM, and ` +
          "give it a value there or with `buildArgs`",
      );
    }
    if (platform !== PLATFORM) {
      throw wrong(file, line, `--platform=${platform} is not supported: ${PLATFORM} is`);
    }
    if (name === "scratch") {
      throw wrong(
        file,
        line,
        "FROM scratch is not supported: a machine needs a root file system to boot, and scratch " +
          "has no files; begin with a small image, such as busybox or alpine",
      );
    }
    return this.dockerfile.find(name, stage.index) ?? name;
  }

  /** Return the stages that are needed for the one that is wanted, in order. */
  async needed(): Promise<Stage[]> {
    const wanted = new Set([this.dockerfile.target(this.#target).index]);
    for (const stage of this.dockerfile.stages.toReversed()) {
      if (!wanted.has(stage.index)) continue;
      const base = await this.baseOf(stage);
      if (typeof base !== "string") wanted.add(base.index);
      for (const each of stage.instructions) {
        const origin = originOf(this.dockerfile, stage, each);
        if (typeof origin === "number") wanted.add(origin);
      }
    }
    return this.dockerfile.stages.filter((stage) => wanted.has(stage.index));
  }

  /** Return the images that are needed, by the name that is given, with a line that does. */
  async images(): Promise<Map<string, number>> {
    const found = new Map<string, number>();
    for (const stage of await this.needed()) {
      const base = await this.baseOf(stage);
      if (typeof base === "string" && !found.has(base)) found.set(base, stage.from.line);
      for (const each of stage.instructions) {
        const origin = originOf(this.dockerfile, stage, each);
        if (typeof origin === "string" && !found.has(origin)) found.set(origin, each.line);
      }
    }
    return found;
  }
}

/**
 * Return what a COPY copies from: a stage's number, an image's name; null for the context.
 *
 * @throws {InvalidRequest} There is no such stage before it.
 */
function originOf(dockerfile: Dockerfile, stage: Stage, each: Instruction): number | string | null {
  const name = flag(each, "from");
  if (each.keyword !== "COPY" || name === undefined) return null;
  const { file } = dockerfile;
  if (name.includes("$")) {
    const said = "--from cannot have variables; name a stage, and use the variable in its FROM";
    throw wrong(file, each.line, said);
  }
  const found = dockerfile.find(name, stage.index);
  if (found !== undefined) return found.index;
  if (/[:/@]/.test(name)) return name;
  const isLater = dockerfile.find(name) !== undefined;
  const where = isLater ? `, as it is not before line ${each.line}` : "";
  const called = name.slice(0, 80);
  throw wrong(
    file,
    each.line,
    `--from=${called}: there is no such stage${where}; ${dockerfile.names()}. An image is written ` +
      `with its tag, as ${called}:latest`,
  );
}

/**
 * Return what is to be done.
 *
 * @param bases The images that are needed, by the names of `Wish.images`; undefined to look for
 *   errors before they are known.
 * @throws {InvalidRequest} Something is wrong; the line is named.
 */
export async function plan(wish: Wish, bases?: Bases): Promise<Plan> {
  wish.check();
  const made = new Map<number, StagePlan>();
  const warnings: string[] = [];
  let number = 0;
  for (const stage of await wish.needed()) {
    const named = await wish.baseOf(stage);
    const planner = new Planner(wish, stage, named, made, bases, number);
    made.set(stage.index, await planner.plan());
    number += stage.instructions.length;
    warnings.push(...planner.warnings);
  }
  return new Plan([...made.values()], number, warnings);
}

/** Plans one stage. */
class Planner {
  readonly warnings: string[] = [];
  readonly #wish: Wish;
  readonly #stage: Stage;
  readonly #made: ReadonlyMap<number, StagePlan>;
  readonly #bases: Bases | undefined;
  readonly #base: Base | number | undefined;
  readonly #isKnown: boolean;
  readonly #args: Record<string, string> = {};
  readonly #steps: Step[] = [];
  readonly #notes: Note[] = [];
  #number: number;
  #folders: string[] = [];
  #config = EMPTY;
  #key = "";
  #depth = 0;
  #cmdIsOwn = false;

  constructor(
    wish: Wish,
    stage: Stage,
    named: Stage | string,
    made: ReadonlyMap<number, StagePlan>,
    bases: Bases | undefined,
    number: number,
  ) {
    this.#wish = wish;
    this.#stage = stage;
    this.#made = made;
    this.#bases = bases;
    this.#number = number;
    this.#isKnown = bases !== undefined;
    if (typeof named !== "string") {
      const under = made.get(named.index);
      this.#base = named.index;
      this.#config = under?.config ?? EMPTY;
      this.#key = under?.key ?? "";
      this.#depth = under?.depth ?? 0;
      this.#folders = [...(under?.folders ?? [])];
    } else {
      const base = bases?.get(named);
      this.#base = base;
      if (base === undefined) return;
      this.#config = base.config;
      this.#key = digest("base", base.identity);
      this.#depth = base.depth;
    }
  }

  get #file(): string {
    return this.#wish.dockerfile.file;
  }

  async plan(): Promise<StagePlan> {
    for (const each of this.#stage.instructions) {
      this.#number += 1;
      const words = new Expander(this.#wish.dockerfile.escape, this.#variables());
      try {
        await located(this.#file, each, () => this.#take(each, words));
      } catch (error) {
        // what a base image sets may be what is missing
        const isExcused = !this.#isKnown && words.unknown.size > 0;
        if (!(error instanceof InvalidRequest) || !isExcused) throw error;
      }
    }
    return {
      stage: this.#stage,
      base: this.#base,
      steps: this.#steps,
      notes: this.#notes,
      config: this.#config,
      folders: this.#folders,
      key: this.#key,
      depth: this.#depth,
    };
  }

  #variables(): Record<string, string> {
    return { ...this.#args, ...this.#config.env };
  }

  async #take(each: Instruction, words: Expander): Promise<void> {
    const { keyword, line } = each;
    if (keyword === "RUN") {
      this.#step(each, this.#run(each));
      return;
    }
    if (keyword === "COPY" || keyword === "ADD") {
      const origin = originOf(this.#wish.dockerfile, this.#stage, each);
      const { context } = this.#wish;
      this.#step(each, await copyAction(each, words, this.#config.cwd, context, origin));
      return;
    }
    this.#notes.push({ number: this.#number, line, text: shown(each) });
    if (keyword === "ARG") {
      await this.#declare(each, words);
      return;
    }
    this.#config = apply(this.#config, each, words);
    if (keyword === "WORKDIR") this.#folders.push(this.#config.cwd);
    else if (keyword === "CMD") this.#cmdIsOwn = true;
    else if (keyword === "ENTRYPOINT" && !this.#cmdIsOwn) {
      this.#config = { ...this.#config, cmd: null }; // the base's are for its own program
    } else if (keyword === "VOLUME") {
      this.#warn(each, "VOLUME has no effect: each sandbox has a disk of its own");
    } else if (keyword === "MAINTAINER") {
      this.#warn(each, "MAINTAINER is out of date; write LABEL maintainer=…");
    } else if (keyword === "ENV") {
      this.#warnOfSecrets(each, Object.keys(pairs(each.rest, words, "ENV")));
    }
  }

  async #declare(each: Instruction, words: Expander): Promise<void> {
    const found = declared(each, words);
    const known = await this.#wish.globals();
    this.#warnOfSecrets(each, [...found.keys()]);
    for (const [name, fallback] of found) {
      const value = this.#wish.arg(name) ?? fallback ?? known[name];
      if (value !== undefined) this.#args[name] = value;
    }
  }

  #run(each: Instruction): RunAction {
    const env = this.#variables();
    const hidden = Object.fromEntries(
      Object.entries(this.#wish.args).filter(
        ([name]) => PROXY_ARGS.has(name) && !Object.hasOwn(env, name),
      ),
    );
    const made = { kind: "run", script: null, env, hidden } as const;
    if (each.words !== undefined) {
      if (each.words.length === 0) throw new Malformed("there is no program to run");
      return { ...made, args: each.words };
    }
    const { shell } = this.#config;
    const [first, ...others] = each.heredocs;
    if (first !== undefined && others.length === 0 && HEREDOC_ALONE.test(each.rest)) {
      const { content } = first;
      if (content.startsWith("#!")) return { ...made, args: [], script: content };
      return { ...made, args: [...shell, content] };
    }
    const behind = each.heredocs.map((heredoc) => `\n${heredoc.raw}`).join("");
    return { ...made, args: [...shell, each.rest + behind] };
  }

  #step(each: Instruction, action: RunAction | CopyAction): void {
    this.#depth += 1;
    if (this.#depth >= CHAIN_DEPTH_MAX) {
      throw new Malformed(
        `this is step ${this.#depth} of a chain, and a chain has at most ${CHAIN_DEPTH_MAX} links ` +
          "with the last one; join steps, or begin with a compacted snapshot",
      );
    }
    const config = this.#config;
    const places = [config.env, config.cwd, config.user];
    this.#key = digest("step", this.#key, this.#said(action), places, this.#folders);
    this.#steps.push({
      number: this.#number,
      line: each.line,
      shown: shown(each),
      key: this.#key,
      config,
      folders: [...new Set(this.#folders)],
      action,
    });
    this.#folders = [];
  }

  #said(action: RunAction | CopyAction): unknown[] {
    if (action.kind === "run") return ["run", action.args, action.script, action.env];
    let origin: string | null = null;
    if (typeof action.origin === "number") origin = this.#made.get(action.origin)?.key ?? null;
    else if (action.origin !== null) origin = this.#bases?.get(action.origin)?.identity ?? null;
    return ["copy", origin, ...saidOf(action)];
  }

  #warn(each: Instruction, message: string): void {
    this.warnings.push(`${this.#file}:${each.line}: ${message}`);
  }

  #warnOfSecrets(each: Instruction, names: readonly string[]): void {
    for (const name of names) {
      if (!SECRET.test(name)) continue;
      const said = `${each.keyword} ${name} looks like a secret, and stays in snapshots`;
      this.#warn(each, said);
    }
  }
}
