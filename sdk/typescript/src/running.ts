/** Running a program to its end: over one request, or attached to it. */
import { Buffer } from "node:buffer";
import { EXEC_OUTPUT_BYTES_MAX, EXEC_STDIN_CHARS_MAX } from "./answers.gen.js";
import { InvalidRequest } from "./errors.js";
import type { Http } from "./http.js";
import { Process } from "./process.js";
import { ExecResult, judged, SIGNAL_EXIT_BASE } from "./results.js";
import { members } from "./wire.js";

/** Time the daemon has beyond a program's own timeout, so that it, not we, says that it ran out. */
export const TIMEOUT_MARGIN_S = 60;

/** How a program runs. */
export interface ProgramOptions {
  /** Kill the program after this time, in seconds; undefined: never. */
  timeoutS?: number | null;
  /** Variables added to the sandbox's. */
  env?: Readonly<Record<string, string>>;
  /** Where the program starts; the image's folder if undefined. */
  cwd?: string;
  /** Who the program runs as: a name, or `uid[:gid]`; the image's user if undefined. */
  user?: string;
  /** Ends the program: the promise is rejected with the signal's reason. */
  signal?: AbortSignal;
}

/** How a program runs to its end. */
export interface RunOptions<T extends string | Uint8Array = string> extends ProgramOptions {
  /**
   * True: also throw `CommandError` for an exit code other than 0.  False: throw nothing, not even
   * `ExecTimeout`.
   */
  check?: boolean;
  /** The program's whole input. */
  stdin?: string | Uint8Array;
  /** Called with each piece of output, as it comes; a promise that it returns is waited for. */
  onStdout?: (piece: T) => unknown;
  /** Called with each piece of error output, as it comes. */
  onStderr?: (piece: T) => unknown;
  /** True: output is text, and bytes that are not UTF-8 become U+FFFD.  False: it is bytes. */
  text?: boolean;
}

/** How a program runs with its streams attached. */
export interface StreamOptions extends ProgramOptions {
  /** Whether it will be written to; else its standard input is /dev/null. */
  stdin?: boolean;
  /** Rows and columns of the terminal it gets; pipes if undefined. */
  tty?: readonly [rows: number, columns: number];
}

const PROGRAM = { timeoutS: true, env: true, cwd: true, user: true, signal: true } as const;

/** @internal */
export const RUN_OPTIONS: Record<keyof RunOptions, true> = {
  ...PROGRAM,
  check: true,
  stdin: true,
  onStdout: true,
  onStderr: true,
  text: true,
};

/** @internal */
export const STREAM_OPTIONS: Record<keyof StreamOptions, true> = {
  ...PROGRAM,
  stdin: true,
  tty: true,
};

/** Return a program and its arguments as a list. */
export function program(args: string | readonly string[]): string[] {
  if (typeof args === "string" && args !== "" && !/[ \t\n]/.test(args)) return [args];
  if (!Array.isArray(args)) {
    throw new InvalidRequest(
      'exec() takes a program and its arguments, such as ["ls", "-l"]; run("ls -l") has a shell ' +
        "read the line",
      { context: { field: "args" } },
    );
  }
  return args.map(String);
}

/** Return the program that has a shell read a line. */
export function shell(line: string): string[] {
  if (typeof line !== "string") {
    throw new InvalidRequest(
      'run() takes a line for the shell, such as "ls | wc -l"; exec(["ls", "-l"]) runs a program ' +
        "without one",
      { context: { field: "line" } },
    );
  }
  return ["/bin/sh", "-c", line];
}

/** Run a program in the sandbox at `path`, to its end. */
export async function toTheEnd(
  http: Http,
  path: string,
  args: string[],
  options: RunOptions<never>,
): Promise<ExecResult<string | Uint8Array>> {
  const { stdin, onStdout, onStderr, check, text } = options;
  const isShort =
    stdin === undefined || (typeof stdin === "string" && stdin.length <= EXEC_STDIN_CHARS_MAX);
  const isQuiet = onStdout === undefined && onStderr === undefined;
  const run = text !== false && isShort && isQuiet ? buffered : attached;
  return judged(await run(http, path, args, options), check);
}

/** Have the daemon keep what the program writes. */
async function buffered(
  http: Http,
  path: string,
  args: string[],
  options: RunOptions<never>,
): Promise<ExecResult> {
  const { stdin, env, cwd, user, signal } = options;
  const timeoutS = options.timeoutS ?? null;
  const body = { timeout_secs: null, ...members({ args, stdin, env, cwd, user, timeoutS }) };
  const answer = await http.call("ExecResult", "POST", `${path}/exec`, {
    body,
    timeoutS: timeoutS === null ? null : timeoutS + TIMEOUT_MARGIN_S,
    signal,
  });
  return new ExecResult({
    exitCode: answer.exitCode,
    stdout: answer.stdout,
    stderr: answer.stderr,
    signal: answer.signal ?? null,
    timedOut: answer.timedOut ?? false,
    durationS: answer.durationS,
    truncated: answer.truncated,
    args,
  });
}

/** Take what the program writes as it comes. */
async function attached(
  http: Http,
  path: string,
  args: string[],
  options: RunOptions<never>,
): Promise<ExecResult<string | Uint8Array>> {
  const { stdin, onStdout, onStderr, text, ...rest } = options;
  const isText = text !== false;
  const kept = { stdout: new Kept(onStdout, isText), stderr: new Kept(onStderr, isText) };
  await using process = stream(http, path, args, { ...rest, stdin: stdin !== undefined });
  await process.start();
  const feeding = stdin === undefined ? Promise.resolve() : feed(process, stdin);
  feeding.catch(() => {}); // a program may end without reading; what is wrong, its end tells
  for await (const output of process) await kept[output.stream].take(output.data);
  await kept.stdout.end();
  await kept.stderr.end();
  const ended = await process.wait();
  return new ExecResult({
    exitCode: ended.exitCode ?? SIGNAL_EXIT_BASE + (ended.signal ?? 0),
    stdout: kept.stdout.output(),
    stderr: kept.stderr.output(),
    signal: ended.signal ?? null,
    timedOut: ended.timedOut ?? false,
    durationS: ended.durationS,
    truncated: (ended.truncated ?? false) || kept.stdout.truncated || kept.stderr.truncated,
    args,
  });
}

async function feed(process: Process, stdin: string | Uint8Array): Promise<void> {
  await process.write(stdin);
  await process.closeStdin();
}

/** Return a program with its streams attached. */
export function stream(http: Http, path: string, args: string[], options: StreamOptions): Process {
  const { tty, signal, timeoutS, env, cwd, user, stdin } = options;
  const size = tty === undefined ? undefined : { rows: tty[0], columns: tty[1] };
  const request = members({ args, stdin, tty: size, timeoutS, env, cwd, user });
  return new Process(http, `${path}/exec/stream`, request, signal);
}

/** One output of a program: its first bytes, and a function that is told all of it. */
export class Kept {
  truncated = false;
  readonly #callback: ((piece: never) => unknown) | undefined;
  readonly #decoder: InstanceType<typeof TextDecoder> | undefined;
  readonly #bytesMax: number;
  readonly #pieces: Uint8Array[] = [];
  #length = 0;

  constructor(
    callback: ((piece: never) => unknown) | undefined,
    isText: boolean,
    bytesMax = EXEC_OUTPUT_BYTES_MAX,
  ) {
    this.#callback = callback;
    this.#bytesMax = bytesMax;
    this.#decoder = isText ? new TextDecoder("utf-8", { ignoreBOM: true }) : undefined;
  }

  /** Keep what there is room for, and tell all of it. */
  async take(data: Uint8Array): Promise<void> {
    const room = this.#bytesMax - this.#length;
    if (data.length > room) this.truncated = true;
    const piece = data.subarray(0, room);
    if (piece.length > 0) this.#pieces.push(piece);
    this.#length += piece.length;
    await this.#tell(this.#decoder?.decode(data, { stream: true }) ?? data);
  }

  /** Tell what the end of the output says of an unfinished character. */
  async end(): Promise<void> {
    if (this.#decoder !== undefined) await this.#tell(this.#decoder.decode());
  }

  /** Return what was kept. */
  output(): string | Uint8Array {
    const all = Buffer.concat(this.#pieces);
    return this.#decoder === undefined ? new Uint8Array(all) : all.toString();
  }

  async #tell(piece: string | Uint8Array): Promise<void> {
    if (this.#callback !== undefined && piece.length > 0) await this.#callback(piece as never);
  }
}
