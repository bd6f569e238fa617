/** The network of a sandbox: what it may reach. */
import type { CallOptions, Http } from "./http.js";
import { checkOptions, type Info, members } from "./wire.js";

/**
 * What a sandbox may reach: "none", "internet", "host", "deny-all", or rules such as
 * `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; true for "host".
 */
export type Reach = boolean | string | readonly string[];

/** What changes about a sandbox's network; what is undefined stays as it is. */
export interface NetworkChange extends CallOptions {
  /** What it may reach from now on, as of a fork. */
  network?: Reach;
  /** Rules that are added to it. */
  allow?: readonly string[];
  /** Whether it may reach nothing at the moment. */
  holdEgress?: boolean;
}

const CHANGE_OPTIONS: Record<keyof NetworkChange, true> = {
  network: true,
  allow: true,
  holdEgress: true,
  signal: true,
};

/**
 * What one sandbox may reach, and what it was refused.
 *
 * Every method throws `Conflict` if the sandbox was forked without a network.
 */
export class Network {
  readonly #http: Http;
  readonly #path: string;

  /** @internal */
  constructor(http: Http, sandboxPath: string) {
    this.#http = http;
    this.#path = `${sandboxPath}/network`;
  }

  /** Return what it may reach, and what it was refused. */
  async status(options: CallOptions = {}): Promise<Info<"NetworkInfo">> {
    return await this.#http.call("NetworkInfo", "GET", this.#path, { signal: options.signal });
  }

  /** Change what it may reach; connections that it may not have any more end. */
  async change(change: NetworkChange): Promise<Info<"NetworkInfo">> {
    checkOptions("change", change, CHANGE_OPTIONS);
    const { signal, ...rest } = change;
    const body = members(rest);
    return await this.#http.call("NetworkInfo", "PATCH", this.#path, { body, signal });
  }
}
