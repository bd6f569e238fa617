/** Requests to the daemon: answers checked and typed, errors thrown as what they were. */
import { Buffer } from "node:buffer";
import { randomUUID } from "node:crypto";
import { REQUIRED } from "./answers.gen.js";
import { discover, type Endpoint } from "./endpoint.js";
import { ClientClosed, fromAnswer, fromBody, NotFound, TransportError } from "./errors.js";
import { pause, REPEATABLE, RETRIES_MAX, Retries } from "./retries.js";
import { type Answer, type Content, type Socket, Transport } from "./transport.js";
import { camelized, type Info, type Schemas } from "./wire.js";

/** Time a short call may take; calls that wait for work in a guest say how long themselves. */
export const ANSWER_TIMEOUT_S = 120;

const NDJSON = "application/x-ndjson";
const JSON_TYPE = "application/json";
const ERROR_STATUS = 400;

/** The header by which the daemon knows a request that is made again. */
const KEY_HEADER = "idempotency-key";

/** The header that has the `after` of a list's next part. */
const NEXT_HEADER = "forkd-next";

/** How much of a line that makes no sense is repeated. */
const QUOTED_CHARS_MAX = 200;

/** What most calls take beside their own options. */
export interface CallOptions {
  /** Ends the call: its promise is rejected with the signal's reason. */
  signal?: AbortSignal;
}

/** A step of an operation that takes long. */
export type Progress = Info<"ProgressEvent">;

export type Query = Readonly<Record<string, unknown>>;

/** The parts of a request. */
export interface Parts {
  body?: object | undefined;
  query?: Query | undefined;
  content?: Content | undefined;
  contentType?: string | undefined;
  /** Whether it makes something, which the daemon must not make twice. */
  creates?: boolean;
  /** Time that the answer may take, in seconds; null: for ever. */
  timeoutS?: number | null;
  signal?: AbortSignal | undefined;
}

/** A name of a type of the API. */
export type Kind = keyof Schemas;

/** A client's connections to one daemon. */
export class Http {
  readonly endpoint: Endpoint;
  readonly #retriesMax: number;
  readonly #transport: Transport;
  #isClosed = false;

  constructor(endpoint: Endpoint, retriesMax: number = RETRIES_MAX) {
    this.endpoint = endpoint;
    this.#retriesMax = retriesMax;
    this.#transport = new Transport(endpoint);
  }

  /** Return the connections that are there for whoever opened none, one for each daemon. */
  static default(): Http {
    const endpoint = discover();
    const kept = DEFAULTS.get(endpoint.key) ?? new Http(endpoint);
    DEFAULTS.set(endpoint.key, kept);
    return kept;
  }

  /** Close every connection. */
  close(): void {
    this.#isClosed = true;
    this.#transport.close();
  }

  /** Return the answer to one request; `retries.ts` says what is tried again. */
  async call<K extends Kind>(
    kind: K,
    method: string,
    path: string,
    parts: Parts = {},
  ): Promise<Info<K>> {
    return checked(kind, await this.#json(method, path, parts));
  }

  /** Return a list; as `call`. */
  async list<K extends Kind>(kind: K, path: string, parts: Parts = {}): Promise<Info<K>[]> {
    return checkedList(kind, await this.#json("GET", path, parts));
  }

  /** Return what is either of some kinds each; as `call`. */
  async outcomes<K extends Kind>(
    kinds: readonly K[],
    path: string,
    parts: Parts,
  ): Promise<Info<K>[]> {
    const found = await this.#json("POST", path, parts);
    if (!Array.isArray(found)) throw nonsense("it is no list");
    return found.map((each) => {
      const kind = kinds.find((name) => lacking(name, each).length === 0);
      if (kind === undefined) throw nonsense(`it is none of ${kinds.join(", ")}`);
      return camelized(each) as Info<K>;
    });
  }

  /** Return a part of a list, and the `after` of the next part. */
  async page<K extends Kind>(
    kind: K,
    path: string,
    parts: Parts,
  ): Promise<[Info<K>[], string | undefined]> {
    const answer = await this.#answered("GET", path, parts);
    const next = answer.headers[NEXT_HEADER];
    const found = checkedList(kind, parsed(await text(answer)));
    return [found, typeof next === "string" ? next : undefined];
  }

  /** Make a request whose answer is empty; as `call`. */
  async send(method: string, path: string, parts: Parts = {}): Promise<void> {
    await this.#text(method, path, parts);
  }

  /**
   * Follow a stream of events to its result, handing every step to `onProgress`.
   *
   * The request has a key: where the connection breaks, the daemon goes on with what it does, and
   * tells a second request the same events from the first one on.
   */
  async events<K extends Kind>(
    kind: K,
    event: string,
    path: string,
    body: object,
    onProgress?: (step: Progress) => unknown,
    signal?: AbortSignal,
  ): Promise<Info<K>> {
    const headers = { accept: NDJSON, [KEY_HEADER]: newKey() };
    const retries = new Retries(this.#retriesMax, { repeatable: true });
    const steps = new Steps(onProgress);
    for (;;) {
      const parts = { body, timeoutS: null, signal };
      const answer = await this.#answered("POST", path, parts, headers, true);
      try {
        return await followed(answer, kind, event, steps);
      } catch (error) {
        const pauseS = retries.pauseS(error);
        if (pauseS === undefined) throw error;
        await pause(pauseS, signal);
      } finally {
        answer.discard();
      }
    }
  }

  /** Open an answer whose bytes are read as they come. */
  async streamed(path: string, parts: Parts = {}): Promise<Answer> {
    return await this.#answered("GET", path, { timeoutS: null, ...parts });
  }

  /** Open a WebSocket. */
  async socket(path: string, signal?: AbortSignal): Promise<Socket> {
    this.#checkOpen();
    return await this.#transport.socket(path, signal);
  }

  #checkOpen(): void {
    if (!this.#isClosed) return;
    throw new ClientClosed(
      `this client of ${this.endpoint.url} is closed; make the call before that, or with another ` +
        "client",
    );
  }

  async #json(method: string, path: string, parts: Parts): Promise<unknown> {
    return parsed(await this.#text(method, path, parts));
  }

  async #text(method: string, path: string, parts: Parts): Promise<string> {
    const repeatable = parts.creates === true || REPEATABLE.has(method);
    const retries = this.#retries(parts, repeatable);
    const headers: Record<string, string> = parts.creates ? { [KEY_HEADER]: newKey() } : {};
    for (;;) {
      try {
        return await text(await this.#once(method, path, parts, headers));
      } catch (error) {
        if (method === "DELETE" && retries.lost && error instanceof NotFound) {
          return ""; // the attempt whose answer was lost did it
        }
        const pauseS = retries.pauseS(error);
        if (pauseS === undefined) throw error;
        await pause(pauseS, parts.signal);
      }
    }
  }

  /** Return the answer to a request, which is made again until its head is there. */
  async #answered(
    method: string,
    path: string,
    parts: Parts,
    headers: Record<string, string> = {},
    repeatable = REPEATABLE.has(method),
  ): Promise<Answer> {
    const retries = this.#retries(parts, repeatable);
    for (;;) {
      try {
        return await this.#once(method, path, parts, headers);
      } catch (error) {
        const pauseS = retries.pauseS(error);
        if (pauseS === undefined) throw error;
        await pause(pauseS, parts.signal);
      }
    }
  }

  #retries(parts: Parts, repeatable: boolean): Retries {
    const { content } = parts;
    const resendable = content === undefined || content instanceof Uint8Array;
    return new Retries(this.#retriesMax, { repeatable, resendable });
  }

  async #once(
    method: string,
    path: string,
    parts: Parts,
    headers: Record<string, string>,
  ): Promise<Answer> {
    this.#checkOpen();
    const { body, content, contentType } = parts;
    const type = body === undefined ? contentType : JSON_TYPE;
    const answer = await this.#transport.send({
      method,
      path: path + encodedQuery(parts.query),
      headers: { ...(type === undefined ? {} : { "content-type": type }), ...headers },
      content: body === undefined ? content : Buffer.from(JSON.stringify(body)),
      timeoutS: parts.timeoutS === undefined ? ANSWER_TIMEOUT_S : parts.timeoutS,
      signal: parts.signal,
    });
    if (answer.status < ERROR_STATUS) return answer;
    throw fromAnswer(answer.status, await text(answer));
  }
}

const DEFAULTS = new Map<string, Http>();

/** Return a name as one segment of a path, whatever is in it. */
export function quoted(name: string): string {
  return encodeURIComponent(name);
}

/** Return all that an answer has. */
export async function bytes(answer: Answer): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  for await (const piece of answer.body) pieces.push(piece);
  const all = Buffer.concat(pieces);
  return new Uint8Array(all.buffer, all.byteOffset, all.byteLength);
}

async function text(answer: Answer): Promise<string> {
  return Buffer.from(await bytes(answer)).toString();
}

/** Yield the lines of an answer, without their ends. */
export async function* lines(answer: Answer): AsyncGenerator<string, void, void> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of answer.body) {
    const found = (rest + decoder.decode(piece, { stream: true })).split("\n");
    rest = found.pop() ?? "";
    for (const line of found) yield line.replace(/\r$/, "");
  }
  rest += decoder.decode();
  if (rest !== "") yield rest;
}

/** The steps of an operation: each is told once, however often they come from the first on. */
class Steps {
  readonly #onProgress: ((step: Progress) => unknown) | undefined;
  #told = 0;
  #come = 0;

  constructor(onProgress: ((step: Progress) => unknown) | undefined) {
    this.#onProgress = onProgress;
  }

  begin(): void {
    this.#come = 0;
  }

  take(step: Progress): void {
    this.#come += 1;
    if (this.#come <= this.#told) return;
    this.#told = this.#come;
    this.#onProgress?.(step);
  }
}

async function followed<K extends Kind>(
  answer: Answer,
  kind: K,
  event: string,
  steps: Steps,
): Promise<Info<K>> {
  steps.begin();
  for await (const line of lines(answer)) {
    const said = parsedEvent(line);
    if (said.event === "error") throw fromBody(said as unknown as Schemas["ErrorEvent"]);
    if (said.event === "progress") steps.take(camelized(said) as Progress);
    if (said.event === event) return checked(kind, said);
  }
  throw new TransportError("the stream of events ended before its result");
}

function parsedEvent(line: string): Record<string, unknown> {
  try {
    const said: unknown = JSON.parse(line);
    if (typeof said === "object" && said !== null && "event" in said) return { ...said };
  } catch {
    // as below
  }
  throw nonsense(JSON.stringify(line.slice(0, QUOTED_CHARS_MAX)));
}

function encodedQuery(query: Query | undefined): string {
  const pairs = new URLSearchParams();
  for (const [key, value] of Object.entries(query ?? {})) {
    if (value === undefined || value === null) continue;
    for (const each of Array.isArray(value) ? value : [value]) pairs.append(key, String(each));
  }
  const said = pairs.toString();
  return said === "" ? "" : `?${said}`;
}

/** Return a key that no other request has. */
function newKey(): string {
  return randomUUID().replace(/-/g, "");
}

function parsed(said: string): unknown {
  if (said === "") return null;
  try {
    return JSON.parse(said);
  } catch (error) {
    throw nonsense(String(error));
  }
}

/** Return an answer as what it must be, with camelCase names. */
export function checked<K extends Kind>(kind: K, said: unknown): Info<K> {
  const missing = lacking(kind, said);
  if (missing.length > 0) throw nonsense(`${kind} lacks ${missing.join(", ")}`);
  return camelized(said) as Info<K>;
}

function checkedList<K extends Kind>(kind: K, said: unknown): Info<K>[] {
  if (!Array.isArray(said)) throw nonsense("it is no list");
  return said.map((each) => checked(kind, each));
}

function lacking(kind: Kind, said: unknown): readonly string[] {
  if (typeof said !== "object" || said === null || Array.isArray(said)) return ["everything"];
  return (REQUIRED[kind] ?? []).filter((member) => !(member in said));
}

function nonsense(why: string): TransportError {
  return new TransportError(`this daemon's answer makes no sense to us: ${why}`);
}
