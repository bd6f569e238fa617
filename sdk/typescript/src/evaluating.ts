/** Evaluating code: over one request, or with its output as it comes. */
import { Buffer } from "node:buffer";
import { EVAL_OUTPUT_BYTES_MAX, EXEC_TIMEOUT_S_MAX } from "./answers.gen.js";
import type { CallOptions, Http } from "./http.js";
import { answer, expect, message, REPLY, REQUEST, received, STDERR, STDOUT } from "./process.js";
import {
  type CodeContext,
  type EvalError as EvalFault,
  EvalResult,
  judged,
  OutputMessage,
  type Result,
} from "./results.js";
import { Kept, TIMEOUT_MARGIN_S } from "./running.js";
import type { Socket } from "./transport.js";
import { members } from "./wire.js";

/** How code is evaluated. */
export interface EvalOptions extends CallOptions {
  /** Refuse the code if the warm runtime is another one, such as "node"; undefined: any. */
  runtime?: string;
  /**
   * Where it runs, with names and a working directory of their own: what `createCodeContext`
   * returned, or a name, whose first use makes it.
   */
  context?: string | CodeContext;
  /**
   * True: also throw `GuestError` for an exception in the code.  False: throw nothing, not even
   * `ExecTimeout`.
   */
  check?: boolean;
  /** Interrupt the code after this time, in seconds; undefined: never. */
  timeoutS?: number | null;
  /** Variables of the environment, for this code alone. */
  env?: Readonly<Record<string, string>>;
  /** Called with each piece of output, as it comes; a promise that it returns is waited for. */
  onStdout?: (piece: string) => unknown;
  /** Called with each piece of error output, as it comes. */
  onStderr?: (piece: string) => unknown;
}

/** How code is run under E2B's names. */
export interface RunCodeOptions extends CallOptions {
  /** Refuse the code if the warm runtime is another one. */
  language?: string;
  /** Where it runs; as of `eval`. */
  context?: string | CodeContext;
  /** Interrupt the code after this time, in milliseconds; undefined: never. */
  timeoutMs?: number;
  /** Variables of the environment, for this code alone. */
  envs?: Readonly<Record<string, string>>;
  /** Called with each piece of output, as it comes; a promise that it returns is waited for. */
  onStdout?: (piece: OutputMessage) => unknown;
  /** Called with each piece of error output, as it comes. */
  onStderr?: (piece: OutputMessage) => unknown;
  /** Called with each of the results, in their order, once the code has ended. */
  onResult?: (result: Result) => unknown;
  /** Called with the exception that the code raised, if it raised one. */
  onError?: (error: EvalFault) => unknown;
}

/** @internal */
export const EVAL_OPTIONS: Record<keyof EvalOptions, true> = {
  runtime: true,
  context: true,
  check: true,
  timeoutS: true,
  env: true,
  onStdout: true,
  onStderr: true,
  signal: true,
};

/** @internal */
export const RUN_CODE_OPTIONS: Record<keyof RunCodeOptions, true> = {
  language: true,
  context: true,
  timeoutMs: true,
  envs: true,
  onStdout: true,
  onStderr: true,
  onResult: true,
  onError: true,
  signal: true,
};

/** Return a context's name. */
export function nameOf(context: string | CodeContext): string {
  return typeof context === "string" ? context : context.id;
}

/** Evaluate code in the sandbox at `path`. */
export async function evaluated(
  http: Http,
  path: string,
  code: string,
  options: EvalOptions,
): Promise<EvalResult> {
  const { runtime, env, timeoutS = null, onStdout, onStderr, signal } = options;
  const context = options.context === undefined ? undefined : nameOf(options.context);
  const limitS = timeoutS ?? EXEC_TIMEOUT_S_MAX;
  const body = { code, ...members({ runtime, context, env, timeoutS: limitS }) };
  if (onStdout !== undefined || onStderr !== undefined) {
    return judged(await attached(http, `${path}/eval/stream`, body, options), options.check);
  }
  const answered = await http.call("EvalResult", "POST", `${path}/eval`, {
    body,
    timeoutS: timeoutS === null ? null : timeoutS + TIMEOUT_MARGIN_S,
    signal,
  });
  return judged(new EvalResult(answered), options.check);
}

/** Take what the code writes as it comes; letting go of the socket interrupts the code. */
async function attached(
  http: Http,
  path: string,
  body: object,
  options: EvalOptions,
): Promise<EvalResult> {
  const { onStdout, onStderr, signal } = options;
  const socket = await http.socket(path, signal);
  const abort = () => socket.end(signal?.reason);
  signal?.addEventListener("abort", abort, { once: true });
  try {
    await socket.send(message(REQUEST, Buffer.from(JSON.stringify(body))));
    return await taken(
      socket,
      new Kept(onStdout, true, EVAL_OUTPUT_BYTES_MAX),
      new Kept(onStderr, true, EVAL_OUTPUT_BYTES_MAX),
    );
  } finally {
    signal?.removeEventListener("abort", abort);
    socket.close();
  }
}

/** Take output until the code has ended. */
async function taken(socket: Socket, stdout: Kept, stderr: Kept): Promise<EvalResult> {
  let [kind, payload] = await received(socket);
  while (kind === STDOUT || kind === STDERR) {
    await (kind === STDOUT ? stdout : stderr).take(payload);
    [kind, payload] = await received(socket);
  }
  expect(kind, REPLY);
  await stdout.end();
  await stderr.end();
  return new EvalResult({
    ...answer("EvalResult", payload),
    stdout: String(stdout.output()),
    stderr: String(stderr.output()),
    truncated: stdout.truncated || stderr.truncated,
  });
}

/** Return what a function is called by with pieces of text; undefined for none. */
export function messages(
  callback: ((piece: OutputMessage) => unknown) | undefined,
  error: boolean,
): ((piece: string) => unknown) | undefined {
  if (callback === undefined) return undefined;
  return (text) => callback(new OutputMessage(text, error));
}
