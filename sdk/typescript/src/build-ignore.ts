/**
 * `.dockerignore`, by Docker's rules.
 *
 * Each line is a pattern of paths below the context; a file is left out if the last pattern that
 * matches it, or a folder above it, does not begin with `!`.  `*` and `?` match within one name,
 * `**` any number of folders; `#` begins a comment.
 */
import { posix } from "node:path";
import { checkLength } from "./dockerfile-reading.js";
import { literally, wrong } from "./dockerfile-words.js";
import { cited } from "./text.js";

/** One line. */
export interface Pattern {
  /** Where it is, from 1. */
  line: number;
  /** As it is written. */
  text: string;
  /** Whether it begins with `!`. */
  bringsBack: boolean;
  /** What it matches. */
  regex: RegExp;
}

/** What is left out of a context. */
export class Ignore {
  /** What the file is called in errors. */
  readonly file: string;
  readonly #patterns: readonly Pattern[];

  constructor(file = ".dockerignore", patterns: readonly Pattern[] = []) {
    this.file = file;
    this.#patterns = patterns;
  }

  /** Return the line that leaves a path out; undefined if it is not left out. */
  rule(path: string): Pattern | undefined {
    const parts = path.split("/");
    const heads = parts.map((_, at) => parts.slice(0, at + 1).join("/"));
    const last = this.#patterns.findLast((each) => heads.some((head) => each.regex.test(head)));
    return last?.bringsBack ? undefined : last;
  }

  /** Whether nothing below a folder can be in the context. */
  maySkip(folder: string): boolean {
    return this.rule(folder) !== undefined && !this.#patterns.some((each) => each.bringsBack);
  }
}

/**
 * Return what a file says.
 *
 * @throws {InvalidRequest} It is too long, or a line is no pattern.
 */
export function parseIgnore(text: string, file: string): Ignore {
  checkLength(text, file);
  const found: Pattern[] = [];
  for (const [at, line] of text
    .replace(/^\ufeff/, "")
    .split(/\r\n|\r|\n/)
    .entries()) {
    const said = line.trim();
    if (line.startsWith("#") || said === "") continue;
    const bringsBack = said.startsWith("!");
    const path = normal(said.slice(Number(bringsBack)).trim()).replace(/^\/+/, "");
    if (bringsBack && path === ".") {
      throw wrong(file, at + 1, "'!' alone brings nothing back; name what is not left out");
    }
    if (path === "" || path === ".") continue; // as in Docker, the context cannot be left out
    try {
      found.push({ line: at + 1, text: said, bringsBack, regex: glob(path) });
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      throw wrong(file, at + 1, `${cited(said)} is no pattern: ${error.message}`);
    }
  }
  return new Ignore(file, found);
}

/** Return a path without `.`, `..`, and slashes that say nothing. */
export function normal(path: string): string {
  const made = posix.normalize(path || ".");
  return made.length > 1 ? made.replace(/\/$/, "") : made;
}

/**
 * Return what a pattern of paths matches.
 *
 * @param pattern With `*`, `?`, classes in brackets, and a backslash before what is none of these.
 * @param folders Whether `**` matches folders; else it is as `*`.
 * @throws {SyntaxError} A class in it is none.
 */
export function glob(pattern: string, folders = true): RegExp {
  const chars = [...pattern];
  let said = "";
  for (let at = 0; at < chars.length; at += 1) {
    const char = chars[at] ?? "";
    if (folders && char === "*" && chars[at + 1] === "*") {
      at += chars[at + 2] === "/" ? 2 : 1;
      said += at + 1 >= chars.length ? ".*" : "(?:.*/)?";
    } else if (char === "[") {
      const end = chars.indexOf("]", at + 2);
      if (end < 0) throw new SyntaxError("a [ is not closed");
      said += classOf(chars.slice(at + 1, end).join(""));
      at = end;
    } else if (char === "\\" && at + 1 < chars.length) {
      at += 1;
      said += literally(chars[at] ?? "");
    } else {
      said += char === "*" ? "[^/]*" : char === "?" ? "[^/]" : literally(char);
    }
  }
  return new RegExp(`^(?:${said})$`, "u");
}

/** Return a class of characters for a regular expression. */
function classOf(inside: string): string {
  const isNegated = inside.startsWith("^");
  const body = inside.slice(Number(isNegated));
  if (body === "") throw new SyntaxError("a class of characters is empty");
  return `[${isNegated ? "^" : ""}${body.replace(/[\\[\]]/g, "\\$&")}]`;
}
