/**
 * Every error that the SDK throws on purpose, one class for each code.
 *
 * Catch the narrowest class that you can act on, `ForkdError` at a boundary.  An aborted call
 * throws the reason of its `AbortSignal` instead.
 */
import { ERRORS_BY_CODE } from "./error-codes.gen.js";
import { Denied, RequestError } from "./errors.gen.js";
import { ForkdError } from "./root-error.js";
import type { Schemas } from "./wire.js";
import { argument } from "./wire.js";

export * from "./errors.gen.js";
export type { ErrorContext } from "./root-error.js";
export { ForkdError } from "./root-error.js";

/** How much is repeated of an answer that is not the daemon's. */
const MESSAGE_CHARS_MAX = 500;

const SERVER_ERROR = 500;

const BY_STATUS: Readonly<Record<number, typeof ForkdError>> = { 401: Denied, 403: Denied };

/** Return the error that `body` describes; a code we do not know becomes the root's class. */
export function fromBody(body: Schemas["ErrorBody"] | Schemas["ErrorEvent"]): ForkdError {
  const context: Record<string, string | number> = { ...body.context };
  let said = body.error;
  if (body.field !== undefined && body.field !== null) {
    const named = argument(body.field);
    context.field = named;
    if (said.startsWith(`${body.field}:`)) said = said.replace(body.field, named);
  }
  const kind = ERRORS_BY_CODE[body.code];
  if (kind === undefined) return new ForkdError(said, { context: { ...context, code: body.code } });
  return new kind(said, { context });
}

/** Return the error in an answer that was not a success, whoever wrote it. */
export function fromAnswer(status: number, text: string): ForkdError {
  const body = parsedBody(text);
  if (body !== undefined) return fromBody(body);
  const kind = BY_STATUS[status] ?? (status < SERVER_ERROR ? RequestError : ForkdError);
  return new kind(`HTTP ${status}: ${text.slice(0, MESSAGE_CHARS_MAX)}`, { context: { status } });
}

function parsedBody(text: string): Schemas["ErrorBody"] | undefined {
  try {
    const said: unknown = JSON.parse(text);
    if (typeof said !== "object" || said === null) return undefined;
    const { error, code } = said as Record<string, unknown>;
    if (typeof error !== "string" || typeof code !== "string") return undefined;
    return said as Schemas["ErrorBody"];
  } catch {
    return undefined;
  }
}
