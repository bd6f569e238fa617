/** Files inside a sandbox. */
import { Buffer } from "node:buffer";
import { posix } from "node:path";
import { type Copied, countSkipped, neither, packed, unpack } from "./archive.js";
import { EngineExited, ForkdError, InvalidRequest, NotFound, TransportError } from "./errors.js";
import { bytes, type CallOptions, type Http, type Query } from "./http.js";
import { asBase64, fromBase64 } from "./text.js";
import type { Content } from "./transport.js";
import { checkOptions, type Info, members } from "./wire.js";

/** One file, folder or link in a guest. */
export interface FileEntry extends Omit<Info<"FileEntry">, "name"> {
  /** What it is called; a lone surrogate U+DC80 to U+DCFF stands for a byte that is not UTF-8. */
  name: string;
  /** Its path in the guest, as it was asked for. */
  path: string;
}

/** What `Files.write` can write; an iterable is sent as it comes, and may be larger than memory. */
export type Contents = string | Uint8Array | AsyncIterable<Uint8Array>;

/** The file system of one sandbox; paths are the guest's, and absolute. */
export class Files {
  readonly #http: Http;
  readonly #sandboxPath: string;
  readonly #path: string;

  /** @internal */
  constructor(http: Http, sandboxPath: string) {
    this.#http = http;
    this.#sandboxPath = sandboxPath;
    this.#path = `${sandboxPath}/files`;
  }

  /**
   * Return a file's contents: bytes, or text for a file that is UTF-8.
   *
   * @throws {NotFound} There is no such file.
   */
  async read(path: string, options: CallOptions & { format: "text" }): Promise<string>;
  async read(path: string, options?: CallOptions & { format?: "bytes" }): Promise<Uint8Array>;
  async read(
    path: string,
    options: CallOptions & { format?: "bytes" | "text" } = {},
  ): Promise<string | Uint8Array> {
    const format = options.format ?? "bytes";
    if (format !== "bytes" && format !== "text") {
      throw new InvalidRequest(`format: is "bytes" or "text", not ${JSON.stringify(format)}`, {
        context: { field: "format" },
      });
    }
    const data = await this.#whole(this.#path, where(path), options.signal);
    return format === "text" ? new TextDecoder("utf-8", { fatal: true }).decode(data) : data;
  }

  /** Return a file's contents, which must be UTF-8. */
  async readText(path: string, options: CallOptions = {}): Promise<string> {
    return await this.read(path, { ...options, format: "text" });
  }

  /**
   * Yield a file's bytes, in pieces.
   *
   * @param options `offset`: where to begin; `length`: how many bytes at most.
   */
  open(
    path: string,
    options: CallOptions & { offset?: number; length?: number } = {},
  ): AsyncGenerator<Uint8Array, void, void> {
    const query = { ...where(path), offset: options.offset, length: options.length };
    return this.#streamed(this.#path, query, options.signal);
  }

  /**
   * Write a file, whole or not at all; returns its length in bytes.
   *
   * @param options `mode`: permissions, those of the file that is replaced, else 0o644, if
   *   undefined; `makeParents`: make the folders above it that are missing; `user`: owner of a new
   *   file and of new folders, a name or `uid[:gid]`.
   */
  async write(
    path: string,
    contents: Contents,
    options: CallOptions & { mode?: number; makeParents?: boolean; user?: string } = {},
  ): Promise<number> {
    const { mode, makeParents, user, signal } = options;
    const query = { ...where(path), ...members({ mode, makeParents: makeParents || null, user }) };
    const content: Content = typeof contents === "string" ? Buffer.from(contents) : contents;
    const parts = { query, content, timeoutS: null, signal };
    return (await this.#http.call("FileWritten", "PUT", this.#path, parts)).bytes;
  }

  /** Yield a file or a folder as a tar archive, in pieces. */
  openArchive(path: string, options: CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    return this.#streamed(`${this.#path}/archive`, where(path), options.signal);
  }

  /**
   * Make a tree of a tar archive, uncompressed; what cannot be made is left out and in the answer.
   *
   * @param path The folder in which it is made, which need not exist.
   */
  async writeArchive(
    path: string,
    archive: Content,
    options: CallOptions & { user?: string; keepOwner?: boolean } = {},
  ): Promise<Info<"ArchiveWritten">> {
    const { user, keepOwner, signal } = options;
    const query = { ...where(path), ...members({ user, keepOwner: keepOwner || null }) };
    const parts = { query, content: archive, timeoutS: null, signal };
    return await this.#http.call("ArchiveWritten", "PUT", `${this.#path}/archive`, parts);
  }

  /**
   * Copy a file, or a folder with all that is in it, from this host into the sandbox.
   *
   * What cannot be copied is left out, and is in the answer.  Links are copied as links.
   *
   * @param source Which file or folder; a link there is followed.
   * @param target What it is called in the sandbox.  A folder that exists keeps what it has; what
   *   has the same name is replaced.
   * @param options `user`: owner of what is made new, as of `write`; `keepOwner`: keep owners, by
   *   number, and the bits that change the user.
   * @throws {NotFound} There is no `source`.
   * @throws {HostError} It cannot be read.
   */
  async upload(
    source: string,
    target: string,
    options: CallOptions & { user?: string; keepOwner?: boolean } = {},
  ): Promise<Copied> {
    checkOptions("upload", options, { user: true, keepOwner: true, signal: true });
    const copied: Copied = { files: 0, bytes: 0, skipped: [] };
    const [folder, pieces] = await packed(source, target, copied, options.keepOwner ?? false);
    countSkipped(copied, await this.writeArchive(folder, pieces, options));
    return copied;
  }

  /**
   * Copy a file, or a folder with all that is in it, from the sandbox to this host.
   *
   * What cannot be copied is left out, and is in the answer.  Nothing is written outside of
   * `target`, whatever names and links the sandbox has.
   *
   * @param source Which file or folder in the sandbox; a link there is followed.
   * @param target What it is called on this host.  A folder that exists keeps what it has; what has
   *   the same name is replaced.
   * @param options `keepOwner`: keep owners, by number, and the bits that change the user; needs
   *   root.
   * @throws {NotFound} There is no `source`.
   * @throws {InvalidRequest} It is neither a file nor a folder.
   * @throws {HostError} `target` cannot be made, or there is no room.
   */
  async download(
    source: string,
    target: string,
    options: CallOptions & { keepOwner?: boolean } = {},
  ): Promise<Copied> {
    checkOptions("download", options, { keepOwner: true, signal: true });
    const { keepOwner = false, signal } = options;
    if ((await this.stat(source, { signal })).kind === "other") throw neither(source);
    const copied: Copied = { files: 0, bytes: 0, skipped: [] };
    await unpack(this.openArchive(source, { signal }), target, copied, keepOwner);
    return copied;
  }

  /** Return what a path is; symbolic links are not followed. */
  async stat(path: string, options: CallOptions = {}): Promise<FileEntry> {
    const parts = { query: where(path), signal: options.signal };
    const found = await this.#http.call("FileEntry", "GET", `${this.#path}/stat`, parts);
    return placed(found, () => path);
  }

  /** Return what `stat` does, under E2B's name. */
  async getInfo(path: string, options: CallOptions = {}): Promise<FileEntry> {
    return await this.stat(path, options);
  }

  /** Return whether there is anything at a path. */
  async exists(path: string, options: CallOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      // without a code of the guest, it is the sandbox that does not exist
      if (error instanceof NotFound && "guest_code" in error.context) return false;
      throw error;
    }
  }

  /** Return what is in a folder, by name. */
  async list(path: string, options: CallOptions = {}): Promise<FileEntry[]> {
    const parts = { query: where(path), signal: options.signal };
    const found = await this.#http.call("FileList", "GET", `${this.#path}/list`, parts);
    return found.entries.map((each) => placed(each, (name) => posix.join(path, name)));
  }

  /**
   * Make a folder.
   *
   * @param options `parents`: make the folders above it that are missing, and let a folder that
   *   exists be; `mode`: permissions, 0o755 if undefined; `user`: owner of what is made.
   */
  async makeDir(
    path: string,
    options: CallOptions & { parents?: boolean; mode?: number; user?: string } = {},
  ): Promise<void> {
    const { parents, mode, user, signal } = options;
    const body = members({ path, parents, mode, user });
    await this.#http.send("POST", `${this.#path}/mkdir`, { body, signal });
  }

  /** Rename a file or a folder. */
  async move(source: string, target: string, options: CallOptions = {}): Promise<void> {
    const body = members({ source, target });
    await this.#http.send("POST", `${this.#path}/move`, { body, signal: options.signal });
  }

  /** Do what `move` does, under E2B's name. */
  async rename(oldPath: string, newPath: string, options: CallOptions = {}): Promise<void> {
    await this.move(oldPath, newPath, options);
  }

  /**
   * Remove a file or a folder.
   *
   * @param options `recursive`: remove a folder with all that is in it; else it must be empty.
   */
  async remove(path: string, options: CallOptions & { recursive?: boolean } = {}): Promise<void> {
    const query = { ...where(path), recursive: options.recursive || undefined };
    await this.#http.send("DELETE", this.#path, { query, signal: options.signal });
  }

  async #whole(path: string, query: Query, signal?: AbortSignal): Promise<Uint8Array> {
    const answer = await this.#http.streamed(path, { query, signal });
    try {
      return await bytes(answer);
    } catch (error) {
      throw await this.#explained(error);
    }
  }

  async *#streamed(
    path: string,
    query: Query,
    signal?: AbortSignal,
  ): AsyncGenerator<Uint8Array, void, void> {
    const answer = await this.#http.streamed(path, { query, signal });
    try {
      yield* answer.body;
    } catch (error) {
      throw await this.#explained(error);
    } finally {
      answer.discard();
    }
  }

  /** Return why an answer broke off: the sandbox may have ended. */
  async #explained(error: unknown): Promise<unknown> {
    if (!(error instanceof TransportError)) return error;
    try {
      const { id, exitReason } = await this.#http.call("SandboxInfo", "GET", this.#sandboxPath);
      if (exitReason === null || exitReason === undefined) return error;
      return new EngineExited(`sandbox ${id} has exited: ${exitReason}`, { cause: error });
    } catch (other) {
      if (other instanceof NotFound) {
        return new EngineExited("the sandbox has exited: deleted", { cause: error });
      }
      if (other instanceof ForkdError) return error;
      throw other;
    }
  }
}

function placed(entry: Info<"FileEntry">, pathOf: (name: string) => string): FileEntry {
  const name = entry.nameB64 ? fromBase64(entry.nameB64) : (entry.name ?? "");
  const target = entry.targetB64 ? fromBase64(entry.targetB64) : entry.target;
  return { ...entry, name, target, path: pathOf(name) };
}

/** Return the members of a query that say which path. */
function where(path: string): Query {
  return path.isWellFormed() ? { path } : { path_b64: asBase64(path) };
}
