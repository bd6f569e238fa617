/**
 * The build context: a folder of this host, without what `.dockerignore` leaves out.
 *
 * It is looked at once, when the first COPY or ADD needs it.  Everything that is wrong is a
 * `Malformed`: the line of the Dockerfile is the caller's to add.  Names need not be UTF-8.
 */
import type { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import type { Stats } from "node:fs";
import { lstat, readdir, readlink } from "node:fs/promises";
import { posix } from "node:path";
import { reasonOf } from "./archive.js";
import { glob, Ignore, normal } from "./build-ignore.js";
import { Malformed } from "./dockerfile-words.js";
import { isTar, piecesOf } from "./tar-reader.js";
import { asBytes, byCharacters, cited, fromBytes } from "./text.js";

/** Most files, folders and links of a build context, without those that are left out. */
export const BUILD_CONTEXT_ENTRIES_MAX = 100_000;

/** Most bytes of the files of a build context, without those that are left out. */
export const BUILD_CONTEXT_BYTES_MAX = 4 * 1024 * 1024 * 1024;

/** How many of the largest things in a context an error names. */
const LARGEST_SHOWN = 3;

/** Most links on the way to one file. */
const LINKS_MAX = 40;

const ALL_BITS = 0o7777;

/** One thing in a context. */
export interface Entry {
  /** Where it is, below the context; empty for the context itself. */
  path: string;
  kind: "file" | "folder" | "link" | "other";
  /** Its permissions. */
  mode: number;
  /** How many bytes it has. */
  size: number;
  /** Where it leads, if it is a link. */
  target: string;
}

/** A build context. */
export class Context {
  /** The folder, by its whole path. */
  readonly root: string;
  readonly #ignore: Ignore;
  readonly #contents = new Map<string, string>();
  #found: Promise<ReadonlyMap<string, Entry>> | undefined;

  constructor(root: string, ignore: Ignore = new Ignore()) {
    this.root = root;
    this.#ignore = ignore;
  }

  /** Return where a thing is on this host. */
  hostPath(path: string): Buffer {
    return asBytes(path === "" ? this.root : `${this.root}/${path}`);
  }

  /**
   * Return what a source of COPY or ADD means, in order of names.
   *
   * @throws {Malformed} There is nothing of that name, or it is outside of the context.
   */
  async sources(said: string): Promise<Entry[]> {
    if (said.split("/").includes("..")) {
      throw new Malformed(
        `${cited(said)} leads out of the context; copy only what is in ${this.root}`,
      );
    }
    const made = normal(said.replace(/^\/+/, ""));
    const path = made === "." ? "" : made;
    if (!/[*?[]/.test(path)) return [await this.#followed(path, said)];
    const matches = patternOf(path, said);
    const found: Entry[] = [];
    for (const name of (await this.entries()).keys()) {
      if (name !== "" && matches.test(name)) found.push(await this.#followed(name, said));
    }
    if (found.length > 0) return found;
    throw new Malformed(`nothing in the context ${this.root} matches ${cited(said)}`);
  }

  /** Return what is in a folder, and below it, by path. */
  async below(folder: Entry): Promise<Entry[]> {
    const head = folder.path === "" ? "" : `${folder.path}/`;
    const all = [...(await this.entries()).values()];
    return all.filter(({ path }) => path !== "" && path.startsWith(head));
  }

  /**
   * Return the digest of one thing: of what it is, its permissions and its contents.
   *
   * @throws {Malformed} It cannot be read, or is neither file, folder nor link.
   */
  async digest(entry: Entry): Promise<string> {
    if (entry.kind === "other") throw neither(entry);
    const said = entry.kind === "file" ? await this.contents(entry) : entry.target;
    const text = `${entry.kind} ${entry.mode.toString(8)} ${said}`;
    return createHash("sha256").update(asBytes(text)).digest("hex");
  }

  /** Whether a file is an archive that ADD unpacks: a tar file, compressed with gzip or not. */
  async isArchive(entry: Entry): Promise<boolean> {
    if (entry.kind !== "file" || entry.size === 0) return false;
    try {
      return await isTar(this.hostPath(entry.path));
    } catch (error) {
      throw unreadable(entry.path, error);
    }
  }

  /** Return what is in the context, by path, itself included. */
  entries(): Promise<ReadonlyMap<string, Entry>> {
    this.#found ??= this.#looked();
    return this.#found;
  }

  /** Return the digest of the contents that a file had when it was first asked for. */
  async contents(entry: Entry): Promise<string> {
    const known = this.#contents.get(entry.path);
    if (known !== undefined) return known;
    const digest = createHash("sha256");
    try {
      for await (const piece of piecesOf(this.hostPath(entry.path))) digest.update(piece);
    } catch (error) {
      throw unreadable(entry.path, error);
    }
    const made = digest.digest("hex");
    this.#contents.set(entry.path, made);
    return made;
  }

  async #looked(): Promise<ReadonlyMap<string, Entry>> {
    const found: Entry[] = [];
    const largest = new Map<string, number>();
    let size = 0;
    const folders = [""];
    for (let folder = folders.pop(); folder !== undefined; folder = folders.pop()) {
      for (const path of await this.#names(folder)) {
        const entry = await this.#entry(path);
        if (entry.kind === "folder" && !this.#ignore.maySkip(path)) folders.push(path);
        if (this.#ignore.rule(path) !== undefined) continue;
        found.push(entry);
        size += entry.size;
        const top = path.split("/", 1)[0] ?? "";
        largest.set(top, (largest.get(top) ?? 0) + entry.size);
        this.#check(found.length, size, largest);
      }
    }
    found.push({ path: "", kind: "folder", mode: 0o755, size: 0, target: "" });
    found.sort((a, b) => byCharacters(a.path, b.path));
    return new Map(found.map((entry) => [entry.path, entry]));
  }

  async #names(folder: string): Promise<string[]> {
    try {
      const names = await readdir(this.hostPath(folder), { encoding: "buffer" });
      return names.map((name) => posix.join(folder, fromBytes(name)));
    } catch (error) {
      throw this.#refused(folder, error);
    }
  }

  async #entry(path: string): Promise<Entry> {
    const host = this.hostPath(path);
    try {
      const found: Stats = await lstat(host);
      const entry = { path, mode: found.mode & ALL_BITS, size: 0, target: "" };
      if (found.isFile()) return { ...entry, kind: "file", size: found.size };
      if (found.isDirectory()) return { ...entry, kind: "folder" };
      if (!found.isSymbolicLink()) return { ...entry, kind: "other" };
      const target = fromBytes(await readlink(host, { encoding: "buffer" }));
      return { ...entry, kind: "link", target };
    } catch (error) {
      throw this.#refused(path, error);
    }
  }

  #refused(path: string, error: unknown): unknown {
    if (!(error instanceof Error)) return error;
    const where = path === "" ? this.root : `${this.root}/${path}`;
    return new Malformed(`cannot read the context: ${where}: ${reasonOf(error)}`);
  }

  #check(count: number, size: number, largest: ReadonlyMap<string, number>): void {
    let what = `more than ${BUILD_CONTEXT_ENTRIES_MAX} files`;
    if (count <= BUILD_CONTEXT_ENTRIES_MAX) {
      if (size <= BUILD_CONTEXT_BYTES_MAX) return;
      what = `more than ${BUILD_CONTEXT_BYTES_MAX} bytes`;
    }
    const most = [...largest].sort(([, a], [, b]) => b - a).slice(0, LARGEST_SHOWN);
    throw new Malformed(
      `the context ${this.root} holds ${what}: leave out what is not copied with .dockerignore; ` +
        `much is in ${most.map(([name]) => name).join(", ")}`,
    );
  }

  /** Return what is at a path, links followed, as long as they stay in the context. */
  async #followed(path: string, said: string): Promise<Entry> {
    const root = await realPath(this.root);
    const real = await realPath(path === "" ? this.root : `${this.root}/${path}`);
    if (real !== root && !real.startsWith(`${root}/`)) {
      throw new Malformed(`${cited(said)} is a link that leads out of the context ${this.root}`);
    }
    const inside = real === root ? "" : real.slice(root.length + 1);
    const entries = await this.entries();
    const found = entries.get(inside);
    if (found !== undefined) return found;
    if ([...entries.keys()].some((each) => each.startsWith(`${inside}/`))) {
      // left out itself, but not all that is in it
      return { path: inside, kind: "folder", mode: 0o755, size: 0, target: "" };
    }
    const rule = this.#ignore.rule(inside);
    if (rule !== undefined && (await isThere(real))) {
      throw new Malformed(
        `${cited(said)} is left out by ${this.#ignore.file}:${rule.line} (${rule.text})`,
      );
    }
    throw new Malformed(`no ${cited(said)} in the context ${this.root}`);
  }
}

/** Return the error for what cannot be copied. */
export function neither(entry: Entry): Malformed {
  return new Malformed(`${cited(entry.path)} is neither a file, a folder nor a link`);
}

/** Return the error for a file that this host does not let be read. */
export function unreadable(path: string, error: unknown): unknown {
  if (!(error instanceof Error) || !("syscall" in error)) return error;
  return new Malformed(`cannot read ${cited(path)}: ${reasonOf(error)}`);
}

function patternOf(path: string, said: string): RegExp {
  try {
    return glob(path, false);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new Malformed(`${cited(said)} is no pattern: ${error.message}`);
  }
}

async function isThere(path: string): Promise<boolean> {
  return await lstat(asBytes(path)).then(
    () => true,
    () => false,
  );
}

/** Return a path with its links followed, as far as there is anything. */
async function realPath(path: string): Promise<string> {
  const waiting = path.split("/").reverse();
  let [at, links] = ["", 0];
  for (let part = waiting.pop(); part !== undefined; part = waiting.pop()) {
    if (part === "" || part === ".") continue;
    if (part === "..") {
      at = at.slice(0, Math.max(0, at.lastIndexOf("/")));
      continue;
    }
    const next = `${at}/${part}`;
    const target = await readlink(asBytes(next), { encoding: "buffer" }).then(fromBytes, () => "");
    links += Number(target !== "");
    if (target === "" || links > LINKS_MAX) {
      at = next;
    } else {
      if (target.startsWith("/")) at = "";
      waiting.push(...target.split("/").reverse());
    }
  }
  return at || "/";
}
