/** A program that runs in a sandbox, with its streams attached. */
import { Buffer } from "node:buffer";
import { fromBody, TransportError } from "./errors.js";
import { checked, type Http, type Kind } from "./http.js";
import type { Output } from "./results.js";
import type { Socket } from "./transport.js";
import type { Info, Schemas } from "./wire.js";

/** First byte of each message of the exec WebSocket. */
export const REQUEST = 1;
export const REPLY = 2;
const ERROR = 3;
const EVENT = 4;
const CONTROL = 5;
const STDIN = 16;
const STDIN_EOF = 17;
export const STDOUT = 18;
export const STDERR = 19;

const NAMES: Readonly<Record<number, string>> = {
  [REPLY]: "REPLY",
  [EVENT]: "EVENT",
  [STDOUT]: "STDOUT",
  [STDERR]: "STDERR",
};

/** Input is cut into messages of this size, so that output is never stuck behind much of it. */
const STDIN_CHUNK_BYTES = 64 * 1024;

/** How a program with its streams attached ended. */
export type ExecExit = Info<"ExecExit">;

/**
 * A program in a guest: an iterator of its `Output`.
 *
 * ```ts
 * for await (const output of sandbox.execStream(["make", "test"])) {
 *   process.stdout.write(output.data);
 * }
 * ```
 *
 * The loop starts the program, and lets go of it at its end.  So does any other method: then
 * `await using`, or `close`, ends the program if it still runs.
 */
export class Process implements AsyncIterable<Output>, AsyncDisposable {
  readonly #http: Http;
  readonly #path: string;
  readonly #request: object;
  readonly #signal: AbortSignal | undefined;
  #opening: Promise<Socket> | undefined;
  #socket: Socket | undefined;
  #isClosed = false;
  #pid: number | undefined;
  #exit: ExecExit | undefined;

  /** @internal */
  constructor(http: Http, path: string, request: object, signal?: AbortSignal) {
    this.#http = http;
    this.#path = path;
    this.#request = request;
    this.#signal = signal;
  }

  /** Its process id in the guest, once it is started. */
  get pid(): number | undefined {
    return this.#pid;
  }

  /** How it ended, once the iteration is over. */
  get exit(): ExecExit | undefined {
    return this.#exit;
  }

  /** Start it, unless it was started. */
  async start(): Promise<this> {
    await this.#open();
    return this;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Output, void, void> {
    const isOurs = this.#opening === undefined;
    try {
      for (;;) {
        const output = await this.#next();
        if (output === undefined) return;
        yield output;
      }
    } finally {
      if (isOurs) this.#letGo();
    }
  }

  /** Drop all further output, and return how the program ended; starts it if need be. */
  async wait(): Promise<ExecExit> {
    for await (const _ of this);
    if (this.#exit === undefined) throw new TransportError("the program's end was not told");
    return this.#exit;
  }

  /** Write to the program's standard input; waits while it has no room. */
  async write(data: string | Uint8Array): Promise<void> {
    const bytes = typeof data === "string" ? Buffer.from(data) : data;
    for (let start = 0; start < bytes.length; start += STDIN_CHUNK_BYTES) {
      await this.#send(STDIN, bytes.subarray(start, start + STDIN_CHUNK_BYTES));
    }
  }

  /** Let the program see the end of its standard input. */
  async closeStdin(): Promise<void> {
    await this.#send(STDIN_EOF);
  }

  /** Send a signal, such as 15, to the program and what it started. */
  async sendSignal(signal: number): Promise<void> {
    await this.#control({ signal });
  }

  /** Tell the program that its terminal has another size. */
  async resize(rows: number, columns: number): Promise<void> {
    await this.#control({ resize: { rows, columns } });
  }

  /** Let go; the guest kills the program if it still runs.  Idempotent. */
  async close(): Promise<void> {
    this.#letGo();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#letGo();
  }

  #letGo(): void {
    this.#isClosed = true;
    this.#signal?.removeEventListener("abort", this.#abort);
    this.#socket?.close();
  }

  readonly #abort = (): void => {
    this.#socket?.end(this.#signal?.reason);
    this.#letGo();
  };

  async #next(): Promise<Output | undefined> {
    if (this.#exit !== undefined) return undefined;
    const [kind, payload] = await received(await this.#open());
    if (kind === STDOUT) return { stream: "stdout", data: payload };
    if (kind === STDERR) return { stream: "stderr", data: payload };
    expect(kind, REPLY);
    this.#exit = answer("ExecExit", payload);
    return undefined;
  }

  #open(): Promise<Socket> {
    this.#opening ??= this.#started();
    return this.#opening;
  }

  async #started(): Promise<Socket> {
    const socket = await this.#http.socket(this.#path, this.#signal);
    this.#socket = socket;
    this.#signal?.addEventListener("abort", this.#abort, { once: true });
    try {
      if (this.#isClosed) throw new TransportError("the program was let go of");
      await socket.send(message(REQUEST, Buffer.from(JSON.stringify(this.#request))));
      const [kind, payload] = await received(socket);
      expect(kind, EVENT);
      this.#pid = answer("ExecStarted", payload).pid;
      return socket;
    } catch (error) {
      this.#letGo();
      throw error;
    }
  }

  async #control(order: Partial<Schemas["ExecControl"]>): Promise<void> {
    await this.#send(CONTROL, Buffer.from(JSON.stringify(order)));
  }

  async #send(kind: number, payload?: Uint8Array): Promise<void> {
    await (await this.#open()).send(message(kind, payload));
  }
}

/** Return the next message; an ERROR is thrown. */
export async function received(socket: Socket): Promise<[number, Uint8Array]> {
  const found = await socket.receive();
  const [kind, payload] = [found[0], found.subarray(1)];
  if (kind === undefined) throw new TransportError("a message of this daemon is empty");
  if (kind === ERROR) throw fromBody(parsed(payload) as Schemas["ErrorBody"]);
  return [kind, payload];
}

/** Return a message of a kind. */
export function message(kind: number, payload: Uint8Array = new Uint8Array()): Uint8Array {
  const made = new Uint8Array(1 + payload.length);
  made[0] = kind;
  made.set(payload, 1);
  return made;
}

/** Throw unless a message is of the kind that belongs there. */
export function expect(kind: number, expected: number): void {
  if (kind === expected) return;
  const names = [NAMES[kind] ?? String(kind), NAMES[expected]];
  throw new TransportError(`${names[0]} came where ${names[1]} belongs`);
}

/** Return what the payload of a message says. */
export function answer<K extends Kind>(kind: K, payload: Uint8Array): Info<K> {
  return checked(kind, parsed(payload));
}

function parsed(payload: Uint8Array): unknown {
  try {
    return JSON.parse(Buffer.from(payload).toString());
  } catch (error) {
    throw new TransportError(`this daemon's answer makes no sense to us: ${error}`);
  }
}
