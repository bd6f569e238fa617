/** A Dockerfile as stages; what no build of it could do is refused here, before there is a build. */
import { type Instruction, read } from "./dockerfile-reading.js";
import { split, wrong } from "./dockerfile-words.js";
import { byCharacters, cited } from "./text.js";

/** Instructions, and the flags that each may have. */
const SUPPORTED: Readonly<Record<string, readonly string[]>> = {
  ADD: ["chown", "chmod", "link"],
  ARG: [],
  CMD: [],
  COPY: ["from", "chown", "chmod", "link"],
  ENTRYPOINT: [],
  ENV: [],
  EXPOSE: [],
  FROM: ["platform"],
  HEALTHCHECK: ["interval", "timeout", "start-period", "start-interval", "retries"],
  LABEL: [],
  MAINTAINER: [],
  RUN: [],
  SHELL: [],
  STOPSIGNAL: [],
  USER: [],
  VOLUME: [],
  WORKDIR: [],
};

/** Instructions that Docker knows, and why there are none of them here. */
const REFUSED: Readonly<Record<string, string>> = {
  ONBUILD: "it is for builds of other images; write the instruction into their Dockerfiles",
};

/** Flags that Docker knows, and what to do instead. */
const REFUSED_FLAGS: Readonly<Record<string, string>> = {
  "RUN mount": "a step sees only what the steps before it have left; COPY what it needs",
  "RUN network": "the network of all steps is chosen with the option `network` of the build",
  "RUN security": "each step has a machine of its own, in which it may be root",
  "RUN device": "a machine has no devices of the host",
  "COPY parents": "name each file with its folder",
  "COPY exclude": "list the files in .dockerignore",
  "ADD exclude": "list the files in .dockerignore",
  "ADD checksum": "it is for remote files, which ADD does not fetch here",
  "ADD keep-git-dir": "it is for repositories, which ADD does not fetch here",
  "ADD unpack": "an archive of the context is always unpacked by ADD, and never by COPY",
};

/** How many letters a keyword may be apart from one that is suggested. */
const TYPOS_MAX = 2;

/** The only platform. */
export const PLATFORM = "linux/amd64";

/** One stage: a base, and what is done to it. */
export interface Stage {
  /** Its number, from 0. */
  index: number;
  /** What it is called, in small letters; undefined for nothing. */
  name: string | undefined;
  /** What its FROM names, variables not replaced. */
  base: string;
  /** Its FROM. */
  from: Instruction;
  /** All of its instructions, its FROM first. */
  instructions: Instruction[];
}

/** A Dockerfile in which nothing is wrong as far as its text says. */
export class Dockerfile {
  /** What it is called in errors. */
  readonly file: string;
  /** Its escape character. */
  readonly escape: string;
  /** The ARGs before the first FROM. */
  readonly before: readonly Instruction[];
  /** Its stages. */
  readonly stages: readonly [Stage, ...Stage[]];

  constructor(
    file: string,
    mark: string,
    before: readonly Instruction[],
    stages: readonly [Stage, ...Stage[]],
  ) {
    this.file = file;
    this.escape = mark;
    this.before = before;
    this.stages = stages;
  }

  /** Return the stage of a name or a number among the first `before`. */
  find(name: string, before: number = this.stages.length): Stage | undefined {
    return this.stages
      .slice(0, before)
      .findLast((each) => name.toLowerCase() === each.name || name === String(each.index));
  }

  /**
   * Return the stage that is to be built: the last one unless another is named.
   *
   * @throws {InvalidRequest} There is none of that name.
   */
  target(name: string | undefined): Stage {
    const last = this.stages.at(-1) ?? this.stages[0];
    const found = name === undefined ? last : this.find(name);
    if (found !== undefined) return found;
    throw wrong(this.file, last.from.line, `no stage ${cited(name ?? "")}; ${this.names()}`);
  }

  /** Return which stages there are, as a part of a sentence. */
  names(): string {
    const named = this.stages.map((stage) => stage.name ?? String(stage.index));
    return `its stages are ${named.join(", ")}`;
  }
}

/**
 * Return what a Dockerfile says.
 *
 * @param file What it is called in errors.
 * @throws {InvalidRequest} Something in it is wrong or not supported; the line is named.
 */
export function parse(text: string, file: string): Dockerfile {
  const [instructions, mark] = read(text, file);
  for (const each of instructions) check(each, file);
  const before: Instruction[] = [];
  const stages: Stage[] = [];
  for (const each of instructions) {
    const last = stages.at(-1);
    if (each.keyword === "FROM") stages.push(stageOf(each, stages, file));
    else if (last !== undefined) last.instructions.push(each);
    else if (each.keyword === "ARG") before.push(each);
    else throw wrong(file, each.line, `${each.keyword} is before the first FROM`);
  }
  const [first, ...others] = stages;
  if (first === undefined) {
    throw wrong(file, 1, "there is no FROM, which says what to begin with");
  }
  return new Dockerfile(file, mark, before, [first, ...others]);
}

/** Return if nothing is wrong with an instruction wherever it is. */
function check(each: Instruction, file: string): void {
  const { keyword, line } = each;
  const why = own(REFUSED, keyword);
  if (why !== undefined) throw wrong(file, line, `${keyword} is not supported: ${why}`);
  const flags = own(SUPPORTED, keyword);
  if (flags === undefined) {
    const close = Object.keys(SUPPORTED).filter((known) => apart(keyword, known) <= TYPOS_MAX);
    close.sort((a, b) => shared(keyword, b) - shared(keyword, a));
    const meant = close[0] === undefined ? "" : `; did you mean ${close[0]}?`;
    throw wrong(file, line, `${cited(keyword, 40)} is no instruction${meant}`);
  }
  for (const [name, value] of each.flags) checkFlag(each, name, value, flags, file);
  if (each.rest === "" && !each.words?.length) {
    throw wrong(file, line, `${keyword} needs an argument`);
  }
}

function checkFlag(
  each: Instruction,
  name: string,
  value: string | undefined,
  flags: readonly string[],
  file: string,
): void {
  const { keyword, line } = each;
  const why = own(REFUSED_FLAGS, `${keyword} ${name}`);
  if (why !== undefined) {
    throw wrong(file, line, `${keyword} --${name} is not supported: ${why}`);
  }
  if (!flags.includes(name)) {
    const sorted = [...flags].sort(byCharacters).map((known) => `--${known}`);
    const known = sorted.join(", ") || "none";
    const said = `${keyword} has no flag --${name.slice(0, 40)}; its flags are: ${known}`;
    throw wrong(file, line, said);
  }
  if (each.flags.filter(([other]) => other === name).length > 1) {
    throw wrong(file, line, `--${name} is there twice`);
  }
  if (!value && name !== "link") {
    throw wrong(file, line, `--${name} needs a value, as --${name}=VALUE`);
  }
}

/** Return the stage that a FROM begins. */
function stageOf(each: Instruction, stages: readonly Stage[], file: string): Stage {
  const [base = "", ...rest] = split(each.rest);
  let name: string | undefined;
  if (rest.length > 0) {
    const [as = "", said = ""] = rest;
    if (rest.length !== 2 || as.toUpperCase() !== "AS") {
      const given = cited(each.rest);
      throw wrong(file, each.line, `FROM is \`FROM IMAGE [AS NAME]\`, not ${given}`);
    }
    name = said.toLowerCase();
    if (!/^[a-z][a-z0-9_.-]*$/.test(name)) {
      const rule = "is no name of a stage: a letter, then letters, digits, _.-";
      throw wrong(file, each.line, `${cited(said)} ${rule}`);
    }
    if (stages.some((stage) => stage.name === name)) {
      throw wrong(file, each.line, `another stage is called ${cited(name)}`);
    }
  }
  return { index: stages.length, name, base, from: each, instructions: [each] };
}

function own<T>(table: Readonly<Record<string, T>>, key: string): T | undefined {
  return Object.hasOwn(table, key) ? table[key] : undefined;
}

/** Return how many letters of a word another has, too. */
function shared(word: string, other: string): number {
  return [...new Set(word)].filter((letter) => other.includes(letter)).length;
}

/** Return how many letters must be changed, added or removed to make one word of another. */
function apart(a: string, b: string): number {
  let before = Array.from({ length: b.length + 1 }, (_, at) => at);
  for (let row = 1; row <= a.length; row += 1) {
    const now = [row];
    for (let at = 1; at <= b.length; at += 1) {
      const replaced = (before[at - 1] ?? 0) + Number(a[row - 1] !== b[at - 1]);
      now.push(Math.min(replaced, (before[at] ?? 0) + 1, (now[at - 1] ?? 0) + 1));
    }
    before = now;
  }
  return before[b.length] ?? 0;
}
