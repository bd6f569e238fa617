/** What to do about an error, by its code, or by its code and a key of its context. */
const HINTS: Readonly<Record<string, string>> = {
  "not_found:sandbox": "`client.sandboxes.list()` has every sandbox that is left",
  "not_found:tag": "`client.snapshots.list()` has every snapshot; `create()` makes one",
  "not_found:secret": "`client.secrets.list()` has every secret",
  "not_found:program": "name a program of the image; `sandbox.run()` takes a line for the shell",
  denied: "pass `new Client({ token })`, or set FORKD_TOKEN",
  forbidden: "use a token that has the scope, or ask the operator for one",
  quota: "end or delete something of the tenant's, or ask the operator for a larger quota",
  capacity: "the same call may work later",
  busy: "the same call may work later",
  host: "`forkd doctor` on the daemon's host checks what the host can do",
  client_closed: "make the call before the client is closed, or make another client",
  exec_timeout: "pass a longer `timeoutS`, or `check: false` to have the output as a result",
};

/** Ids and numbers that belong to the message of an error, never secrets. */
export type ErrorContext = Readonly<Record<string, string | number>>;

/** What an error is made of, beside its message. */
export interface ErrorParts {
  context?: ErrorContext;
  cause?: unknown;
  /** What a program or code had given up to that moment. */
  result?: unknown;
}

/** Root of the tree of errors: everything that forkd throws on purpose is one. */
export class ForkdError extends Error {
  /** Stable name of the class on the wire. */
  static readonly code: string = "internal";
  /** Whether the same call may succeed later, unchanged. */
  static readonly retryable: boolean = false;

  /** The `code` of the class; that of the daemon, if this SDK does not know it. */
  readonly code: string;
  /** Whether the same call may succeed later, unchanged. */
  readonly retryable: boolean;
  /** Ids and numbers that belong to the message; `field` names the option at fault. */
  readonly context: ErrorContext;

  constructor(message: string, parts: ErrorParts = {}) {
    super(message, parts.cause === undefined ? undefined : { cause: parts.cause });
    const kind = new.target;
    this.name = kind.name;
    this.code = kind.code;
    this.retryable = kind.retryable;
    this.context = parts.context ?? {};
    if (kind === ForkdError && typeof this.context.code === "string") {
      this.code = this.context.code;
    }
    if (parts.result !== undefined) {
      Object.defineProperty(this, "result", { value: parts.result, enumerable: false });
    }
  }

  /** What to do about it; undefined if the message says all that is known. */
  get hint(): string | undefined {
    for (const key of Object.keys(this.context)) {
      const found = HINTS[`${this.code}:${key}`];
      if (found !== undefined) return found;
    }
    return HINTS[this.code];
  }
}
