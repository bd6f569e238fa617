/**
 * Where the daemon is, and what to show it to be let in.
 *
 * The first of these that says something wins:
 *
 * 1. what the caller passes to `new Client({ … })`;
 * 2. `FORKD_URL` and `FORKD_TOKEN`;
 * 3. the context that `FORKD_CONTEXT` or `forkd context use` names, unless that is `local`;
 * 4. `endpoint.json`, which `forkd up` leaves in its state folder;
 * 5. the daemon's own socket, `/run/forkd/forkd.sock`, if it is there;
 * 6. `http://127.0.0.1:8889`.
 */
import { existsSync, readFileSync, statSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { InvalidRequest, NotFound } from "./errors.gen.js";

const SOCKET_DEFAULT = "/run/forkd/forkd.sock";
const URL_DEFAULT = "http://127.0.0.1:8889";

/** An endpoint or token file longer than this is not one of ours. */
const FILE_BYTES_MAX = 64 * 1024;

/** Longest file of contexts that is read. */
const CONTEXTS_BYTES_MAX = 1024 * 1024;

const LOCAL = "local";

/** What a caller may say of a daemon. */
export interface EndpointOptions {
  /** `http://host:port`, `https://host:port` or `unix:///path`. */
  url?: string;
  /** The bearer token; else `FORKD_TOKEN`. */
  token?: string;
  /** Certificates of the CA that has signed the daemon's; else `FORKD_CA_FILE`. */
  caFile?: string;
  /** Our own certificate, for a daemon that asks for one; else `FORKD_CLIENT_CERT`. */
  clientCert?: string;
  /** Its private key; else `FORKD_CLIENT_KEY`, else it is in the same file. */
  clientKey?: string;
}

/** A daemon's address. */
export class Endpoint {
  /** `http://host:port`, `https://host:port` or `unix:///path`. */
  readonly url: string;
  /** Path of the Unix socket; undefined over TCP. */
  readonly socket: string | undefined;
  readonly caFile: string | undefined;
  readonly clientCert: string | undefined;
  readonly clientKey: string | undefined;
  readonly #token: string | undefined;

  constructor(options: EndpointOptions & { url: string }) {
    this.url = options.url;
    this.#token = options.token;
    this.caFile = options.caFile;
    this.clientCert = options.clientCert;
    this.clientKey = options.clientKey;
    if (this.clientKey !== undefined && this.clientCert === undefined) {
      throw invalid("clientCert", "clientKey is given, and clientCert is not");
    }
    this.socket = socketOf(options.url);
    if (this.socket === undefined && !isHttp(options.url)) {
      throw invalid(
        "url",
        `url must be http://host:port, https://host:port or unix:///path, not ${options.url}`,
      );
    }
  }

  /** Base of the URLs of requests. */
  get httpUrl(): string {
    return this.socket === undefined ? this.url.replace(/\/+$/, "") : "http://forkd";
  }

  /** What every request carries. */
  get headers(): Record<string, string> {
    return this.#token === undefined ? {} : { authorization: `Bearer ${this.#token}` };
  }

  /** What is the same for two addresses of one daemon, with the same rights. */
  get key(): string {
    const parts = [this.url, this.#token, this.caFile, this.clientCert, this.clientKey];
    return JSON.stringify(parts);
  }
}

function socketOf(url: string): string | undefined {
  const path = /^unix:\/\/(\/.+)$/.exec(url)?.[1];
  return path === undefined ? undefined : decodeURI(path);
}

function isHttp(url: string): boolean {
  try {
    const { protocol, hostname } = new URL(url);
    return ["http:", "https:"].includes(protocol) && hostname !== "";
  } catch {
    return false;
  }
}

function invalid(field: string, message: string, cause?: unknown): InvalidRequest {
  return new InvalidRequest(message, { context: { field }, cause });
}

/** Return the daemon to talk to; the top of this file has the order. */
export function discover(given: EndpointOptions = {}): Endpoint {
  const env = process.env;
  const url = given.url ?? (env.FORKD_URL || undefined);
  const found = url === undefined ? chosenContext() : undefined;
  const token = given.token || found?.token || env.FORKD_TOKEN || undefined;
  const certificates = {
    caFile: given.caFile || found?.ca_file || env.FORKD_CA_FILE || undefined,
    clientCert: given.clientCert || found?.client_cert || env.FORKD_CLIENT_CERT || undefined,
    clientKey: given.clientKey || found?.client_key || env.FORKD_CLIENT_KEY || undefined,
  };
  const named = url ?? found?.url;
  if (named !== undefined) return new Endpoint({ url: named, token, ...certificates });
  const file = join(stateDir(), "endpoint.json");
  if (existsSync(file)) return endpointOf(file, token);
  return new Endpoint({
    url: existsSync(SOCKET_DEFAULT) ? `unix://${SOCKET_DEFAULT}` : URL_DEFAULT,
    token,
  });
}

/** Return the folder where `forkd up` keeps its state: `FORKD_HOME`, or the user's own. */
function stateDir(): string {
  if (process.env.FORKD_HOME) return process.env.FORKD_HOME;
  return join(process.env.XDG_STATE_HOME || join(homedir(), ".local", "state"), "forkd");
}

function endpointOf(file: string, token: string | undefined): Endpoint {
  try {
    const said = JSON.parse(text(file, FILE_BYTES_MAX)) as { url: unknown; token_file?: unknown };
    if (typeof said.url !== "string") throw new Error("it has no url");
    const named = said.token_file;
    const read = typeof named === "string" ? text(named, FILE_BYTES_MAX).trim() : undefined;
    return new Endpoint({ url: said.url, token: token ?? read });
  } catch (error) {
    throw invalid(
      "url",
      `${file} does not name a daemon (${error}); \`forkd up\` writes it anew`,
      error,
    );
  }
}

interface Context {
  url: string;
  token?: string;
  ca_file?: string;
  client_cert?: string;
  client_key?: string;
}

/** Return the context that is used; undefined for none. */
function chosenContext(): Context | undefined {
  const file = join(
    process.env.XDG_CONFIG_HOME || join(homedir(), ".config"),
    "forkd/contexts.json",
  );
  const wanted = process.env.FORKD_CONTEXT || undefined;
  if (wanted === LOCAL) return undefined;
  const { current, contexts } = contextsOf(file);
  const name = wanted ?? current ?? LOCAL;
  if (name === LOCAL) return undefined;
  const found = contexts[name];
  if (found === undefined) {
    const known = [LOCAL, ...Object.keys(contexts).sort()].join(", ");
    throw new NotFound(
      `there is no context '${name}'; there are: ${known}; \`forkd context use NAME\` chooses one`,
      { context: { context: name } },
    );
  }
  return found;
}

function contextsOf(file: string): { current?: string | null; contexts: Record<string, Context> } {
  if (!existsSync(file)) return { contexts: {} };
  try {
    const said = JSON.parse(text(file, CONTEXTS_BYTES_MAX));
    const contexts = said.contexts as Record<string, Context>;
    for (const each of Object.values(contexts)) {
      if (typeof each.url !== "string") throw new Error("a context has no url");
    }
    return { current: said.current, contexts };
  } catch (error) {
    throw invalid(
      "context",
      `${file} does not hold contexts (${error}); remove it and add them anew`,
      error,
    );
  }
}

function text(path: string, bytesMax: number): string {
  if (statSync(path).size > bytesMax) throw new Error(`${path} is too long`);
  return readFileSync(path, "utf8");
}
