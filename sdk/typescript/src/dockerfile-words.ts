/**
 * Words of a Dockerfile: variables are replaced, quotes and escapes removed.
 *
 * ```text
 * $name  ${name}                        its value; empty if it is not set
 * ${name:-word}  ${name-word}           word if it is not set (with the colon: or empty)
 * ${name:+word}  ${name+word}           word if it is set
 * ${name:?word}  ${name?word}           an error with word if it is not set
 * ${name#pattern}  ##  %  %%            without its beginning, or end, that matches
 * ${name/pattern/word}  //              with what matches replaced: once, everywhere
 * ```
 */
import { InvalidRequest } from "./errors.js";

/** What is wrong with a part of a Dockerfile, or with a file that it copies; the line comes later. */
export class Malformed extends Error {}

/** Return the error for a line of a file. */
export function wrong(file: string, line: number, message: string): InvalidRequest {
  return new InvalidRequest(`${file}:${line}: ${message}`, {
    context: { field: "dockerfile", line },
  });
}

const NAME_AT = /[A-Za-z_][A-Za-z0-9_]*/y;
const SPECIAL_AT = /[@*#?$!-]|[0-9]+/y;

/** Whether a text is a name of a variable. */
export function isName(text: string): boolean {
  return /^[A-Za-z_][A-Za-z0-9_]*$/.test(text);
}

type Found = [value: string, at: number];

/** Expands words over one set of variables. */
export class Expander {
  /** The escape character of the Dockerfile. */
  readonly escape: string;
  /** Names that a word used and that are not set. */
  readonly unknown = new Set<string>();
  readonly #variables: Readonly<Record<string, string>>;

  constructor(mark: string, variables: Readonly<Record<string, string>>) {
    this.escape = mark;
    this.#variables = variables;
  }

  /**
   * Return a text as one word, blanks included.
   *
   * @throws {Malformed} A quote or a brace is not closed, or a variable is malformed or missing.
   */
  word(text: string): string {
    return this.#until(text, 0, "")[0];
  }

  /** Return a text of several lines with its variables replaced; quotes are left alone. */
  text(content: string): string {
    let [said, at] = ["", 0];
    while (at < content.length) {
      let char = content.charAt(at);
      if (char === "$") {
        const [piece, next] = this.#variable(content, at + 1);
        [said, at] = [said + piece, next];
        continue;
      }
      if (char === this.escape && isOneOf(content.charAt(at + 1), `$${this.escape}`)) {
        at += 1;
        char = content.charAt(at);
      }
      said += char;
      at += 1;
    }
    return said;
  }

  /** Return what is before one of `stops`, or before the end, and where that is. */
  #until(text: string, from: number, stops: string): Found {
    let [said, at] = ["", from];
    while (at < text.length && !isOneOf(text.charAt(at), stops)) {
      const char = text.charAt(at);
      if (char === "'") {
        const end = text.indexOf("'", at + 1);
        if (end < 0) throw new Malformed("a single quote (') is not closed");
        said += text.slice(at + 1, end);
        at = end + 1;
      } else if (char === '"' || char === "$") {
        const [piece, next] =
          char === "$" ? this.#variable(text, at + 1) : this.#quoted(text, at + 1);
        [said, at] = [said + piece, next];
      } else if (char === this.escape) {
        said += text.charAt(at + 1);
        at += 2;
      } else {
        said += char;
        at += 1;
      }
    }
    return [said, at];
  }

  /** Return what is in double quotes, and where it goes on behind them. */
  #quoted(text: string, from: number): Found {
    let [said, at] = ["", from];
    while (at < text.length) {
      let char = text.charAt(at);
      if (char === '"') return [said, at + 1];
      if (char === "$") {
        const [piece, next] = this.#variable(text, at + 1);
        [said, at] = [said + piece, next];
        continue;
      }
      if (char === this.escape && isOneOf(text.charAt(at + 1), `"$${this.escape}`)) {
        at += 1;
        char = text.charAt(at);
      }
      said += char;
      at += 1;
    }
    throw new Malformed('a double quote (") is not closed');
  }

  /** Return the value of a variable whose `$` is passed, and where it goes on. */
  #variable(text: string, at: number): Found {
    if (text.charAt(at) !== "{") {
      const name = nameAt(text, at);
      return name === undefined ? ["$", at] : [this.#value(name) ?? "", at + name.length];
    }
    const name = nameAt(text, at + 1);
    if (name === undefined) {
      throw new Malformed(`$${text.slice(at, at + 40)} names no variable`);
    }
    const behind = at + 1 + name.length;
    if (text.charAt(behind) === "}") return [this.#value(name) ?? "", behind + 1];
    return this.#modified(name, text, behind);
  }

  #modified(name: string, text: string, at: number): Found {
    const colon = text.charAt(at) === ":" ? 1 : 0;
    const sign = text.charAt(at + colon);
    let [value, end] = ["", at];
    if (isOneOf(sign, "-+?")) {
      const [word, next] = this.#until(text, at + colon + 1, "}");
      [value, end] = [this.#tested(name, sign, word, colon === 1), next];
    } else if (isOneOf(sign, "#%/") && colon === 0) {
      const twice = text.charAt(at + 1) === sign;
      const stops = sign === "/" ? "/}" : "}";
      const [pattern, next] = this.#until(text, at + 1 + Number(twice), stops);
      let word = "";
      end = next;
      if (sign === "/" && text.charAt(next) === "/") {
        [word, end] = this.#until(text, next + 1, "}");
      }
      value = edited(this.#value(name) ?? "", sign, pattern, word, twice);
    } else {
      throw new Malformed(`\${${name}${text.slice(at, at + 2)}…} is no form of a variable`);
    }
    if (text.charAt(end) !== "}") throw new Malformed(`\${${name} is not closed`);
    return [value, end + 1];
  }

  #tested(name: string, sign: string, word: string, colon: boolean): string {
    const value = this.#own(name);
    const isSet = colon ? Boolean(value) : value !== undefined;
    if (sign === "+") return isSet ? word : "";
    if (isSet) return value ?? "";
    if (sign !== "?") return word;
    this.unknown.add(name); // a base image may set it
    throw new Malformed(`${name}: ${word || "it is not set"}`);
  }

  #value(name: string): string | undefined {
    const value = this.#own(name);
    if (value === undefined) this.unknown.add(name);
    return value;
  }

  #own(name: string): string | undefined {
    return Object.hasOwn(this.#variables, name) ? this.#variables[name] : undefined;
  }
}

function isOneOf(char: string, chars: string): boolean {
  return char !== "" && chars.includes(char);
}

function nameAt(text: string, at: number): string | undefined {
  for (const pattern of [NAME_AT, SPECIAL_AT]) {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found !== null) return found[0];
  }
  return undefined;
}

/** Return text for a regular expression that matches it alone. */
export function literally(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

/** Return a value without what matches a shell's pattern, or with it replaced. */
function edited(
  value: string,
  sign: string,
  pattern: string,
  word: string,
  twice: boolean,
): string {
  const any = twice || sign === "/" ? ".*" : ".*?";
  const parts: Readonly<Record<string, string>> = { "*": any, "?": "." };
  const body = [...pattern].map((char) => parts[char] ?? literally(char)).join("");
  if (sign === "#") return value.replace(new RegExp(`^(?:${body})`, "su"), "");
  if (sign === "/") {
    return value.replace(new RegExp(`(?:${body})`, twice ? "gsu" : "su"), () => word);
  }
  const whole = new RegExp(`^(?:${body})$`, "su");
  const starts = Array.from({ length: value.length + 1 }, (_, at) => at);
  if (!twice) starts.reverse();
  return value.slice(
    0,
    starts.find((at) => whole.test(value.slice(at))),
  );
}

/** Return the words of a text with their quotes and escapes as they are. */
export function rawWords(text: string, mark: string): string[] {
  const found: string[] = [];
  let [word, quote] = ["", ""];
  for (let at = 0; at < text.length; at += 1) {
    const char = text.charAt(at);
    if (char === mark && quote !== "'") {
      word += text.slice(at, at + 2);
      at += 1;
    } else if (quote === "" && isOneOf(char, " \t\n")) {
      if (word !== "") found.push(word);
      word = "";
    } else {
      word += char;
      if (isOneOf(char, "'\"") && (quote === "" || quote === char)) quote = quote ? "" : char;
    }
  }
  if (word !== "") found.push(word);
  return found;
}

/** Return the words between blanks. */
export function split(text: string): string[] {
  return text.split(/\s+/).filter((each) => each !== "");
}

/** Return the first word, and what is behind the blanks that follow; undefined for nothing. */
export function splitOnce(text: string): [first: string, rest: string | undefined] {
  const found = /^\s*(\S+)(?:\s+([\s\S]+))?$/.exec(text);
  return [found?.[1] ?? "", found?.[2]];
}
