/**
 * A recipe as the archive that is uploaded of it.
 *
 * It says nothing of owners and times, so that the same files always make the same archive: the
 * daemon, which names it by its digest, may have it.
 */
import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import { createReadStream, type Stats } from "node:fs";
import { lstat, readdir, readlink, stat } from "node:fs/promises";
import { join } from "node:path";
import { RECIPE_ENTRIES_MAX, RECIPE_UPLOAD_BYTES_MAX } from "./answers.gen.js";
import { block, padding, reasonOf } from "./archive.js";
import { InvalidRequest, NotFound } from "./errors.js";
import type { Http, Progress } from "./http.js";
import type { Info } from "./wire.js";

const RECIPE_FILE = "recipe.toml";

/** Begins a reference to a recipe that was uploaded. */
const UPLOADED = "sha256:";

/** How far an upload comes between two steps; of a shorter one nothing is told. */
const TOLD_BYTES = 8 * 1024 * 1024;

const BLOCK = 512;
const NAME_BYTES_MAX = 100;
const PREFIX_BYTES_MAX = 155;
const OWNER_EXECUTES = 0o100;

/** What is told of an upload. */
export type UploadProgress = ((step: Progress) => unknown) | undefined;

/** One entry of an archive; `text` is what it holds if no file does. */
interface Entry {
  header: Uint8Array;
  size: number;
  path?: string;
  text?: Uint8Array;
}

/** The archive of a recipe, which is read as it is sent. */
export class Archive implements AsyncIterable<Uint8Array> {
  /** Its length. */
  readonly sizeBytes: number;
  readonly #entries: readonly Entry[];

  /** @internal */
  constructor(entries: readonly Entry[], sizeBytes: number) {
    this.#entries = entries;
    this.sizeBytes = sizeBytes;
  }

  /** Yield the archive's bytes. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void> {
    for (const entry of this.#entries) {
      yield entry.header;
      if (entry.text !== undefined) yield entry.text;
      else if (entry.path !== undefined && entry.size > 0) yield* contents(entry.path, entry.size);
      if (entry.size > 0) yield new Uint8Array(padding(entry.size));
    }
    yield new Uint8Array(2 * BLOCK);
  }
}

/** Yield the bytes of a file, as many as its header says. */
async function* contents(path: string, size: number): AsyncGenerator<Uint8Array, void, void> {
  let left = size;
  const file = createReadStream(path, { end: size - 1 });
  try {
    for await (const piece of file) {
      left -= piece.length;
      yield piece;
    }
  } catch (error) {
    throw unreadable(path, error);
  }
  if (left > 0) throw refused(`${path} became shorter while it was read`);
}

/**
 * Return the archive of a recipe of this text, and what goes along.
 *
 * @param texts Files by their names in the archive.
 * @param files Files and folders of this host, likewise.
 * @internal
 */
export async function ofParts(
  text: Uint8Array,
  texts: readonly (readonly [string, Uint8Array])[],
  files: readonly (readonly [string, string])[],
): Promise<Archive> {
  const entries = [textEntry(RECIPE_FILE, text)];
  for (const [name, said] of texts) entries.push(textEntry(name, said));
  let size = 0;
  for (const each of entries) size += BLOCK + each.size + padding(each.size);
  for (const [name, path] of files) {
    for await (const each of found(path, name)) {
      entries.push(each);
      size += BLOCK + each.size + padding(each.size);
      if (entries.length > RECIPE_ENTRIES_MAX || size > RECIPE_UPLOAD_BYTES_MAX) {
        throw refused(
          `image holds more than ${RECIPE_ENTRIES_MAX} files or ${RECIPE_UPLOAD_BYTES_MAX} ` +
            "bytes: add less of this host",
        );
      }
    }
  }
  return new Archive(entries, size + 2 * BLOCK);
}

/** Yield an entry, and those of all that is in it, always in one order. */
async function* found(path: string, name: string): AsyncGenerator<Entry, void, void> {
  let names: string[] = [];
  try {
    yield await entryOf(path, name);
    if (!(await stat(path)).isDirectory()) return;
    names = await readdir(path);
  } catch (error) {
    throw unreadable(path, error);
  }
  const sorted = names.map((each) => Buffer.from(each)).sort(Buffer.compare);
  for (const each of sorted.map(String)) {
    const inner = join(path, each);
    if (await isLink(inner)) yield await entryOf(inner, `${name}/${each}`);
    else yield* found(inner, `${name}/${each}`);
  }
}

async function isLink(path: string): Promise<boolean> {
  try {
    return (await lstat(path)).isSymbolicLink();
  } catch (error) {
    throw unreadable(path, error);
  }
}

async function entryOf(path: string, name: string): Promise<Entry> {
  const status: Stats = await lstat(path);
  const mode = status.mode & OWNER_EXECUTES ? 0o755 : 0o644;
  if (status.isFile()) {
    return {
      path,
      size: status.size,
      header: header(path, name, "0", { mode, size: status.size }),
    };
  }
  if (status.isDirectory()) {
    return { size: 0, header: header(path, `${name}/`, "5", { mode, size: 0 }) };
  }
  if (status.isSymbolicLink()) {
    const target = Buffer.from(await readlink(path));
    if (target.length > NAME_BYTES_MAX) {
      throw refused(`${path} cannot be uploaded: linkname is too long`);
    }
    return { size: 0, header: header(path, name, "2", { mode, size: 0, target }) };
  }
  throw refused(`${path} is no file, folder or link: a recipe's folder holds nothing else`);
}

function textEntry(name: string, text: Uint8Array): Entry {
  return { size: text.length, text, header: header(name, name, "0", { size: text.length }) };
}

function header(
  path: string,
  name: string,
  kind: string,
  parts: { size: number; mode?: number; target?: Buffer },
): Uint8Array {
  if (Buffer.byteLength(name) <= NAME_BYTES_MAX) return block(Buffer.from(name), kind, parts);
  const words = name.split("/");
  for (let at = 1; at < words.length; at += 1) {
    const prefix = Buffer.from(words.slice(0, at).join("/"));
    const rest = Buffer.from(words.slice(at).join("/"));
    if (prefix.length <= PREFIX_BYTES_MAX && rest.length <= NAME_BYTES_MAX) {
      return block(rest, kind, { ...parts, prefix });
    }
  }
  throw refused(`${path} cannot be uploaded: name is too long`);
}

function refused(message: string): InvalidRequest {
  return new InvalidRequest(message, { context: { field: "image" } });
}

function unreadable(path: string, error: unknown): unknown {
  if (!(error instanceof Error) || !("syscall" in error)) return error;
  return refused(`cannot read ${path}: ${reasonOf(error)}`);
}

/**
 * Upload an archive, unless the daemon has it.
 *
 * @internal
 */
export async function uploaded(
  http: Http,
  archive: Archive,
  onProgress: UploadProgress,
  signal?: AbortSignal,
): Promise<Info<"RecipeInfo">> {
  const digest = createHash("sha256");
  for await (const piece of archive) digest.update(piece);
  const known = `/v2/recipes/${UPLOADED}${digest.digest("hex")}`;
  try {
    return await http.call("RecipeInfo", "GET", known, { signal });
  } catch (error) {
    if (!(error instanceof NotFound)) throw error;
  }
  return await http.call("RecipeInfo", "POST", "/v2/recipes", {
    content: told(archive, onProgress),
    contentType: "application/x-tar",
    timeoutS: null,
    signal,
  });
}

/** Pass an archive's pieces on, and tell now and then how many there were. */
async function* told(
  archive: Archive,
  onProgress: UploadProgress,
): AsyncGenerator<Uint8Array, void, void> {
  let sent = 0;
  for await (const piece of archive) {
    const before = Math.floor(sent / TOLD_BYTES);
    sent += piece.length;
    if (onProgress !== undefined && Math.floor(sent / TOLD_BYTES) !== before) {
      const message = `uploading image, ${archive.sizeBytes >> 20} MiB`;
      onProgress({
        event: "progress",
        stage: "upload",
        message,
        fraction: sent / archive.sizeBytes,
      });
    }
    yield piece;
  }
}
