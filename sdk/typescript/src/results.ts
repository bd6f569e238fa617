/** What calls return, where the daemon's own answers are not what a caller wants to hold. */
import { CommandError, ExecTimeout, GuestError } from "./errors.js";
import type { Info } from "./wire.js";

/** A program that a signal ended has this plus the signal as exit code, as in a shell. */
export const SIGNAL_EXIT_BASE = 128;

/** How much of a program's output the message of an error repeats; the end is kept. */
const QUOTED_CHARS_MAX = 2_000;

/** Anything that JSON can say. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** How a program ended, and what it wrote; as a string, what it wrote to standard output. */
export class ExecResult<T extends string | Uint8Array = string> {
  /** As a shell's: 128 + signal if a signal ended the program. */
  readonly exitCode: number;
  /** What it wrote: text, or bytes with `text: false`. */
  readonly stdout: T;
  /** What it wrote to standard error, likewise. */
  readonly stderr: T;
  /** The signal that ended it; null if it exited. */
  readonly signal: number | null;
  /** It was killed because its time ran out. */
  readonly timedOut: boolean;
  /** How long it ran. */
  readonly durationS: number;
  /** Some output was dropped, because there was too much. */
  readonly truncated: boolean;
  /** The program and its arguments. */
  readonly args: readonly string[];

  /** @internal */
  constructor(parts: Pick<ExecResult<T>, ExecParts>) {
    this.exitCode = parts.exitCode;
    this.stdout = parts.stdout;
    this.stderr = parts.stderr;
    this.signal = parts.signal;
    this.timedOut = parts.timedOut;
    this.durationS = parts.durationS;
    this.truncated = parts.truncated;
    this.args = parts.args;
  }

  /** Whether it exited with 0. */
  get ok(): boolean {
    return this.exitCode === 0 && !this.timedOut;
  }

  /**
   * Return this result, if the program exited with 0.
   *
   * @throws {ExecTimeout} Its time ran out.
   * @throws {CommandError} It exited with another code.
   */
  check(): this {
    const program = this.args.length > 0 ? shown(this.args) : "the program";
    if (this.timedOut) {
      throw new ExecTimeout(
        `${program} was killed after ${this.durationS.toFixed(1)} s: its time ran out` +
          this.#quoted(),
        { result: this, context: { guest_code: "timed_out" } },
      );
    }
    if (this.exitCode !== 0) {
      throw new CommandError(`${program} exited with ${this.exitCode}${this.#quoted()}`, {
        result: this,
        context: { exit_code: this.exitCode },
      });
    }
    return this;
  }

  toString(): string {
    return asText(this.stdout);
  }

  #quoted(): string {
    const said = asText(this.stderr).trim() || asText(this.stdout).trim();
    return said === "" ? "" : `: ${visible(said.slice(-QUOTED_CHARS_MAX))}`;
  }
}

type ExecParts =
  | "exitCode"
  | "stdout"
  | "stderr"
  | "signal"
  | "timedOut"
  | "durationS"
  | "truncated"
  | "args";

/** An exception that the evaluated code raised and did not catch. */
// biome-ignore lint/suspicious/noShadowRestrictedNames: it has this name in Python
export class EvalError {
  /** The name of its class. */
  readonly type: string;
  /** What it says. */
  readonly message: string;
  /** Where it was raised, as Python prints it. */
  readonly traceback: string;

  /** @internal */
  constructor(parts: { type: string; message: string; traceback: string }) {
    this.type = parts.type;
    this.message = parts.message;
    this.traceback = parts.traceback;
  }

  /** Same as `type`, under E2B's name. */
  get name(): string {
    return this.type;
  }

  /** Same as `message`, under E2B's name. */
  get value(): string {
    return this.message;
  }

  toString(): string {
    return `${this.type}: ${this.message}`;
  }
}

/** The value of evaluated code in each form that there is, under E2B's names. */
export class Result {
  /** Its `repr`. */
  readonly text: string;
  /** The value itself, where JSON can say it, else null. */
  readonly json: Json;
  /** Whether it is the value of the last expression; always true. */
  readonly isMainResult = true;

  /** @internal */
  constructor(text: string, json: Json) {
    this.text = text;
    this.json = json;
  }

  /** Return the names of the forms that it has. */
  formats(): string[] {
    return this.json === null ? ["text"] : ["text", "json"];
  }

  toString(): string {
    return this.text;
  }
}

/**
 * What code evaluated in a sandbox gave.
 *
 * As a string: the `repr` of the value; what was printed, if there is no value; the traceback, if
 * the code raised.
 */
export class EvalResult {
  /** The last expression where JSON can say it, else null; see `valueIsJson`. */
  readonly value: Json;
  /** Its `repr`; null if the code did not end in an expression. */
  readonly repr: string | null;
  /** What the code printed. */
  readonly stdout: string;
  /** What it printed to standard error. */
  readonly stderr: string;
  /** The exception it raised; null if it raised none. */
  readonly error: EvalError | null;
  /** Whether `value` is the value, and not null because it is no JSON. */
  readonly valueIsJson: boolean;
  /** It was interrupted; its namespace lives on. */
  readonly timedOut: boolean;
  /** Some output was dropped, because there was too much. */
  readonly truncated: boolean;

  /** @internal */
  constructor(answer: Info<"EvalResult">) {
    this.value = (answer.value ?? null) as Json;
    this.repr = answer.result;
    this.stdout = answer.stdout;
    this.stderr = answer.stderr;
    this.error = answer.exception ? new EvalError(answer.exception) : null;
    this.valueIsJson = answer.valueIsJson;
    this.timedOut = answer.timedOut ?? false;
    this.truncated = answer.truncated ?? false;
  }

  /** Whether the code ran to its end. */
  get ok(): boolean {
    return this.error === null && !this.timedOut;
  }

  /** Same as `repr`, under E2B's name. */
  get text(): string | null {
    return this.repr;
  }

  /** The value of the last expression, under E2B's name; empty if there is none. */
  get results(): Result[] {
    if (this.repr === null) return [];
    return [new Result(this.repr, this.value)];
  }

  /** What the code printed, under E2B's names. */
  get logs(): { stdout: string[]; stderr: string[] } {
    return {
      stdout: this.stdout === "" ? [] : [this.stdout],
      stderr: this.stderr === "" ? [] : [this.stderr],
    };
  }

  /**
   * Return this result, if the code ran to its end.
   *
   * @throws {ExecTimeout} Its time ran out.
   * @throws {GuestError} It raised, with its traceback in the message.
   */
  check(): this {
    if (this.timedOut) {
      throw new ExecTimeout(
        "the code timed out and was interrupted; variables that it has set are kept",
        { result: this, context: { guest_code: "timed_out" } },
      );
    }
    if (this.error !== null) {
      throw new GuestError(`${this.error}\n${this.error.traceback}`, {
        context: { guest_code: "exception" },
      });
    }
    return this;
  }

  toString(): string {
    if (this.error !== null) return this.error.traceback;
    return this.repr ?? this.stdout;
  }
}

/** Bytes that a program wrote. */
export interface Output {
  /** Where it wrote them. */
  stream: "stdout" | "stderr";
  data: Uint8Array;
}

/**
 * Return a result as the caller's `check` wants it: undefined throws for timeouts only.
 *
 * @internal
 */
export function judged<R extends { timedOut: boolean; check(): unknown }>(
  result: R,
  check: boolean | undefined,
): R {
  if (check === true || (check === undefined && result.timedOut)) result.check();
  return result;
}

function asText(said: string | Uint8Array): string {
  return typeof said === "string" ? said : new TextDecoder().decode(said);
}

/** Return a program and its arguments as a shell would read them. */
function shown(args: readonly string[]): string {
  const words = args.map((each) =>
    /^[\w@%+=:,./-]+$/.test(each) ? each : `'${each.replaceAll("'", "'\"'\"'")}'`,
  );
  return visible(words.join(" "));
}

/** Return text whose control characters cannot act on a terminal. */
function visible(text: string): string {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: these are what is replaced
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, (each) => {
    return `\\x${each.charCodeAt(0).toString(16).padStart(2, "0")}`;
  });
}
