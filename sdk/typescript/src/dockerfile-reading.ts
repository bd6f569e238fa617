/**
 * A Dockerfile's text as instructions, by Docker's rules.
 *
 * Directives (`# escape=`) come before everything else.  Lines that begin with `#` are comments,
 * also between the lines of one instruction.  A line whose last character is the escape character
 * goes on in the next one.  Behind RUN, COPY and ADD, `<<NAME` has the lines up to NAME as a text (a
 * heredoc).
 */
import { Buffer } from "node:buffer";
import { Expander, literally, Malformed, rawWords, splitOnce, wrong } from "./dockerfile-words.js";
import { cited } from "./text.js";

/** Longest Dockerfile, and longest `.dockerignore`, that is read. */
export const DOCKERFILE_BYTES_MAX = 1024 * 1024;

/** Most instructions of a Dockerfile: several stages of as many steps as a chain has links. */
const DOCKERFILE_INSTRUCTIONS_MAX = 512;

/** How much of an instruction is shown. */
const SHOWN_CHARS = 200;

const DIRECTIVE = /^#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*$/;
const DIRECTIVES = new Set(["syntax", "escape", "check"]);
const HEREDOC = /^([0-9]*)<<(-?)([^<]*)$/;
const FLAG = /^--([A-Za-z][A-Za-z0-9-]*)(?:=([\s\S]*))?$/;

const HEREDOC_KEYWORDS = new Set(["RUN", "COPY", "ADD"]);
const JSON_KEYWORDS = new Set(["RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"]);
const FLAG_KEYWORDS = new Set(["FROM", "RUN", "COPY", "ADD", "HEALTHCHECK"]);

/** A text of several lines. */
export interface Heredoc {
  /** What ends it, and the name of the file that a COPY makes of it. */
  name: string;
  /** Its lines. */
  content: string;
  /** Whether variables in it are replaced: its name was not in quotes. */
  expands: boolean;
  /** Its lines as they were written, up to its end, for a shell to read. */
  raw: string;
}

/** One instruction. */
export interface Instruction {
  /** In capital letters. */
  keyword: string;
  /** Where it begins, from 1. */
  line: number;
  /** Its `--name=value`, in order; undefined where there is no value. */
  flags: readonly (readonly [name: string, value: string | undefined])[];
  /** What is behind keyword and flags, without comments and line ends. */
  rest: string;
  /** The strings of its JSON form; undefined in the other form. */
  words: readonly string[] | undefined;
  /** Its texts. */
  heredocs: readonly Heredoc[];
}

/** Return the value of a flag; the last one of its name. */
export function flag(each: Instruction, name: string): string | undefined {
  return each.flags.findLast(([known]) => known === name)?.[1];
}

/** Return an instruction in one line. */
export function shown(each: Instruction): string {
  const flags = each.flags.map(([name, value]) =>
    value === undefined ? `--${name}` : `--${name}=${value}`,
  );
  const text = [each.keyword, ...flags, each.rest].join(" ").split(/\s+/).join(" ").trim();
  const chars = [...text];
  return chars.length <= SHOWN_CHARS ? text : `${chars.slice(0, SHOWN_CHARS - 1).join("")}…`;
}

/**
 * Return the instructions of a Dockerfile, and its escape character.
 *
 * @param file What it is called in errors.
 * @throws {InvalidRequest} It is too long, a directive is wrong, or a heredoc is not ended.
 */
export function read(text: string, file: string): [instructions: Instruction[], mark: string] {
  checkLength(text, file);
  const lines = text
    .replace(/^\ufeff/, "")
    .replaceAll("\r\n", "\n")
    .split("\n");
  const mark = markOf(lines, file);
  const found: Instruction[] = [];
  for (const instruction of new Reader(lines, mark, file).instructions()) {
    found.push(instruction);
    if (found.length > DOCKERFILE_INSTRUCTIONS_MAX) {
      throw wrong(file, instruction.line, `more than ${DOCKERFILE_INSTRUCTIONS_MAX} instructions`);
    }
  }
  return [found, mark];
}

/** Return if a file is not too long to be read. */
export function checkLength(text: string, file: string): void {
  if (Buffer.byteLength(text) <= DOCKERFILE_BYTES_MAX) return;
  const most = DOCKERFILE_BYTES_MAX;
  throw wrong(file, 1, `the file is longer than ${most} bytes, the most that is read`);
}

/** Return the escape character that the directives at the top choose. */
function markOf(lines: readonly string[], file: string): string {
  const said = new Map<string, string>();
  for (const [at, line] of lines.entries()) {
    const found = DIRECTIVE.exec(line.trim());
    const [name, value] = [found?.[1]?.toLowerCase() ?? "", found?.[2] ?? ""];
    if (!DIRECTIVES.has(name)) break;
    if (said.has(name)) throw wrong(file, at + 1, `the directive '${name}' is there twice`);
    said.set(name, value);
    if (name === "escape" && value !== "\\" && value !== "`") {
      throw wrong(file, at + 1, `escape must be \\ or \`, not ${cited(value)}`);
    }
  }
  return said.get("escape") ?? "\\";
}

/** Reads instructions from lines. */
class Reader {
  readonly #lines: readonly string[];
  readonly #escape: string;
  readonly #file: string;
  readonly #continues: RegExp;
  #next = 0;

  constructor(lines: readonly string[], mark: string, file: string) {
    this.#lines = lines;
    this.#escape = mark;
    this.#file = file;
    const said = literally(mark);
    this.#continues = new RegExp(`(?:^|(?<=[^${said}]))${said}[ \\t]*$`);
  }

  *instructions(): Generator<Instruction, void, void> {
    while (this.#next < this.#lines.length) {
      const first = this.#lines[this.#next]?.trim() ?? "";
      if (first === "" || first.startsWith("#")) {
        this.#next += 1;
        continue;
      }
      const line = this.#next + 1;
      yield this.#instruction(line, this.#joined());
    }
  }

  /** Return an instruction's lines as one. */
  #joined(): string {
    const said: string[] = [];
    let goesOn = true;
    while (goesOn && this.#next < this.#lines.length) {
      const line = this.#lines[this.#next] ?? "";
      this.#next += 1;
      if (said.length > 0 && (line.trim() === "" || line.trimStart().startsWith("#"))) continue;
      const end = this.#continues.exec(line);
      goesOn = end !== null;
      said.push(end === null ? line : line.slice(0, end.index));
    }
    return said.join("").trim();
  }

  #instruction(line: number, text: string): Instruction {
    const [first, behind] = splitOnce(text);
    const keyword = first.toUpperCase();
    let rest = behind ?? "";
    let flags: [string, string | undefined][] = [];
    if (FLAG_KEYWORDS.has(keyword)) [flags, rest] = flagsOf(rest);
    let words = JSON_KEYWORDS.has(keyword) ? json(rest) : undefined;
    if (keyword === "HEALTHCHECK") words = json(splitOnce(rest)[1] ?? "");
    const heredocs =
      HEREDOC_KEYWORDS.has(keyword) && words === undefined && rest.includes("<<")
        ? this.#heredocs(line, rest)
        : [];
    return { keyword, line, flags, rest, words, heredocs };
  }

  #heredocs(line: number, rest: string): Heredoc[] {
    const found: Heredoc[] = [];
    for (const word of rawWords(rest, this.#escape)) {
      const [, , dash, said] = HEREDOC.exec(word) ?? [];
      if (said === undefined) continue;
      let name: string;
      try {
        name = new Expander(this.#escape, {}).word(said);
      } catch (error) {
        if (error instanceof Malformed) continue;
        throw error;
      }
      if (name !== "") found.push(this.#heredoc(line, name, name === said, dash !== ""));
    }
    return found;
  }

  #heredoc(line: number, name: string, expands: boolean, chomps: boolean): Heredoc {
    let [content, raw] = ["", ""];
    while (this.#next < this.#lines.length) {
      const whole = this.#lines[this.#next] ?? "";
      this.#next += 1;
      raw += `${whole}\n`;
      const each = chomps ? whole.replace(/^\t+/, "") : whole;
      if (each === name) return { name, content, expands, raw };
      content += `${each}\n`;
    }
    throw wrong(this.#file, line, `the heredoc <<${name} is cut short: no line is ${name}`);
  }
}

/** Return the flags at the beginning of a text, and what is behind them. */
function flagsOf(text: string): [[string, string | undefined][], string] {
  const flags: [string, string | undefined][] = [];
  let rest = text;
  while (rest.startsWith("--")) {
    const [word, behind] = splitOnce(rest);
    rest = behind ?? "";
    if (word === "--") break;
    const found = FLAG.exec(word);
    flags.push(found === null ? [word.slice(2), undefined] : [found[1] ?? "", found[2]]);
  }
  return [flags, rest];
}

/** Return the strings of a JSON form; undefined if it is not one, which is no error. */
function json(text: string): string[] | undefined {
  if (!text.startsWith("[")) return undefined;
  try {
    const value: unknown = JSON.parse(text);
    if (Array.isArray(value) && value.every((each) => typeof each === "string")) return value;
  } catch {
    // as below
  }
  return undefined;
}
