/** What calls return, where the daemon's own answers are not what a caller wants to hold. */
import { CommandError, ExecTimeout, GuestError } from "./errors.js";
import type { Info } from "./wire.js";

/** A program that a signal ended has this plus the signal as exit code, as in a shell. */
export const SIGNAL_EXIT_BASE = 128;

/** How much of a program's output the message of an error repeats; the end is kept. */
const QUOTED_CHARS_MAX = 2_000;

/** Anything that JSON can say. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** An instruction of a Dockerfile that is done. */
export interface BuildStep {
  /** Which of the build it is, from 1. */
  number: number;
  /** How many the build has. */
  total: number;
  /** Where it is in the Dockerfile. */
  line: number;
  /** It, in one line. */
  text: string;
  /** Whether it has a link of its own, as RUN, COPY and ADD have. */
  changesFiles: boolean;
  /** Whether that link was there already. */
  cached: boolean;
  /** How long it took. */
  seconds: number;
}

/** What a build has made. */
export interface BuildResult {
  /** The snapshot. */
  snapshot: Info<"SnapshotInfo">;
  /** The instructions, as far as they were needed. */
  steps: BuildStep[];
  /** What in the Dockerfile has no effect here, or a risk. */
  warnings: string[];
}

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

const FORMS = {
  "text/html": "html",
  "text/markdown": "markdown",
  "image/svg+xml": "svg",
  "image/png": "png",
  "image/jpeg": "jpeg",
  "application/pdf": "pdf",
  "text/latex": "latex",
  "application/javascript": "javascript",
} as const;

function parsed(json: string | undefined): Json {
  if (json === undefined) return null;
  try {
    return JSON.parse(json) as Json;
  } catch {
    return null;
  }
}

/**
 * One thing that evaluated code showed, in each form that it has, under E2B's names: the value of
 * the last expression, a figure of matplotlib, or what `display(…)` was given.
 *
 * What a guest has made is not to be trusted: HTML, SVG and JavaScript may hold anything.
 */
export class Result {
  /** Its `repr`. */
  readonly text: string;
  /** The value itself, where JSON can say it, else null. */
  readonly json: Json;
  /** Whether it is the value of the last expression. */
  readonly isMainResult: boolean;
  readonly html: string | null = null;
  readonly markdown: string | null = null;
  readonly svg: string | null = null;
  /** In base64. */
  readonly png: string | null = null;
  /** In base64. */
  readonly jpeg: string | null = null;
  /** In base64. */
  readonly pdf: string | null = null;
  readonly latex: string | null = null;
  readonly javascript: string | null = null;
  /** Its other forms, by MIME type. */
  readonly extra: Readonly<Record<string, string>>;
  /** Forms that were too large to be sent: their size in bytes, by MIME type. */
  readonly omitted: Readonly<Record<string, number>>;

  /** @internal */
  constructor(text: string | null, value: Json, forms: Partial<Info<"EvalForms">> = {}) {
    const { "text/plain": plain = "", "application/json": json, ...others } = forms.data ?? {};
    this.text = text ?? plain;
    this.json = value ?? parsed(json);
    this.isMainResult = forms.isMain ?? false;
    const extra: Record<string, string> = {};
    for (const [kind, form] of Object.entries(others)) {
      const name = FORMS[kind as keyof typeof FORMS];
      if (name) this[name] = form;
      else extra[kind] = form;
    }
    this.extra = extra;
    this.omitted = forms.omitted ?? {};
  }

  /** Return the names of the forms that it has. */
  formats(): string[] {
    const names = ["text", "json", ...Object.values(FORMS)] as const;
    return [...names.filter((name) => this[name] !== null), ...Object.keys(this.extra)];
  }

  toString(): string {
    return this.text;
  }
}

/** Where code has names and a working directory of its own, under E2B's names. */
export class CodeContext {
  /** Its name. */
  readonly id: string;
  /** The warm runtime's. */
  readonly language: string;
  /** Where its code started. */
  readonly cwd: string;

  /** @internal */
  constructor(id: string, language: string, cwd: string) {
    this.id = id;
    this.language = language;
    this.cwd = cwd;
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
  /** What it showed: figures, what it displayed, and the value, in their order. */
  readonly results: Result[];
  /** How many results were dropped, because there were too many. */
  readonly moreResults: number;

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
    this.results = (answer.results ?? []).map((forms) =>
      forms.isMain ? new Result(this.repr, this.value, forms) : new Result(null, null, forms),
    );
    this.moreResults = answer.moreResults ?? 0;
    if (this.repr !== null && !this.results.some((each) => each.isMainResult))
      this.results.push(new Result(this.repr, this.value, { isMain: true }));
  }

  /** Whether the code ran to its end. */
  get ok(): boolean {
    return this.error === null && !this.timedOut;
  }

  /** Same as `repr`, under E2B's name. */
  get text(): string | null {
    return this.repr;
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

/** A piece of what evaluated code wrote, under E2B's names. */
export class OutputMessage {
  /** The text: as much as came at once, with its line ends. */
  readonly line: string;
  /** When it came, in nanoseconds since the epoch, to the millisecond. */
  readonly timestamp: number;
  /** Whether it was written to standard error. */
  readonly error: boolean;

  /** @internal */
  constructor(line: string, error: boolean) {
    this.line = line;
    this.timestamp = Date.now() * 1_000_000;
    this.error = error;
  }

  toString(): string {
    return this.line;
  }
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
