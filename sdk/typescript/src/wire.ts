/**
 * Between the names of the wire (`ttl_secs`) and those of the SDK (`ttlS`).
 *
 * Answers become camelCase all the way down, except below members whose names are the caller's:
 * labels, variables, the value of evaluated code.
 */
import { FREE_MEMBERS } from "./answers.gen.js";
import { InvalidRequest } from "./errors.gen.js";
import type { components } from "./schema.gen.js";
import { onWire } from "./text.js";

/** The types of the REST API, with the names of the wire. */
export type Schemas = components["schemas"];

type Free = (typeof FREE_MEMBERS)[number];

type CamelKey<S> = S extends `${infer A}_${infer B}` ? `${A}${Capitalize<CamelKey<B>>}` : S;

/** A type of the wire with camelCase names. */
export type Camel<T> = T extends { b64: string }
  ? string
  : T extends readonly (infer E)[]
    ? Camel<E>[]
    : T extends object
      ? { [K in keyof T as CamelKey<K>]: K extends Free ? T[K] : Camel<T[K]> }
      : T;

/** An answer of the daemon, with camelCase names. */
export type Info<Name extends keyof Schemas> = Camel<Schemas[Name]>;

const FREE: ReadonlySet<string> = new Set(FREE_MEMBERS);

/** What options are called on the wire, where that is not their name in snake_case. */
const MEMBERS: Readonly<Record<string, string>> = {
  deadlineS: "deadline_secs",
  execTimeoutS: "exec_timeout_secs",
  expiresInS: "expires_in_secs",
  idleTtlS: "idle_ttl_secs",
  timeoutS: "timeout_secs",
  ttlS: "ttl_secs",
};

const OPTIONS: Readonly<Record<string, string>> = {
  ...Object.fromEntries(Object.entries(MEMBERS).map(([option, member]) => [member, option])),
  snapshot_tag: "tag",
};

function camel(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** Return what a member of the wire is called here; whatever is below it stays. */
export function argument(field: string): string {
  const dot = field.indexOf(".");
  const name = dot < 0 ? field : field.slice(0, dot);
  return `${OPTIONS[name] ?? camel(name)}${dot < 0 ? "" : field.slice(dot)}`;
}

/** Return an answer with camelCase names. */
export function camelized(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(camelized);
  if (typeof value !== "object" || value === null) return value;
  const made: Record<string, unknown> = {};
  for (const [key, member] of Object.entries(value)) {
    made[camel(key)] = FREE.has(key) ? member : camelized(member);
  }
  return made;
}

/** Return options as members of a request; what is undefined or null is left to its default. */
export function members(options: object): Record<string, unknown> {
  const made: Record<string, unknown> = {};
  for (const [option, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    made[MEMBERS[option] ?? snake(option)] = encoded(option, value);
  }
  return made;
}

function encoded(option: string, value: unknown): unknown {
  if (typeof value === "number" && !Number.isFinite(value)) {
    throw new InvalidRequest(`${option}: must be a finite number, not ${value}`, {
      context: { field: option },
    });
  }
  if (typeof value === "string") return onWire(value);
  if (Array.isArray(value)) return value.map((each) => encoded(option, each));
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value).map(([key, each]) => [key, encoded(option, each)]);
    return Object.fromEntries(entries);
  }
  return value;
}

/** Return how many sandboxes are wanted; plain JavaScript may have given the options in its place. */
export function checkedCount(n: number): number {
  if (Number.isInteger(n)) return n;
  const given = typeof n === "object" ? "an object: options come after it" : String(n);
  throw new InvalidRequest(`n: must be a whole number, not ${given}`, { context: { field: "n" } });
}

/** Have a call with an option that it does not have say which it has; types miss plain JavaScript. */
export function checkOptions(
  called: string,
  given: object,
  known: Readonly<Record<string, true>>,
): void {
  if (typeof given !== "object" || given === null || Array.isArray(given)) {
    throw new InvalidRequest(`${called}() takes its options as an object, such as { ttlS: 60 }`, {
      context: { field: "options" },
    });
  }
  for (const name of Object.keys(given)) {
    if (Object.hasOwn(known, name)) continue;
    const options = Object.keys(known);
    const close = options.filter((each) => isClose(name, each));
    const advice =
      close.length > 0
        ? `did you mean ${close.join(" or ")}?`
        : `its options are ${options.join(", ")}`;
    throw new InvalidRequest(`${called}() has no option '${name}'; ${advice}`, {
      context: { field: name },
    });
  }
}

/** Whether `known` may be what was meant by `given`: the same letters, or the same beginning. */
function isClose(given: string, known: string): boolean {
  const [a, b] = [given, known].map((each) => each.replace(/_/g, "").toLowerCase()) as [
    string,
    string,
  ];
  return a.length > 2 && (b.startsWith(a) || (a.startsWith(b) && b.length > 2));
}
