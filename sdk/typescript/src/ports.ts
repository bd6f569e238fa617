/** Connections to programs that listen in a sandbox, and ports of this host that lead to them. */
import { createServer, isIP, type Server, type Socket as TcpSocket } from "node:net";
import { PORT_MAX } from "./answers.gen.js";
import { Conflict, ForkdError, InvalidRequest, TransportError } from "./errors.js";
import type { CallOptions, Http } from "./http.js";
import type { Socket } from "./transport.js";

/** What is sent is cut into messages of this size. */
const CHUNK_BYTES = 64 * 1024;

/** Connections that the kernel holds until they are accepted. */
const BACKLOG = 1024;

/** The end of a direction. */
const END = new Uint8Array();

/** Where a port of this host listens. */
export interface ForwardOptions extends CallOptions {
  /** The address to listen on: the default, `127.0.0.1`, serves this host alone. */
  host?: string;
  /** The port to listen on; 0, the default, for a free one, which is `port` of the result. */
  hostPort?: number;
  /** Called with what refuses or breaks a connection, which is then reset. */
  onError?: (error: ForkdError) => unknown;
}

/** @internal */
export const FORWARD_OPTIONS: Record<keyof ForwardOptions, true> = {
  host: true,
  hostPort: true,
  onError: true,
  signal: true,
};

/** Return a port of a sandbox. */
export function checkedPort(port: number): number {
  return checkedNumber("port", port, 1);
}

function checkedNumber(field: string, port: number, least: number): number {
  if (Number.isInteger(port) && port >= least && port <= PORT_MAX) return port;
  throw new InvalidRequest(`${field} must be ${least} to ${PORT_MAX}, not ${port}`, {
    context: { field },
  });
}

/**
 * A connection to a program in a sandbox: an iterator of the bytes that the program sends.
 *
 * ```ts
 * await using port = await sandbox.connectPort(8000);
 * await port.send("GET / HTTP/1.0\r\n\r\n");
 * for await (const data of port) process.stdout.write(data);
 * ```
 *
 * Closing it before both sides have ended resets the connection.
 */
export class Port implements AsyncIterable<Uint8Array>, AsyncDisposable {
  readonly #socket: Socket;
  readonly #signal: AbortSignal | undefined;
  #hasEnded = false;

  /** @internal */
  constructor(socket: Socket, signal?: AbortSignal) {
    this.#socket = socket;
    this.#signal = signal;
    signal?.addEventListener("abort", this.#abort, { once: true });
  }

  /** Connect to the program that listens on a port of the sandbox at `path`. */
  static async open(http: Http, path: string, signal?: AbortSignal): Promise<Port> {
    return new Port(await http.socket(path, signal), signal);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void> {
    for (;;) {
      const data = await this.receive();
      if (data.length === 0) return;
      yield data;
    }
  }

  /**
   * Send bytes to the program; waits while it has no room.
   *
   * @throws {TransportError} The connection broke.
   */
  async send(data: string | Uint8Array): Promise<void> {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    for (let start = 0; start < bytes.length; start += CHUNK_BYTES) {
      await this.#socket.send(bytes.subarray(start, start + CHUNK_BYTES));
    }
  }

  /** Let the program see the end of what is sent. */
  async sendEnd(): Promise<void> {
    await this.#socket.send(END);
  }

  /**
   * Return what the program sends next; nothing when it has ended that.
   *
   * @throws {TransportError} The connection broke.
   */
  async receive(): Promise<Uint8Array> {
    if (this.#hasEnded) return END;
    const data = await this.#socket.receive();
    this.#hasEnded = data.length === 0;
    return data;
  }

  /** Let go.  Idempotent. */
  async close(): Promise<void> {
    this.#letGo();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#letGo();
  }

  readonly #abort = (): void => {
    this.#socket.end(this.#signal?.reason);
    this.#letGo();
  };

  #letGo(): void {
    this.#signal?.removeEventListener("abort", this.#abort);
    this.#socket.end(new TransportError("the connection to the port was closed"));
    this.#socket.close();
  }
}

/**
 * A port of this host, forwarded to a program in a sandbox until it is closed.
 *
 * ```ts
 * await using forward = await sandbox.forward(8000);
 * console.log(`http://${forward.address}/`);
 * ```
 *
 * Any number of connections are forwarded at once, up to the daemon's limits.
 */
export class Forward implements AsyncDisposable {
  /** The address it listens on. */
  readonly host: string;
  /** The port of this host. */
  readonly port: number;
  /** The port in the sandbox. */
  readonly guestPort: number;
  readonly #http: Http;
  readonly #path: string;
  readonly #server: Server;
  readonly #onError: ForwardOptions["onError"];
  readonly #signal: AbortSignal | undefined;
  readonly #ending = new AbortController();
  readonly #connections = new Set<Promise<void>>();

  /** @internal */
  constructor(
    http: Http,
    path: string,
    guestPort: number,
    server: Server,
    options: ForwardOptions,
  ) {
    const { address, port } = server.address() as { address: string; port: number };
    this.host = address;
    this.port = port;
    this.guestPort = guestPort;
    this.#http = http;
    this.#path = path;
    this.#server = server;
    this.#onError = options.onError;
    this.#signal = options.signal;
    server.on("connection", (client) => this.#accept(client));
    this.#signal?.addEventListener("abort", this.#end, { once: true });
  }

  /**
   * Listen.
   *
   * @internal
   */
  static async open(
    http: Http,
    path: string,
    guestPort: number,
    options: ForwardOptions,
  ): Promise<Forward> {
    options.signal?.throwIfAborted();
    const server = await listening(options.host ?? "127.0.0.1", options.hostPort ?? 0);
    return new Forward(http, path, guestPort, server, options);
  }

  /** Where it listens, such as `127.0.0.1:40123`. */
  get address(): string {
    return `${this.host.includes(":") ? `[${this.host}]` : this.host}:${this.port}`;
  }

  /** Stop listening, and reset the connections that are left.  Idempotent. */
  async close(): Promise<void> {
    this.#end();
    await Promise.all(this.#connections);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  readonly #end = (): void => {
    this.#signal?.removeEventListener("abort", this.#end);
    this.#server.close();
    this.#ending.abort(new TransportError("the port is forwarded no more"));
  };

  #accept(client: TcpSocket): void {
    const serving = this.#serve(client).finally(() => this.#connections.delete(serving));
    this.#connections.add(serving);
  }

  async #serve(client: TcpSocket): Promise<void> {
    const { signal } = this.#ending;
    client.on("error", () => {}); // `relayed` hears of it by the end of the connection
    try {
      const program = await this.#http.socket(this.#path, signal);
      const stop = (): void => program.end(signal.reason);
      signal.addEventListener("abort", stop, { once: true });
      try {
        if (signal.aborted) throw signal.reason;
        await relayed(client, program);
      } finally {
        signal.removeEventListener("abort", stop);
        program.close();
      }
    } catch (error) {
      client.resetAndDestroy();
      if (error instanceof ForkdError && !signal.aborted) this.#onError?.(error);
    }
  }
}

/** The client of a connection has gone. */
class ClientGone extends Error {}

/** Pass on what each side sends, until both have ended. */
async function relayed(client: TcpSocket, program: Socket): Promise<void> {
  let fail: (error: unknown) => void = () => {};
  const broken = new Promise<never>((_, reject) => {
    fail = reject;
  });
  broken.catch(() => {}); // it is raced below, unless both have ended
  const gone = (): void => {
    program.end(new ClientGone());
    fail(new ClientGone());
  };
  client.once("close", gone);
  if (client.destroyed) gone();
  await Promise.race([broken, Promise.all([there(client, program), back(client, program)])]);
  client.removeListener("close", gone);
}

/** Send what the client writes, one piece after the other, and then its end. */
function there(client: TcpSocket, program: Socket): Promise<void> {
  return new Promise((resolve, reject) => {
    client.on("data", (piece) => {
      client.pause();
      program.send(new Uint8Array(piece)).then(() => client.resume(), reject);
    });
    client.once("end", () => {
      program.send(END).then(resolve, reject);
    });
    client.resume();
  });
}

/** Write what the program sends; a client that does not read holds it back. */
async function back(client: TcpSocket, program: Socket): Promise<void> {
  for (;;) {
    const data = await program.receive();
    if (data.length === 0) break;
    if (!client.write(data)) {
      await new Promise<void>((resolve) => {
        client.once("drain", resolve);
        client.once("close", () => resolve());
      });
    }
  }
  await new Promise<void>((resolve) => {
    client.once("close", () => resolve());
    client.end(() => resolve());
  });
}

/** Return a server that listens on an address of this host; port 0 is a free one. */
async function listening(host: string, hostPort: number): Promise<Server> {
  const where = host === "localhost" ? "127.0.0.1" : host;
  if (isIP(where) === 0) {
    throw new InvalidRequest(`'${host}' is not an address to listen on, such as 127.0.0.1 or ::1`, {
      context: { field: "host" },
    });
  }
  const port = checkedNumber("hostPort", hostPort, 0);
  const server = createServer({ allowHalfOpen: true, pauseOnConnect: true });
  await new Promise<void>((resolve, reject) => {
    server.once("error", (error) => reject(unavailable(where, port, error)));
    server.listen({ host: where, port, backlog: BACKLOG }, resolve);
  });
  return server;
}

function unavailable(host: string, port: number, error: NodeJS.ErrnoException): ForkdError {
  if (error.code === "EADDRINUSE") {
    return new Conflict(
      `port ${port} of ${host} is in use on this host: name another port, or 0 for a free one`,
      { cause: error },
    );
  }
  if (error.code === "EACCES") {
    return new InvalidRequest(
      `port ${port} needs root on this host, as low ports do: name another port, or 0 for a free ` +
        "one",
      { context: { field: "hostPort" }, cause: error },
    );
  }
  return new InvalidRequest(`cannot listen on ${host}, port ${port}: ${error.message}`, {
    context: { field: "host" },
    cause: error,
  });
}
