/**
 * Whether a request that failed is made again, and when: decisions without effects.
 *
 * | what happened | which requests |
 * |---|---|
 * | the daemon was not reached, so it has done nothing | all |
 * | the daemon answered 503 and said when to try again; it has started nothing | all |
 * | the connection broke before the answer was whole | those that may be made twice |
 *
 * Requests that may be made twice are GET, PUT and DELETE, and a POST with an `Idempotency-Key`:
 * the daemon answers the second one what it would have answered the first.
 */
import { CapacityError, TransportError } from "./errors.js";
import { wasLost, wasUnsent } from "./transport.js";

/** How often a request is made again, unless the client was told another number. */
export const RETRIES_MAX = 4;

/** How often a daemon that cannot be reached is tried again: usually there is none. */
const RETRIES_UNSENT_MAX = 2;

/** Longest time that one call waits between its attempts, all together. */
const RETRY_S_MAX = 20;

/** How long before the next attempt, if the daemon does not say; doubled each time. */
const PAUSE_S_MIN = 0.1;
const PAUSE_S_MAX = 2;

/** Greatest part by which a pause is longer, so that clients do not come back all at once. */
const JITTER = 0.5;

/** Methods of requests that may be made twice. */
export const REPEATABLE: ReadonlySet<string> = new Set(["GET", "PUT", "DELETE"]);

/** The attempts of one call. */
export class Retries {
  /** Whether an answer was lost, so that the daemon may have done it already. */
  lost = false;
  #left: number;
  #unsentLeft: number;
  readonly #repeatable: boolean;
  #waitedS = 0;
  #pauseS = PAUSE_S_MIN;

  constructor(most: number, options: { repeatable: boolean; resendable?: boolean }) {
    this.#left = options.resendable === false ? 0 : most;
    this.#unsentLeft = Math.min(this.#left, RETRIES_UNSENT_MAX);
    this.#repeatable = options.repeatable;
  }

  /** Return how long to wait before the next attempt, in seconds; undefined to give up. */
  pauseS(error: unknown): number | undefined {
    let pauseS = this.#wanted(error);
    if (pauseS === undefined || this.#left <= 0) return undefined;
    pauseS *= 1 + Math.random() * JITTER;
    if (this.#waitedS + pauseS > RETRY_S_MAX) return undefined;
    this.#left -= 1;
    this.#waitedS += pauseS;
    return pauseS;
  }

  #wanted(error: unknown): number | undefined {
    if (error instanceof CapacityError) {
      const told = error.context.retry_after_s;
      return typeof told === "number" ? told : undefined;
    }
    if (!(error instanceof TransportError)) return undefined;
    if (wasUnsent(error)) {
      this.#unsentLeft -= 1;
      return this.#unsentLeft >= 0 ? this.#next() : undefined;
    }
    if (wasLost(error) && this.#repeatable) {
      this.lost = true;
      return this.#next();
    }
    return undefined;
  }

  #next(): number {
    const pauseS = this.#pauseS;
    this.#pauseS = Math.min(2 * this.#pauseS, PAUSE_S_MAX);
    return pauseS;
  }
}

/** Return after some time; an aborted signal ends it at once, with its reason. */
export function pause(timeS: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) {
      reject(signal.reason);
      return;
    }
    const abort = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, timeS * 1000);
    signal?.addEventListener("abort", abort, { once: true });
  });
}
