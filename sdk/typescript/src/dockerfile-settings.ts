/** What an image says of the programs that are run in it, and what instructions change of that. */
import { posix } from "node:path";
import { flag, type Instruction } from "./dockerfile-reading.js";
import {
  type Expander,
  isName,
  Malformed,
  rawWords,
  split,
  splitOnce,
} from "./dockerfile-words.js";
import { cited } from "./text.js";

const DURATION = /^(?:(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0)$/;
const PORT = /^([0-9]{1,5})(?:-([0-9]{1,5}))?(?:\/(tcp|udp|sctp))?$/i;
const SIGNAL = /^(?:(?:SIG)?[A-Z][A-Z0-9+-]*|[0-9]{1,2})$/;
const PORT_MAX = 65_535;

/** What an image says of programs in it; the names are those of the wire. */
export interface Config {
  /** Variables. */
  env: Readonly<Record<string, string>>;
  /** Where programs start. */
  cwd: string;
  /** Who they run as: a name or a number, with `:` and a group or without. */
  user: string;
  /** The program that the image is for; null for none. */
  entrypoint: readonly string[] | null;
  /** Its arguments, or the program if there is no entrypoint; null for none. */
  cmd: readonly string[] | null;
  /** Ports that programs listen on, as `80/tcp`. */
  ports: readonly string[];
  /** Text by key. */
  labels: Readonly<Record<string, string>>;
  /** The program that says whether all is well, and how it is asked. */
  healthcheck: Readonly<Record<string, string | readonly string[]>>;
  /** What ends the program; empty for the usual one. */
  stop_signal: string;
  /** Folders that are data. */
  volumes: readonly string[];
  /** What reads lines of RUN, CMD and ENTRYPOINT. */
  shell: readonly string[];
}

/** The configuration of an image that says nothing. */
export const EMPTY: Config = {
  env: {},
  cwd: "/",
  user: "root",
  entrypoint: null,
  cmd: null,
  ports: [],
  labels: {},
  healthcheck: {},
  stop_signal: "",
  volumes: [],
  shell: ["/bin/sh", "-c"],
};

/** Return the program that an image is for, with its arguments; empty if it names none. */
export function programOf(config: Config): string[] {
  return [...(config.entrypoint ?? []), ...(config.cmd ?? [])];
}

/**
 * Return a configuration as an instruction changes it; one that changes none leaves it.
 *
 * @throws {Malformed} The instruction is malformed.
 */
export function apply(config: Config, each: Instruction, words: Expander): Config {
  return { ...config, ...CHANGES[each.keyword]?.(config, each, words) };
}

/** Return what ENV and LABEL say: `key=value …`, or `key value` up to the end. */
export function pairs(text: string, words: Expander, keyword: string): Record<string, string> {
  const [first, behind] = splitOnce(text);
  if (!first.includes("=")) {
    if (behind === undefined) {
      const name = first.slice(0, 80);
      throw new Malformed(`${keyword} ${name} has no value; write ${keyword} ${name}=VALUE`);
    }
    return Object.fromEntries([[words.word(first), words.word(behind)]]);
  }
  return Object.fromEntries(
    rawWords(text, words.escape).map((word) => {
      const [name, value] = parted(word);
      if (value === undefined || name === "") {
        throw new Malformed(`${cited(word)} is not KEY=VALUE; values with blanks need quotes`);
      }
      return [words.word(name), words.word(value)];
    }),
  );
}

/** Return a path from a working directory, without `.` and `..`. */
export function joined(cwd: string, path: string): string {
  return posix.resolve("/", cwd, path);
}

/** Return what an ARG declares, with its defaults; undefined for a name without one. */
export function declared(each: Instruction, words: Expander): Map<string, string | undefined> {
  const found = new Map<string, string | undefined>();
  for (const word of rawWords(each.rest, words.escape)) {
    const [name, value] = parted(word);
    if (!isName(name)) throw new Malformed(`${cited(name)} is no name of a variable`);
    found.set(name, value === undefined ? undefined : words.word(value));
  }
  return found;
}

/** Return what is before the first `=`, and what is behind it. */
export function parted(word: string): [name: string, value: string | undefined] {
  const at = word.indexOf("=");
  return at < 0 ? [word, undefined] : [word.slice(0, at), word.slice(at + 1)];
}

type Change = (config: Config, each: Instruction, words: Expander) => Partial<Config>;

function command(config: Config, each: Instruction): readonly string[] | null {
  const said = each.words ?? [...config.shell, each.rest];
  return said.length > 0 ? said : null;
}

const CHANGES: Readonly<Record<string, Change>> = {
  CMD: (config, each) => ({ cmd: command(config, each) }),
  ENTRYPOINT: (config, each) => ({ entrypoint: command(config, each) }),
  ENV(config, each, words) {
    const found = pairs(each.rest, words, "ENV");
    for (const name of Object.keys(found)) {
      if (name === "" || /[=\0]/.test(name)) {
        throw new Malformed(`${cited(name)} is no name of a variable`);
      }
    }
    return { env: { ...config.env, ...found } };
  },
  EXPOSE(config, each, words) {
    const found = split(words.word(each.rest)).map(port);
    return { ports: [...new Set([...config.ports, ...found])] };
  },
  HEALTHCHECK: (_, each) => ({ healthcheck: healthcheck(each) }),
  LABEL: (config, each, words) => ({
    labels: { ...config.labels, ...pairs(each.rest, words, "LABEL") },
  }),
  MAINTAINER: (config, each) => ({ labels: { ...config.labels, maintainer: each.rest } }),
  SHELL(_, each) {
    if (each.words?.length) return { shell: each.words };
    throw new Malformed('SHELL is a list of strings, such as ["/bin/bash", "-c"]');
  },
  STOPSIGNAL(_, each, words) {
    const signal = words.word(each.rest);
    if (SIGNAL.test(signal.toUpperCase())) return { stop_signal: signal.toUpperCase() };
    throw new Malformed(`${cited(signal)} is no signal; signals are as SIGTERM or 15`);
  },
  USER(_, each, words) {
    const user = words.word(each.rest);
    if (split(user).length === 1 && !user.startsWith(":")) return { user };
    const rule = "USER is a name or a number, with :GROUP or without";
    throw new Malformed(`${rule}, not ${cited(user)}`);
  },
  VOLUME(config, each, words) {
    const found = (each.words ?? split(each.rest)).map((text) => words.word(text));
    if (found.includes("")) throw new Malformed("VOLUME names no folder");
    return { volumes: [...new Set([...config.volumes, ...found])] };
  },
  WORKDIR(config, each, words) {
    const path = words.word(each.rest);
    if (path === "" || path.includes("\0")) throw new Malformed("WORKDIR names no folder");
    return { cwd: joined(config.cwd, path) };
  },
};

function port(text: string): string {
  const found = PORT.exec(text);
  if (found === null) {
    throw new Malformed(`${cited(text)} is no port; ports are as 80, 80/udp or 8000-8010`);
  }
  const [first, last] = [Number(found[1]), Number(found[2] ?? found[1])];
  if (first === 0 || first > last || last > PORT_MAX) {
    throw new Malformed(`${cited(text)}: ports are 1 to ${PORT_MAX}`);
  }
  return `${first}${last > first ? `-${last}` : ""}/${(found[3] ?? "tcp").toLowerCase()}`;
}

function healthcheck(each: Instruction): Record<string, string | readonly string[]> {
  const [kind, behind] = splitOnce(each.rest);
  if (kind.toUpperCase() === "NONE" && behind === undefined) return { test: ["NONE"] };
  if (kind.toUpperCase() !== "CMD" || behind === undefined) {
    throw new Malformed("HEALTHCHECK is `HEALTHCHECK [FLAGS] CMD COMMAND`, or `HEALTHCHECK NONE`");
  }
  const test = each.words === undefined ? ["CMD-SHELL", behind] : ["CMD", ...each.words];
  const said: Record<string, string | readonly string[]> = { test };
  for (const [name] of each.flags) {
    const value = flag(each, name) ?? "";
    if (!(name === "retries" ? /^\d+$/ : DURATION).test(value)) {
      const what = name === "retries" ? "a number" : "a time such as 30s or 1m30s";
      throw new Malformed(`--${name} is ${what}, not ${cited(value)}`);
    }
    said[name.replaceAll("-", "_")] = value;
  }
  return said;
}
