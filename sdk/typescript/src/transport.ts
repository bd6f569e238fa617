/**
 * The connections themselves: HTTP over a Unix socket or TCP, and WebSockets.
 *
 * What goes wrong here is a `TransportError`; `wasUnsent` and `wasLost` say what the daemon may
 * have done by then.
 */
import { readFileSync, statSync } from "node:fs";
import * as http from "node:http";
import * as https from "node:https";
import { Readable } from "node:stream";
import WebSocket from "ws";
import { MESSAGE_BYTES_MAX } from "./answers.gen.js";
import type { Endpoint } from "./endpoint.js";
import { type ForkdError, fromAnswer, InvalidRequest, TransportError } from "./errors.js";

/** Time to reach the daemon; once reached, each call says how long its answer may take. */
const CONNECT_TIMEOUT_S = 10;

/** Time for the first answer of a WebSocket, which a busy daemon may be slow to give. */
const OPEN_TIMEOUT_S = 60;

/** Requests in flight at once; more wait their turn. */
const CONNECTIONS_MAX = 256;

const IDLE_CONNECTIONS_MAX = 32;

/** When the kernel begins to ask whether the other side of a silent connection is there. */
const KEEPALIVE_S = 30;

/** Longest time that a timer of JavaScript can have. */
const TIMER_MS_MAX = 2 ** 31 - 1;

/** Messages that wait for a reader before no more are taken from the daemon. */
const UNREAD_MAX = 16;

/** What a request may carry, if it is no JSON. */
export type Content = Uint8Array | AsyncIterable<Uint8Array>;

/** One request. */
export interface Request {
  method: string;
  path: string;
  headers: Record<string, string>;
  content?: Content | undefined;
  /** How long the daemon may be silent, in seconds; null: for ever. */
  timeoutS: number | null;
  signal?: AbortSignal | undefined;
}

/** An answer whose body has not been read. */
export interface Answer {
  status: number;
  headers: Readonly<Record<string, string | string[] | undefined>>;
  body: AsyncIterable<Uint8Array>;
  /** Let go of what was not read. */
  discard(): void;
}

type Fault = "unsent" | "lost";

const FAULTS = new WeakMap<TransportError, Fault>();

/** Whether the daemon was never reached, so that it has done nothing. */
export function wasUnsent(error: TransportError): boolean {
  return FAULTS.get(error) === "unsent";
}

/** Whether the connection broke, so that the daemon may have done it, or not. */
export function wasLost(error: TransportError): boolean {
  return FAULTS.get(error) === "lost";
}

function fault(kind: Fault | undefined, message: string, cause?: unknown): TransportError {
  const made = new TransportError(message, { cause });
  if (kind !== undefined) FAULTS.set(made, kind);
  return made;
}

/** A connection pool to one daemon. */
export class Transport {
  readonly endpoint: Endpoint;
  readonly #base: URL;
  readonly #agent: http.Agent;
  readonly #tls: Tls;

  constructor(endpoint: Endpoint) {
    checkRuntime(endpoint);
    this.endpoint = endpoint;
    this.#base = new URL(endpoint.httpUrl);
    this.#tls = tlsOf(endpoint);
    const pool = {
      keepAlive: true,
      keepAliveMsecs: KEEPALIVE_S * 1000,
      maxSockets: CONNECTIONS_MAX,
      maxFreeSockets: IDLE_CONNECTIONS_MAX,
    };
    this.#agent = this.#isTls ? new https.Agent(pool) : new http.Agent(pool);
  }

  get #isTls(): boolean {
    return this.#base.protocol === "https:";
  }

  /** Close every connection. */
  close(): void {
    this.#agent.destroy();
  }

  /** Make a request; return its answer once the head of that is there. */
  send(request: Request): Promise<Answer> {
    request.signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      const state = new Exchange(this.endpoint, request.signal, reject);
      const made = this.#begin(request);
      state.follow(made, request.timeoutS);
      made.on("response", (response) => resolve(state.answer(response)));
      sendContent(made, request.content);
    });
  }

  #begin(request: Request): http.ClientRequest {
    const options: https.RequestOptions = {
      method: request.method,
      path: this.#base.pathname.replace(/\/$/, "") + request.path,
      headers: { host: this.#base.host, ...this.endpoint.headers, ...request.headers },
      agent: this.#agent,
    };
    if (this.endpoint.socket !== undefined) {
      return http.request({ ...options, socketPath: this.endpoint.socket });
    }
    const { hostname, port } = this.#base;
    const where = { host: hostname.replace(/^\[|\]$/g, ""), port };
    if (!this.#isTls) return http.request({ ...options, ...where });
    return https.request({ ...options, ...where, ...this.#tls });
  }

  /** Open a WebSocket. */
  socket(path: string, signal?: AbortSignal): Promise<Socket> {
    signal?.throwIfAborted();
    const base = this.endpoint.httpUrl.replace(/^http/, "ws");
    const url =
      this.endpoint.socket === undefined
        ? base + path
        : `ws+unix://${this.endpoint.socket}:${path}`;
    const made = new WebSocket(url, {
      headers: this.endpoint.headers,
      perMessageDeflate: false,
      maxPayload: MESSAGE_BYTES_MAX,
      handshakeTimeout: OPEN_TIMEOUT_S * 1000,
      ...this.#tls,
    });
    return opened(made, this.endpoint, signal);
  }
}

/** Refuse a runtime that lacks what this package uses, before a call fails for that in its middle. */
function checkRuntime(endpoint: Endpoint): void {
  if (typeof String.prototype.isWellFormed !== "function") {
    throw new InvalidRequest(
      `@forkd/sdk needs Node.js 20 or later, Bun or Deno; this is Node.js ${process.version}`,
    );
  }
  if (endpoint.socket !== undefined && process.platform === "win32") {
    throw new InvalidRequest(
      `url: ${endpoint.url} is a Unix socket, which JavaScript cannot use on Windows; give the ` +
        "daemon's TCP address, such as http://127.0.0.1:8889, as `url` or FORKD_URL",
      { context: { field: "url" } },
    );
  }
}

/** What becomes of one request: every way in which it can end ends it once. */
class Exchange {
  readonly #endpoint: Endpoint;
  readonly #signal: AbortSignal | undefined;
  readonly #reject: (error: unknown) => void;
  #isConnected = false;
  #hasTimedOut = false;
  #response: http.IncomingMessage | undefined;

  constructor(
    endpoint: Endpoint,
    signal: AbortSignal | undefined,
    reject: (error: unknown) => void,
  ) {
    this.#endpoint = endpoint;
    this.#signal = signal;
    this.#reject = reject;
  }

  follow(request: http.ClientRequest, timeoutS: number | null): void {
    request.on("error", (error) => this.#reject(this.#explained(error)));
    const connecting = setTimeout(() => {
      request.destroy(new Error(`not reached within ${CONNECT_TIMEOUT_S} s`));
    }, CONNECT_TIMEOUT_S * 1000);
    const connected = (): void => {
      this.#isConnected = true;
      clearTimeout(connecting);
    };
    request.on("socket", (socket) => {
      if (socket.connecting) socket.once("connect", connected);
      else connected();
    });
    if (timeoutS !== null) {
      request.setTimeout(Math.min(timeoutS * 1000, TIMER_MS_MAX), () => {
        if ((this.#response?.readableLength ?? 0) > 0) return; // it is the reader who is slow
        this.#hasTimedOut = true;
        request.destroy(new Error("timed out"));
      });
    }
    const abort = (): void => {
      this.#reject(this.#signal?.reason);
      request.destroy(new Error("aborted"));
    };
    this.#signal?.addEventListener("abort", abort, { once: true });
    request.on("close", () => {
      clearTimeout(connecting);
      this.#signal?.removeEventListener("abort", abort);
    });
  }

  answer(response: http.IncomingMessage): Answer {
    this.#response = response;
    return {
      status: response.statusCode ?? 0,
      headers: response.headers,
      body: this.#read(response),
      discard: () => response.destroy(),
    };
  }

  async *#read(response: http.IncomingMessage): AsyncGenerator<Uint8Array, void, void> {
    try {
      for await (const piece of response) yield piece as Uint8Array;
    } catch (error) {
      throw this.#explained(error as Error);
    }
    if (!response.complete) throw this.#explained(new Error("it ended early"));
  }

  #explained(error: Error): unknown {
    if (this.#signal?.aborted) return this.#signal.reason;
    const { url } = this.#endpoint;
    if (this.#hasTimedOut) return fault(undefined, `${url} did not answer in time`, error);
    if (!this.#isConnected) return fault("unsent", unreached(this.#endpoint, error), error);
    const said = tlsAdvice(url, error);
    if (said !== undefined) return fault(undefined, said, error);
    return fault("lost", gone(url), error);
  }
}

function sendContent(request: http.ClientRequest, content: Content | undefined): void {
  if (content === undefined || content instanceof Uint8Array) {
    request.end(content);
    return;
  }
  const source = Readable.from(content, { objectMode: false });
  source.on("error", (error) => request.destroy(error));
  request.on("close", () => source.destroy());
  source.pipe(request);
}

/** A WebSocket of binary messages, which takes no more than its reader has room for. */
export class Socket {
  readonly #socket: WebSocket;
  readonly #messages: Uint8Array[] = [];
  #wake: (() => void) | undefined;
  #ended: unknown;

  /** @internal */
  constructor(socket: WebSocket) {
    this.#socket = socket;
    socket.on("message", (data) => {
      this.#messages.push(bytesOf(data));
      if (this.#messages.length >= UNREAD_MAX) socket.pause?.();
      this.#wake?.();
    });
    socket.on("close", (code, reason) => {
      const said = reason?.length ? `${code} ${reason}` : code;
      this.end(new TransportError(`the connection to the daemon broke: ${said}`));
    });
    socket.on("error", (error) => {
      const words = `the connection to the daemon broke: ${error.message}`;
      this.end(new TransportError(words, { cause: error }));
    });
  }

  /** Send one message; waits while the other side has no room. */
  send(message: Uint8Array): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#socket.send(message, (error) => {
        if (error) {
          const words = `the connection to the daemon broke: ${error.message}`;
          reject(this.#ended ?? new TransportError(words, { cause: error }));
        } else {
          resolve();
        }
      });
    });
  }

  /** Return the next message. */
  async receive(): Promise<Uint8Array> {
    for (;;) {
      const found = this.#messages.shift();
      if (found !== undefined) {
        if (this.#messages.length === 0) this.#socket.resume?.();
        return found;
      }
      if (this.#ended !== undefined) throw this.#ended;
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  /** Have `receive` throw, once what came before was read. */
  end(error: unknown): void {
    this.#ended ??= error;
    this.#wake?.();
  }

  /** Close; idempotent. */
  close(): void {
    this.#socket.resume?.();
    this.#socket.close();
    this.#socket.terminate();
  }
}

function bytesOf(data: WebSocket.RawData | string): Uint8Array {
  if (typeof data === "string") return Buffer.from(data);
  if (Array.isArray(data)) return Buffer.concat(data);
  return data instanceof ArrayBuffer ? new Uint8Array(data) : data;
}

function opened(made: WebSocket, endpoint: Endpoint, signal?: AbortSignal): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const refuse = (error: unknown): void => {
      made.on("error", () => {}); // what closing it early says
      made.terminate();
      reject(error);
    };
    const abort = (): void => refuse(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    made.once("unexpected-response", (_, response) => {
      refusal(response).then(refuse, refuse);
    });
    made.once("error", (error) => refuse(fault("unsent", unreached(endpoint, error), error)));
    made.once("open", () => {
      signal?.removeEventListener("abort", abort);
      made.removeAllListeners("error");
      resolve(new Socket(made));
    });
  });
}

async function refusal(response: http.IncomingMessage): Promise<ForkdError> {
  const pieces: Uint8Array[] = [];
  for await (const piece of response) pieces.push(piece as Uint8Array);
  return fromAnswer(response.statusCode ?? 0, Buffer.concat(pieces).toString());
}

interface Tls {
  ca?: Buffer;
  cert?: Buffer;
  key?: Buffer;
}

function tlsOf(endpoint: Endpoint): Tls {
  if (!endpoint.url.startsWith("https:")) return {};
  const { caFile, clientCert, clientKey } = endpoint;
  const made: Tls = {};
  if (caFile !== undefined) {
    made.ca = pem("caFile", "FORKD_CA_FILE", caFile, "certificates of a CA, in PEM");
  }
  if (clientCert !== undefined) {
    const wanted = "a certificate and its key, in PEM, without a password";
    made.cert = pem("clientCert", "FORKD_CLIENT_CERT", clientCert, wanted);
    made.key =
      clientKey === undefined ? made.cert : pem("clientKey", "FORKD_CLIENT_KEY", clientKey, wanted);
  }
  return made;
}

/** Longest file of certificates that is read. */
const PEM_BYTES_MAX = 4 * 1024 * 1024;

function pem(field: string, variable: string, path: string, wanted: string): Buffer {
  let reason = "it holds none";
  try {
    if (statSync(path).size > PEM_BYTES_MAX) throw new Error("it is too long");
    const found = readFileSync(path);
    if (found.includes("-----BEGIN ")) return found;
  } catch (error) {
    reason = error instanceof Error ? error.message : String(error);
  }
  throw new InvalidRequest(
    `${field} (${variable}) ${path} cannot be used (${reason}): it must hold ${wanted}`,
    { context: { field } },
  );
}

/** Return what is wrong with how a daemon was reached, if that is known. */
function tlsAdvice(url: string, error: Error): string | undefined {
  const code = codeOf(error);
  if (url.startsWith("http:")) {
    if (code !== "ECONNRESET" || error.message !== "socket hang up") return undefined;
    const other = `https${url.slice("http".length)}`;
    return `${url} closed the connection without an answer; if it speaks TLS, its URL is ${other}`;
  }
  if (!url.startsWith("https:")) return undefined;
  if (code === "EPROTO" || code === "ERR_SSL_WRONG_VERSION_NUMBER") {
    return `${url} speaks no TLS; its URL is http${url.slice("https".length)}`;
  }
  if (/CERT|SELF_SIGNED|UNABLE_TO_(GET|VERIFY)/.test(code) && !code.includes("ALERT")) {
    return (
      `the certificate of ${url} is not trusted (${error.message}); caFile or FORKD_CA_FILE ` +
      "names the certificate of the CA that has signed it"
    );
  }
  if (code.includes("CERTIFICATE_REQUIRED")) {
    return `${url} asks for a certificate: set FORKD_CLIENT_CERT and FORKD_CLIENT_KEY`;
  }
  return undefined;
}

function gone(url: string): string {
  return (
    `the daemon at ${url} ended the connection before its answer was whole: it was stopped or ` +
    "restarted, or what it answered with ended; sandboxes outlive a daemon"
  );
}

function unreached(endpoint: Endpoint, error: Error): string {
  if (endpoint.socket !== undefined && codeOf(error) === "EACCES") {
    return (
      `${endpoint.socket} is closed to you: join its group ` +
      "(`sudo usermod --append --groups forkd $USER`, then log in again), or start a daemon of " +
      "your own with FORKD_HOME set and `forkd up`"
    );
  }
  const said = tlsAdvice(endpoint.url, error);
  const why = error.message || codeOf(error);
  return said ?? `no daemon answers at ${endpoint.url} (${why}); \`forkd up\` starts one`;
}

function codeOf(error: Error): string {
  const { code } = error as NodeJS.ErrnoException;
  return typeof code === "string" ? code : "";
}
