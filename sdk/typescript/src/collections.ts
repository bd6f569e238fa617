/** What a daemon holds: snapshots, images, recipes, sandboxes, secrets, tokens, tenants. */
import { Buffer } from "node:buffer";
import { type CallOptions, type Http, type Progress, quoted } from "./http.js";
import { type Image, imageReference } from "./image.js";
import type { Reach } from "./network.js";
import { imageSnapshot, Sandbox } from "./sandbox.js";
import type { Content } from "./transport.js";
import { checkOptions, type Info, members } from "./wire.js";

/** Time that writing or removing snapshots may take. */
const WRITE_TIMEOUT_S = 3_600;

/** How many elements of a list one request asks for, unless the caller says otherwise. */
const PAGE_SIZE = 100;

/** What an operation that takes long may take. */
export interface ProgressOptions extends CallOptions {
  /** Called with each step, as it comes. */
  onProgress?: (step: Progress) => unknown;
}

/** What each fork of a snapshot has. */
export interface MachineOptions extends ProgressOptions {
  /** Memory of each fork, an even number. */
  memoryMib?: number;
  /** Virtual CPUs of each fork. */
  vcpus?: number;
  /** Disk size of each fork. */
  diskMib?: number;
}

/** How a snapshot is baked. */
export interface SnapshotOptions extends MachineOptions {
  /** Name of a recipe of the daemon's host, or a path in one of its folders of recipes. */
  recipe?: string | Image;
  /** Instead of a recipe: an image of a registry, such as `python:3.12-slim`, or an `Image`. */
  image?: string | Image;
  /** Shell lines that run in the machine, in order, before it is frozen. */
  run?: readonly string[];
  /** Shell command that is repeated until it exits with 0; the machine is frozen then. */
  ready?: string;
}

/** How a snapshot is made of another, or of a sandbox. */
export interface LinkOptions extends ProgressOptions {
  /** What `sh` runs in a fork of the source, which is ended afterwards. */
  exec?: string;
  /** Time that this may take, in seconds. */
  execTimeoutS?: number;
  /** What the fork may reach meanwhile. */
  network?: Reach;
  /** Whether to return when the snapshot is ready (the default), or while it is being written. */
  wait?: boolean;
}

const MACHINE_OPTIONS: Record<keyof MachineOptions, true> = {
  memoryMib: true,
  vcpus: true,
  diskMib: true,
  onProgress: true,
  signal: true,
};

const SNAPSHOT_OPTIONS: Record<keyof SnapshotOptions, true> = {
  ...MACHINE_OPTIONS,
  recipe: true,
  image: true,
  run: true,
  ready: true,
};

const LINK_OPTIONS: Record<keyof LinkOptions, true> = {
  exec: true,
  execTimeoutS: true,
  network: true,
  wait: true,
  onProgress: true,
  signal: true,
};

/** The snapshots of a daemon. */
export class Snapshots {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /**
   * Bake a snapshot of an image or a recipe; returns when it is ready.
   *
   * An aborted call ends the bake, and removes what it made.
   *
   * @throws {NotFound} There is no such recipe or image.
   * @throws {Conflict} A snapshot of that tag exists, or is being baked.
   * @throws {BuildError} The image, a line to run or the warm-up failed.
   */
  async create(tag: string, options: SnapshotOptions): Promise<Info<"SnapshotInfo">> {
    checkOptions("create", options, SNAPSHOT_OPTIONS);
    const { recipe, image, ...rest } = options;
    const named = async (given: string | Image | undefined) =>
      given && (await imageReference(this.#http, given, options.onProgress, options.signal));
    return await this.#made(tag, {
      ...rest,
      recipe: await named(recipe),
      image: await named(image),
    });
  }

  /**
   * Return a ready snapshot of an image, baked the first time that it is asked for.
   *
   * @param options `pull`: "always" asks the registry which image the tag names now; "missing"
   *   uses the one that it named last, if that is still in the daemon's cache.
   */
  async forImage(
    image: string | Image,
    options: MachineOptions & { pull?: "missing" | "always" } = {},
  ): Promise<Info<"SnapshotInfo">> {
    checkOptions("forImage", options, { ...MACHINE_OPTIONS, pull: true });
    const { onProgress, signal, ...rest } = options;
    const named = await imageReference(this.#http, image, onProgress, signal);
    const request = members({ image: named, ...rest });
    return await imageSnapshot(this.#http, request, onProgress, signal);
  }

  /**
   * Write down a sandbox, or a fork of a snapshot in which a command has run.
   *
   * @param source Id of a running sandbox, which goes on; or a snapshot, with `exec`.
   * @throws {Conflict} The tag is taken, or the source does not run.
   * @throws {BuildError} The command failed; the end of what it printed is in the message.
   */
  async link(
    tag: string,
    source: string,
    options: LinkOptions = {},
  ): Promise<Info<"SnapshotInfo">> {
    checkOptions("link", options, LINK_OPTIONS);
    return await this.#made(tag, { source, ...options });
  }

  async #made(
    tag: string,
    options: ProgressOptions & { source?: string; recipe?: string; image?: string },
  ): Promise<Info<"SnapshotInfo">> {
    const { onProgress, signal, ...rest } = options;
    const [path, body] = ["/v2/snapshots", members({ tag, ...rest })];
    const http = this.#http;
    const done = await http.events("SnapshotEvent", "snapshot", path, body, onProgress, signal);
    return done.snapshot;
  }

  /** Return every snapshot, by tag. */
  async list(options: CallOptions = {}): Promise<Info<"SnapshotInfo">[]> {
    return await this.#http.list("SnapshotInfo", "/v2/snapshots", { signal: options.signal });
  }

  /** Return one snapshot, with what it depends on and what depends on it. */
  async info(tag: string, options: CallOptions = {}): Promise<Info<"SnapshotInfoDetail">> {
    const parts = { signal: options.signal };
    return await this.#http.call("SnapshotInfoDetail", "GET", `${at(tag)}/info`, parts);
  }

  /**
   * Remove a snapshot and its files.
   *
   * @param options `cascade`: remove those that depend on it as well, all or nothing; `force`:
   *   remove it from under those that depend on it, which are lost.
   * @throws {Conflict} Sandboxes or other snapshots need it.
   */
  async delete(
    tag: string,
    options: CallOptions & { cascade?: boolean; force?: boolean } = {},
  ): Promise<void> {
    const { cascade, force, signal } = options;
    const query = { cascade: cascade || undefined, force: force || undefined };
    await this.#http.send("DELETE", at(tag), { query, timeoutS: WRITE_TIMEOUT_S, signal });
  }

  /** Let every tenant use a snapshot, or only its own again. */
  async share(
    tag: string,
    shared: boolean,
    options: CallOptions = {},
  ): Promise<Info<"SnapshotInfo">> {
    const parts = { body: { shared }, signal: options.signal };
    return await this.#http.call("SnapshotInfo", "PUT", `${at(tag)}/shared`, parts);
  }

  /**
   * Write a snapshot so that it needs no other, in its place or under another name.
   *
   * @param options `to`: the other name.
   */
  async compact(
    tag: string,
    options: CallOptions & { to?: string } = {},
  ): Promise<Info<"SnapshotInfo">> {
    return await this.#http.call("SnapshotInfo", "POST", `${at(tag)}/compact`, {
      body: members({ to: options.to }),
      creates: true,
      timeoutS: WRITE_TIMEOUT_S,
      signal: options.signal,
    });
  }

  /** Remove what is unused, and return what that was; with `dryRun`, only return that. */
  async gc(options: CallOptions & { dryRun?: boolean } = {}): Promise<Info<"SnapshotGcInfo">> {
    return await this.#http.call("SnapshotGcInfo", "POST", "/v2/snapshots:gc", {
      body: members({ dryRun: options.dryRun }),
      timeoutS: WRITE_TIMEOUT_S,
      signal: options.signal,
    });
  }

  /** Yield a snapshot and all that it depends on as an unsigned pack, in pieces. */
  async *pack(tag: string, options: CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    const answer = await this.#http.streamed(`${at(tag)}/pack`, { signal: options.signal });
    try {
      yield* answer.body;
    } finally {
      answer.discard();
    }
  }

  /**
   * Take a pack: all of it, or nothing.
   *
   * @param options `trusted`: public keys, of 32 bytes each, whose signature is believed;
   *   `allowUnsigned`: accept the pack regardless of its signature, or of none.
   * @throws {PackError} It is damaged, hostile, unsigned or not trusted.
   */
  async unpack(
    tag: string,
    contents: Content,
    options: CallOptions & { trusted?: readonly Uint8Array[]; allowUnsigned?: boolean } = {},
  ): Promise<Info<"Unpacked">> {
    const { trusted = [], allowUnsigned, signal } = options;
    const query = {
      trusted: trusted.map((key) => Buffer.from(key).toString("hex")).join(","),
      allow_unsigned: allowUnsigned || undefined,
    };
    const parts = { query, content: contents, timeoutS: null, signal };
    return await this.#http.call("Unpacked", "PUT", `${at(tag)}/pack`, parts);
  }
}

function at(tag: string): string {
  return `/v2/snapshots/${quoted(tag)}`;
}

/** The images of a daemon. */
export class Images {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /**
   * Build the image of a recipe of the daemon's host, or an `Image`, unless it is built already.
   *
   * @throws {BuildError} It could not be built.
   */
  async build(recipe: string | Image, options: ProgressOptions = {}): Promise<Info<"ImageInfo">> {
    const { onProgress, signal } = options;
    const http = this.#http;
    const named = await imageReference(http, recipe, onProgress, signal);
    const done = await http.events(
      "ImageEvent",
      "image",
      "/v2/images",
      { recipe: named },
      onProgress,
      signal,
    );
    return done.image;
  }

  /** Return the images in the cache, the one that was used last first. */
  async list(options: CallOptions = {}): Promise<Info<"CachedImageInfo">[]> {
    return await this.#http.list("CachedImageInfo", "/v2/images", { signal: options.signal });
  }

  /**
   * Remove an image from the cache.
   *
   * @throws {Conflict} A snapshot needs it.
   */
  async remove(key: string, options: CallOptions = {}): Promise<void> {
    const parts = { timeoutS: WRITE_TIMEOUT_S, signal: options.signal };
    await this.#http.send("DELETE", `/v2/images/${quoted(key)}`, parts);
  }
}

/** The recipes of a daemon. */
export class Recipes {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /** Return the recipes of the daemon's host, by name. */
  async list(options: CallOptions = {}): Promise<Info<"HostRecipe">[]> {
    return await this.#http.list("HostRecipe", "/v2/recipes", { signal: options.signal });
  }

  /**
   * Return a recipe that was uploaded.
   *
   * @param recipe What `upload` answered.
   */
  async get(recipe: string, options: CallOptions = {}): Promise<Info<"RecipeInfo">> {
    const parts = { signal: options.signal };
    return await this.#http.call("RecipeInfo", "GET", `/v2/recipes/${quoted(recipe)}`, parts);
  }

  /**
   * Upload a recipe's folder as a tar archive, uncompressed, with `recipe.toml` at its top.
   *
   * The `recipe` of the answer is what `snapshots.create` takes.
   */
  async upload(archive: Content, options: CallOptions = {}): Promise<Info<"RecipeInfo">> {
    return await this.#http.call("RecipeInfo", "POST", "/v2/recipes", {
      content: archive,
      contentType: "application/x-tar",
      timeoutS: null,
      signal: options.signal,
    });
  }
}

/** Which sandboxes are meant: those that are all of this. */
export interface SandboxFilter extends CallOptions {
  /** Forked from this snapshot. */
  tag?: string;
  /** Of this name. */
  name?: string;
  status?: "starting" | "running" | "paused" | "stopping" | "exited";
  /** With these labels; null for any value. */
  labels?: Readonly<Record<string, string | null>>;
}

const FILTER_OPTIONS: Record<keyof SandboxFilter, true> = {
  tag: true,
  name: true,
  status: true,
  labels: true,
  signal: true,
};

/** The sandboxes of a daemon. */
export class SandboxCollection {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /** Return sandboxes, the oldest first. */
  async list(filter: SandboxFilter = {}): Promise<Sandbox[]> {
    checkOptions("list", filter, FILTER_OPTIONS);
    const parts = { query: filters(filter), signal: filter.signal };
    const found = await this.#http.list("SandboxInfo", "/v2/sandboxes", parts);
    return found.map((info) => new Sandbox(this.#http, info));
  }

  /**
   * Yield what `list` returns, asking for one part of the list after the other.
   *
   * @param filter `pageSize`: how many sandboxes one request asks for.
   */
  async *iterate(
    filter: SandboxFilter & { pageSize?: number } = {},
  ): AsyncGenerator<Sandbox, void, void> {
    checkOptions("iterate", filter, { ...FILTER_OPTIONS, pageSize: true });
    const { pageSize = PAGE_SIZE, signal, ...rest } = filter;
    let after: string | undefined;
    do {
      const query = { ...filters(rest), limit: pageSize, after };
      const [found, next] = await this.#http.page("SandboxInfo", "/v2/sandboxes", {
        query,
        signal,
      });
      for (const info of found) yield new Sandbox(this.#http, info);
      after = next;
    } while (after !== undefined);
  }

  /**
   * Return one sandbox, by its id, a beginning that no other has, or its name.
   *
   * @throws {NotFound} There is none.
   */
  async get(id: string, options: CallOptions = {}): Promise<Sandbox> {
    const parts = { signal: options.signal };
    const path = `/v2/sandboxes/${quoted(id)}`;
    return new Sandbox(this.#http, await this.#http.call("SandboxInfo", "GET", path, parts));
  }
}

function filters(filter: SandboxFilter): Record<string, unknown> {
  const { tag, name, status, labels = {} } = filter;
  const label = Object.entries(labels).map(([key, value]) =>
    value === null ? key : `${key}=${value}`,
  );
  return { snapshot_tag: tag, name, status, label };
}

/** What a secret is for. */
export interface SecretOptions extends CallOptions {
  /** In which header it is put; `Authorization` if undefined. */
  header?: string;
  /** The variable that has its placeholder in sandboxes. */
  env?: string;
  /** Whose, if not one's own. */
  tenant?: string;
}

/**
 * The secrets of a tenant.
 *
 * A sandbox that was forked with one writes its placeholder where the value belongs; the value
 * takes its place on the host, on the way to the hosts that the secret is for.
 */
export class Secrets {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /**
   * Set a secret, in the place of one of its name.
   *
   * @param value Printable ASCII; nobody can look it up later.
   * @param hosts What it is for, such as `["api.example.com", "*.example.com:8443"]`.
   */
  async set(
    name: string,
    value: string,
    hosts: readonly string[],
    options: SecretOptions = {},
  ): Promise<Info<"SecretInfo">> {
    checkOptions("set", options, { header: true, env: true, tenant: true, signal: true });
    const { header, env, tenant, signal } = options;
    const body = members({ value, hosts, header, env });
    const path = `/v2/secrets/${quoted(name)}`;
    return await this.#http.call("SecretInfo", "PUT", path, { body, query: { tenant }, signal });
  }

  /** Return every secret without its value; without `admin`, those of your own tenant. */
  async list(options: CallOptions = {}): Promise<Info<"SecretInfo">[]> {
    return await this.#http.list("SecretInfo", "/v2/secrets", { signal: options.signal });
  }

  /** Remove a secret; it is put into no request from now on. */
  async delete(name: string, options: CallOptions & { tenant?: string } = {}): Promise<void> {
    const { tenant, signal } = options;
    await this.#http.send("DELETE", `/v2/secrets/${quoted(name)}`, { query: { tenant }, signal });
  }
}

/** What a token may do. */
export type TokenScope = "read" | "run" | "snapshots" | "metrics" | "admin";

/** The daemon's tokens; all of it takes the scope `admin`. */
export class Tokens {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /**
   * Make a token; its secret is in the answer, and nobody can look it up later.
   *
   * @param options `tenant`: whose it is, "default" if undefined; `expiresInS`: how long it is
   *   valid, in seconds, until it is removed if undefined.
   * @throws {Conflict} There is one of that name.
   */
  async create(
    name: string,
    scopes: readonly TokenScope[],
    options: CallOptions & { tenant?: string; expiresInS?: number } = {},
  ): Promise<Info<"TokenCreated">> {
    const { tenant = "default", expiresInS, signal } = options;
    const body = members({ name, scopes, tenant, expiresInS });
    return await this.#http.call("TokenCreated", "POST", "/v2/tokens", {
      body,
      creates: true,
      signal,
    });
  }

  /** Return every token, by name, without its secret. */
  async list(options: CallOptions = {}): Promise<Info<"TokenInfo">[]> {
    return await this.#http.list("TokenInfo", "/v2/tokens", { signal: options.signal });
  }

  /** Remove a token; it is refused from now on, and what it asked for is ended. */
  async delete(name: string, options: CallOptions = {}): Promise<void> {
    await this.#http.send("DELETE", `/v2/tokens/${quoted(name)}`, { signal: options.signal });
  }
}

/** What a tenant may have; what is undefined has no limit. */
export interface QuotaOptions extends CallOptions {
  /** How many sandboxes it may have. */
  sandboxes?: number;
  /** How many virtual CPUs they may have together. */
  vcpus?: number;
  /** How much memory they may have together, in MiB. */
  memoryMib?: number;
  /** How much private disk they may have together, in MiB. */
  diskMib?: number;
  /** How much its snapshots may take, in MiB. */
  snapshotMib?: number;
  /** How many forks and branches it may make in a minute. */
  forksPerMinute?: number;
}

/** What a tenant may have from now on. */
export type QuotaChanges = CallOptions & {
  [Quota in keyof Omit<QuotaOptions, "signal">]: number | "unlimited";
};

const QUOTA_OPTIONS: Record<keyof QuotaOptions, true> = {
  sandboxes: true,
  vcpus: true,
  memoryMib: true,
  diskMib: true,
  snapshotMib: true,
  forksPerMinute: true,
  signal: true,
};

/** Who shares the daemon, and what each may have. */
export class Tenants {
  readonly #http: Http;

  /** @internal */
  constructor(http: Http) {
    this.#http = http;
  }

  /** Return tenants, their quotas and what they have; without `admin`, the caller's own. */
  async list(options: CallOptions = {}): Promise<Info<"TenantInfo">[]> {
    return await this.#http.list("TenantInfo", "/v2/tenants", { signal: options.signal });
  }

  /** Set all quotas of a tenant. */
  async setQuotas(name: string, quotas: QuotaOptions): Promise<Info<"TenantInfo">> {
    checkOptions("setQuotas", quotas, QUOTA_OPTIONS);
    const { signal, ...rest } = quotas;
    const parts = { body: members(rest), signal };
    return await this.#http.call("TenantInfo", "PUT", `/v2/tenants/${quoted(name)}/quotas`, parts);
  }

  /** Change quotas of a tenant; those that are undefined stay, and "unlimited" lifts the limit. */
  async changeQuotas(name: string, quotas: QuotaChanges): Promise<Info<"TenantInfo">> {
    checkOptions("changeQuotas", quotas, QUOTA_OPTIONS);
    const { signal, ...rest } = quotas;
    const changed = Object.entries(members(rest));
    const body = Object.fromEntries(
      changed.map(([quota, most]) => [quota, most === "unlimited" ? null : most]),
    );
    const path = `/v2/tenants/${quoted(name)}/quotas`;
    return await this.#http.call("TenantInfo", "PATCH", path, { body, signal });
  }

  /** Let a tenant have as much as the host has. */
  async removeQuotas(name: string, options: CallOptions = {}): Promise<void> {
    const parts = { signal: options.signal };
    await this.#http.send("DELETE", `/v2/tenants/${quoted(name)}/quotas`, parts);
  }
}
