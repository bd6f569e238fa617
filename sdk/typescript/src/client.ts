/** The client: one daemon, its snapshots, images and sandboxes. */
import { Builds } from "./builds.js";
import {
  Images,
  Recipes,
  SandboxCollection,
  Secrets,
  Snapshots,
  Tenants,
  Tokens,
} from "./collections.js";
import { discover, type Endpoint, type EndpointOptions } from "./endpoint.js";
import { EngineError } from "./errors.js";
import { type EventOptions, followed } from "./events.js";
import { type CallOptions, Http } from "./http.js";
import { FORK_OPTIONS, type ForkOptions, SANDBOX_OPTIONS, type SandboxOptions } from "./options.js";
import { RETRIES_MAX } from "./retries.js";
import { fork, forkOne, keepHttp, type Sandbox, type Sandboxes } from "./sandbox.js";
import { checkOptions, type Info } from "./wire.js";

/** Time that a comparison may take: both guests look at all of their files. */
const DIFF_TIMEOUT_S = 900;

/** Where a daemon is, and how it is asked. */
export interface ClientOptions extends EndpointOptions {
  /** How often a call that failed for a passing reason is made again; 0 for never. */
  retriesMax?: number;
}

const CLIENT_OPTIONS: Record<keyof ClientOptions, true> = {
  url: true,
  token: true,
  caFile: true,
  clientCert: true,
  clientKey: true,
  retriesMax: true,
};

/**
 * A forkd daemon.
 *
 * Without options it talks to the daemon that `forkd up` started, or to the one that `FORKD_URL`
 * and `FORKD_TOKEN` name.  Nothing is connected before the first call.  `await using` closes the
 * connections at the end of its block; sandboxes live on.
 */
export class Client implements AsyncDisposable {
  /** Its sandboxes. */
  readonly sandboxes: SandboxCollection;
  /** Its snapshots. */
  readonly snapshots: Snapshots;
  /** Its images. */
  readonly images: Images;
  /** Its recipes. */
  readonly recipes: Recipes;
  /** Builds of Dockerfiles. */
  readonly builds: Builds;
  /** Its secrets. */
  readonly secrets: Secrets;
  /** Its tokens, for an admin. */
  readonly tokens: Tokens;
  /** Who shares it. */
  readonly tenants: Tenants;
  readonly #http: Http;

  constructor(options: ClientOptions = {}) {
    checkOptions("Client", options, CLIENT_OPTIONS);
    const { retriesMax = RETRIES_MAX, ...where } = options;
    this.#http = new Http(discover(where), retriesMax);
    keepHttp(this, this.#http);
    this.sandboxes = new SandboxCollection(this.#http);
    this.snapshots = new Snapshots(this.#http);
    this.images = new Images(this.#http);
    this.recipes = new Recipes(this.#http);
    this.builds = new Builds(this.#http);
    this.secrets = new Secrets(this.#http);
    this.tokens = new Tokens(this.#http);
    this.tenants = new Tenants(this.#http);
  }

  /** Where the daemon is. */
  get endpoint(): Endpoint {
    return this.#http.endpoint;
  }

  /** Close every connection; sandboxes live on. */
  close(): void {
    this.#http.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  /**
   * Fork `n` sandboxes from a snapshot: all of them, or an error and none.
   *
   * They live until they are killed, unless `ttlS` says otherwise.
   *
   * @throws {NotFound} There is no snapshot of that tag.
   * @throws {CapacityError} The host has no room for so many.
   * @throws {EngineError} At least one did not become ready.
   */
  async fork(tag: string, n = 1, options: ForkOptions = {}): Promise<Sandboxes> {
    checkOptions("fork", options, FORK_OPTIONS);
    const [ready, failed] = await fork(this.#http, tag, n, options, true);
    const [first] = failed;
    if (first === undefined) return ready;
    throw new EngineError(`${failed.length} of ${n} did not become ready: ${first.error}`);
  }

  /**
   * Fork up to `n` sandboxes; return the ready ones, and why the others are not.
   *
   * @throws {EngineError} Not one became ready.
   */
  async tryFork(
    tag: string,
    n = 1,
    options: ForkOptions = {},
  ): Promise<[sandboxes: Sandboxes, failures: Info<"SandboxFailure">[]]> {
    checkOptions("tryFork", options, FORK_OPTIONS);
    return await fork(this.#http, tag, n, options, false);
  }

  /** Fork one sandbox from a snapshot; as `Sandbox.create`, it has five minutes to live. */
  async sandbox(tag?: string, options: SandboxOptions = {}): Promise<Sandbox> {
    checkOptions("sandbox", options, SANDBOX_OPTIONS);
    return await forkOne(this.#http, { ...options, tag: tag ?? options.tag });
  }

  /** Return which forkd the daemon is. */
  async version(options: CallOptions = {}): Promise<Info<"Version">> {
    return await this.#http.call("Version", "GET", "/version", { signal: options.signal });
  }

  /** Return what the daemon's host is and how full it is. */
  async host(options: CallOptions = {}): Promise<Info<"HostInfo">> {
    return await this.#http.call("HostInfo", "GET", "/v2/host", { signal: options.signal });
  }

  /**
   * Yield what happens to sandboxes and snapshots, as it happens.
   *
   * A connection that breaks is made again, and what happened meanwhile comes first.  Where events
   * are missing, because they are no longer kept, there is one whose `event` is `gap`.
   *
   * @throws {TransportError} The daemon cannot be reached, or the connection broke.
   */
  events(options: EventOptions = {}): AsyncGenerator<Info<"EventInfo">, void, void> {
    return followed(this.#http, options);
  }

  /** Return what running sandboxes use of the host, the oldest first. */
  async usage(options: CallOptions = {}): Promise<Info<"UsageInfo">[]> {
    return await this.#http.list("UsageInfo", "/v2/usage", { signal: options.signal });
  }

  /** Return who was branched from whom; only the tree that one sandbox is in, if given. */
  async tree(sandboxId?: string, options: CallOptions = {}): Promise<Info<"TreeInfo">> {
    const parts = { query: { sandbox_id: sandboxId }, signal: options.signal };
    return await this.#http.call("TreeInfo", "GET", "/v2/tree", parts);
  }

  /**
   * Return how `b` differs from `a`: which files, and how many pages of memory.
   *
   * Each is the id of a running sandbox or the name of a snapshot.
   *
   * @throws {Conflict} They have no common ancestor, or one does not run.
   * @throws {GuestError} The file system of one cannot be compared.
   */
  async diff(a: string, b: string, options: CallOptions = {}): Promise<Info<"DiffInfo">> {
    const parts = { body: { a, b }, timeoutS: DIFF_TIMEOUT_S, signal: options.signal };
    return await this.#http.call("DiffInfo", "POST", "/v2/diff", parts);
  }
}
