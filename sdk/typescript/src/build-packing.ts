/**
 * Files of a COPY or an ADD as a tar archive, on their way into a machine.
 *
 * They come from the context, from a heredoc, from an archive that ADD unpacks, or from the archive
 * of another stage's files; each gets the owner and the permissions that the step says.
 */
import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import { open } from "node:fs/promises";
import { headers, padding } from "./archive.js";
import {
  BUILD_CONTEXT_BYTES_MAX,
  BUILD_CONTEXT_ENTRIES_MAX,
  type Context,
  type Entry,
  neither,
  unreadable,
} from "./build-context.js";
import type { Part } from "./build-copying.js";
import { Malformed } from "./dockerfile-words.js";
import { type Member, TarFile } from "./tar-reader.js";
import { asBytes, cited, fromBytes } from "./text.js";

const PIECE_BYTES = 256 * 1024;
const FILE_MODE = 0o644;
const FOLDER_MODE = 0o755;

/** What ends an archive. */
export const END: Uint8Array = new Uint8Array(2 * 512);

const [FILE, LINK, FOLDER] = ["0", "2", "5"];

/** Pieces of an archive. */
export type Pieces = AsyncGenerator<Uint8Array, void, void>;

/** Whose copies are, by number. */
export interface Owner {
  uid: number;
  gid: number;
}

/** What copies look like. */
export interface Look {
  /** Whose they are; undefined for whom an archive says. */
  owner: Owner | undefined;
  /** Their permissions; null for those that they have. */
  mode: number | null;
}

interface Head {
  name: string;
  kind: string;
  mode: number;
  size?: number;
  seconds?: number;
  uid?: number;
  gid?: number;
  target?: string;
}

/** Makes members of one archive. */
export class Packer {
  readonly #look: Look;
  readonly #folders = new Set<string>();

  constructor(look: Look) {
    this.#look = look;
  }

  /**
   * Yield the members for a source in the context.
   *
   * @param name What a file is called in the archive; a folder's contents are at its top.
   * @throws {Malformed} A file is not as it was when its digest was taken, or cannot be read.
   */
  async *ofContext(context: Context, part: Part, name: string): Pieces {
    const { entry } = part;
    if (entry === undefined) {
      const data = Buffer.from(part.content);
      yield* this.#header({ name, kind: FILE, mode: FILE_MODE, size: data.length });
      yield Buffer.concat([data, new Uint8Array(padding(data.length))]);
    } else if (part.unpacked) {
      yield* this.#unpacked(context.hostPath(entry.path));
    } else if (entry.kind === "folder") {
      const head = entry.path === "" ? 0 : entry.path.length + 1;
      for (const each of await context.below(entry)) {
        yield* this.#entry(context, each, each.path.slice(head));
      }
    } else {
      yield* this.#entry(context, entry, name);
    }
  }

  /**
   * Yield the members for what another machine has sent.
   *
   * @param name What the file is called; undefined if it is a folder's contents.
   * @param skipped Takes what that machine could not send.
   */
  async *ofArchive(archive: TarFile, name: string | undefined, skipped: string[]): Pieces {
    for (const member of await archive.members()) {
      if (member.skipped !== undefined) skipped.push(...skippedIn(member.skipped));
      else yield* this.#member(archive, member, name ?? member.name.replace(/^\.\//, ""));
    }
  }

  async *#unpacked(path: Buffer): Pieces {
    const said = fromBytes(path);
    await using archive = await TarFile.open(path, BUILD_CONTEXT_BYTES_MAX);
    const members = await archive.members();
    let left = BUILD_CONTEXT_BYTES_MAX;
    for (const member of members) {
      left -= member.size;
      if (left < 0 || members.length > BUILD_CONTEXT_ENTRIES_MAX) {
        throw new Malformed(`${said} unpacks to more than a context may hold`);
      }
      const name = member.name.replace(/^\/+/, "").replace(/^\.\//, "");
      if (name.split("/").includes("..")) {
        throw new Malformed(`${said} holds ${cited(member.name)}, which leads out of it`);
      }
      yield* this.#member(archive, member, name);
    }
  }

  /** Yield a member of an archive under another name. */
  async *#member(archive: TarFile, member: Member, called: string): Pieces {
    const name = called.replace(/\/+$/, "");
    if (name === "" || name === ".") return;
    const { mode, uid, gid } = member;
    const head = { name, mode, uid, gid, seconds: member.seconds };
    if (member.kind === "folder") {
      yield* this.#folder({ ...head, kind: FOLDER });
    } else if (member.kind === "link") {
      yield* this.#header({ ...head, kind: LINK, target: member.target });
    } else {
      const original = await archive.original(member);
      if (original.kind !== "file") {
        throw new Malformed(`${cited(name)} is neither a file, a folder nor a link`);
      }
      yield* this.#header({ ...head, kind: FILE, size: original.size });
      yield* archive.contents(original);
      yield new Uint8Array(padding(original.size));
    }
  }

  async *#entry(context: Context, entry: Entry, name: string): Pieces {
    const { mode, target } = entry;
    if (entry.kind === "folder") yield* this.#folder({ name, kind: FOLDER, mode });
    else if (entry.kind === "link") yield* this.#header({ name, kind: LINK, mode, target });
    else if (entry.kind === "other") throw neither(entry);
    else yield* this.#file(context, entry, name);
  }

  async *#file(context: Context, entry: Entry, name: string): Pieces {
    const { size, mode, path } = entry;
    const digest = createHash("sha256");
    try {
      await using file = await open(context.hostPath(path));
      const seconds = Math.floor((await file.stat()).mtimeMs / 1000);
      yield* this.#header({ name, kind: FILE, mode, size, seconds });
      for (let left = size; left > 0; ) {
        const data = Buffer.alloc(Math.min(left, PIECE_BYTES));
        const { bytesRead } = await file.read(data, 0, data.length, null);
        if (bytesRead === 0) {
          throw new Malformed(`${cited(path)} became shorter while it was copied`);
        }
        const piece = data.subarray(0, bytesRead);
        left -= bytesRead;
        digest.update(piece);
        yield piece;
      }
    } catch (error) {
      throw unreadable(path, error);
    }
    if (digest.digest("hex") !== (await context.contents(entry))) {
      throw new Malformed(`${cited(path)} was changed while it was copied`);
    }
    yield new Uint8Array(padding(size));
  }

  *#folder(head: Head): Generator<Uint8Array, void, void> {
    if (this.#folders.has(head.name)) return;
    yield* this.#header(head);
    this.#folders.add(head.name);
  }

  /** Yield a header, behind those of folders above it that have none of their own. */
  *#header(head: Head): Generator<Uint8Array, void, void> {
    const parent = head.name.slice(0, Math.max(0, head.name.lastIndexOf("/")));
    if (parent !== "" && !this.#folders.has(parent)) {
      yield* this.#folder({ name: parent, kind: FOLDER, mode: FOLDER_MODE });
    }
    const { uid = 0, gid = 0 } = this.#look.owner ?? head;
    const mode = head.kind === LINK ? head.mode : (this.#look.mode ?? head.mode);
    const { size = 0, seconds = 0, target = "" } = head;
    yield* headers(asBytes(head.name), head.kind, {
      size,
      seconds,
      mode,
      uid,
      gid,
      target: asBytes(target),
    });
  }
}

/** Return what a machine says that it could not send, a line for each thing. */
function skippedIn(record: string): string[] {
  try {
    const said = JSON.parse(record);
    const lines = said.skipped.map(
      (each: { path: unknown; reason: unknown }) => `${each.path}: ${each.reason}`,
    );
    return said.more_skipped ? [...lines, `${said.more_skipped} more`] : lines;
  } catch (error) {
    throw new Malformed(`the machine does not say what it left out: ${error}`);
  }
}
