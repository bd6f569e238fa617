/**
 * Trees of this host as tar archives, and back.
 *
 * What comes out of a sandbox is hostile, so an archive is read with limits and made below its
 * folder only: no part of a path is followed if it is a link.
 */
import { Buffer } from "node:buffer";
import { randomBytes } from "node:crypto";
import { constants, type Stats } from "node:fs";
import * as fs from "node:fs/promises";
import { basename, dirname, posix } from "node:path";
import { EngineError, ForkdError, HostError, InvalidRequest, NotFound } from "./errors.js";
import type { Info } from "./wire.js";

const BLOCK = 512;
const PIECE_BYTES = 256 * 1024;
const PERMISSIONS = 0o777;
const ALL_BITS = 0o7777;

/** Longest extended header that is read. */
const RECORDS_BYTES_MAX = 64 * 1024;

/** Most pieces of a file with holes. */
const SEGMENTS_MAX = 10_000;

/** Longest number in a map of holes. */
const NUMBER_CHARS_MAX = 20;

/** Largest number of a user or a group; the one above means "leave it". */
const OWNER_MAX = 2 ** 32 - 2;

/** Largest number that a header has room for in twelve digits and in eight. */
const [LONG_MAX, SHORT_MAX] = [8 ** 11 - 1, 8 ** 7 - 1];

/** Longest name that a header has room for. */
const NAME_BYTES_MAX = 100;

const [FILE, LINK, FOLDER, RECORDS] = ["0", "2", "5", "x"];

/** What was copied between this host and a sandbox. */
export interface Copied {
  /** How many files and links. */
  files: number;
  /** How many bytes of files. */
  bytes: number;
  /** What was left out, a line for each: its path and the reason. */
  skipped: string[];
}

function skip(copied: Copied, path: string | Buffer, error: unknown): void {
  const why = error instanceof Error ? reasonOf(error) : String(error);
  copied.skipped.push(`${shown(path.toString())}: ${why}`);
}

/** Count what a sandbox says that it left out of an archive. */
export function countSkipped(copied: Copied, made: Info<"ArchiveWritten">): void {
  const more = made.moreSkipped ?? 0;
  for (const each of made.skipped) skip(copied, each.path, shown(each.reason));
  if (more > 0) copied.skipped.push(`${more} more`);
  copied.files -= Math.min(copied.files, made.skipped.length + more);
}

/** Return a name as it can be printed, whatever is in it. */
function shown(text: string): string {
  return text.replace(/\p{C}/gu, (each) => `\\u{${each.codePointAt(0)?.toString(16)}}`);
}

/** Return why this host refused something, in its words. */
export function reasonOf(error: Error): string {
  const { code, syscall } = error as NodeJS.ErrnoException;
  if (code === undefined) return error.message;
  return error.message.replace(/^\w+: /, "").replace(new RegExp(`, ${syscall}.*$`, "s"), "");
}

/** Return the error for what this host refuses of a path. */
function refused(path: string, error: unknown, field?: string): unknown {
  if (!(error instanceof Error) || error instanceof ForkdError) return error;
  if ((error as NodeJS.ErrnoException).code === undefined) return error;
  if (field !== undefined && (error as NodeJS.ErrnoException).code === "ENOENT") {
    const said = `${shown(path)}: no such file or folder`;
    return new NotFound(said, { context: { field }, cause: error });
  }
  return new HostError(`${shown(path)}: ${reasonOf(error)}`, { cause: error });
}

/** Return the error for what is neither a file nor a folder. */
export function neither(source: string): InvalidRequest {
  return new InvalidRequest(`${shown(source)}: neither a file nor a folder`, {
    context: { field: "source" },
  });
}

// From this host

/**
 * Return a folder in a sandbox, and the archive that, made there, is `source` at `target`.
 *
 * @param isExact Keep the bits that change the user, too.
 */
export async function packed(
  source: string,
  target: string,
  copied: Copied,
  isExact: boolean,
): Promise<[folder: string, pieces: AsyncGenerator<Uint8Array, void, void>]> {
  let found: Stats;
  try {
    found = await fs.stat(source);
  } catch (error) {
    throw refused(source, error, "source");
  }
  const packer = new Packer(copied, isExact ? ALL_BITS : PERMISSIONS);
  if (found.isDirectory()) return [target, packer.folder(source, found)];
  if (!found.isFile()) throw neither(source);
  const name = posix.basename(target);
  if (name === "" || target.endsWith("/")) {
    throw new InvalidRequest(`'${target}' does not name a file`, { context: { field: "target" } });
  }
  return [posix.dirname(target), packer.oneFile(source, name)];
}

class Packer {
  readonly #copied: Copied;
  readonly #bits: number;

  constructor(copied: Copied, bits: number) {
    this.#copied = copied;
    this.#bits = bits;
  }

  async *oneFile(source: string, name: string): AsyncGenerator<Uint8Array, void, void> {
    try {
      yield* this.#file(Buffer.from(source), Buffer.from(name));
    } catch (error) {
      throw refused(source, error);
    }
    yield new Uint8Array(2 * BLOCK);
  }

  async *folder(top: string, found: Stats): AsyncGenerator<Uint8Array, void, void> {
    yield* this.#header(found, Buffer.from("./"), FOLDER);
    const waiting: Buffer[] = [Buffer.alloc(0)];
    for (let at = waiting.pop(); at !== undefined; at = waiting.pop()) {
      const path = at.length === 0 ? Buffer.from(top) : joined(Buffer.from(top), at);
      try {
        if (at.length > 0 && !(yield* this.#entry(path, at))) continue;
        const names = await fs.readdir(path, { encoding: "buffer" });
        names.sort((a, b) => Buffer.compare(b, a));
        for (const name of names) waiting.push(at.length === 0 ? name : joined(at, name));
      } catch (error) {
        skip(this.#copied, path, error);
      }
    }
    yield new Uint8Array(2 * BLOCK);
  }

  /** Yield what is at a path; returns whether it is a folder. */
  async *#entry(path: Buffer, name: Buffer): AsyncGenerator<Uint8Array, boolean, void> {
    const found = await fs.lstat(path);
    if (found.isDirectory()) {
      yield* this.#header(found, name, FOLDER);
      return true;
    }
    if (found.isSymbolicLink()) {
      const target = await fs.readlink(path, { encoding: "buffer" });
      yield* this.#header(found, name, LINK, { target });
      this.#copied.files += 1;
    } else if (found.isFile()) {
      yield* this.#file(path, name);
    } else {
      skip(this.#copied, path, "a device, a pipe or a socket");
    }
    return false;
  }

  async *#file(path: Buffer, name: Buffer): AsyncGenerator<Uint8Array, void, void> {
    await using file = await fs.open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    const found = await file.stat();
    yield* this.#header(found, name, FILE, { size: found.size });
    let [left, reason] = [found.size, ""];
    while (left > 0) {
      let data: Uint8Array = new Uint8Array(Math.min(left, PIECE_BYTES));
      if (reason === "") {
        try {
          const { bytesRead } = await file.read(data, 0, data.length, null);
          if (bytesRead === 0) reason = "it became shorter";
          else data = data.subarray(0, bytesRead);
        } catch (error) {
          reason = reasonOf(error as Error);
        }
      }
      left -= data.length; // a header has promised them
      yield data;
    }
    yield new Uint8Array(padding(found.size));
    if (reason !== "") skip(this.#copied, path, `not read to its end: ${reason}`);
    this.#copied.files += 1;
    this.#copied.bytes += found.size;
  }

  *#header(
    found: Stats,
    name: Buffer,
    kind: string,
    more: { target?: Buffer; size?: number } = {},
  ): Generator<Uint8Array, void, void> {
    const seconds = Math.floor(found.mtimeMs / 1000);
    const mode = found.mode & this.#bits;
    yield* headers(name, kind, { size: 0, ...more, mode, uid: found.uid, gid: found.gid, seconds });
  }
}

function joined(folder: Buffer, name: Buffer): Buffer {
  return Buffer.concat([folder, Buffer.from("/"), name]);
}

/** Return how many bytes fill up the last block of a file. */
export function padding(size: number): number {
  return (BLOCK - (size % BLOCK)) % BLOCK;
}

function needsRecord(name: Buffer): boolean {
  return name.length > NAME_BYTES_MAX || name.some((each) => each > 0x7e);
}

/** Return a record of an extended header, which begins with its own length. */
function record(key: string, value: Buffer): Buffer {
  const rest = Buffer.concat([Buffer.from(` ${key}=`), value, Buffer.from("\n")]);
  let length = rest.length;
  while (length !== rest.length + String(length).length) {
    length = rest.length + String(length).length;
  }
  return Buffer.concat([Buffer.from(String(length)), rest]);
}

interface Parts {
  size: number;
  target?: Buffer;
  mode?: number;
  uid?: number;
  gid?: number;
  seconds?: number;
  prefix?: Buffer;
}

/** Yield the header of a member, behind an extended one if it does not hold everything. */
export function* headers(
  name: Buffer,
  kind: string,
  parts: Parts,
): Generator<Uint8Array, void, void> {
  const target = parts.target ?? Buffer.alloc(0);
  const records: Buffer[] = [];
  if (needsRecord(name)) records.push(record("path", name));
  if (needsRecord(target)) records.push(record("linkpath", target));
  for (const [key, value, most] of [
    ["size", parts.size, LONG_MAX],
    ["uid", parts.uid ?? 0, SHORT_MAX],
    ["gid", parts.gid ?? 0, SHORT_MAX],
  ] as const) {
    if (value > most) records.push(record(key, Buffer.from(String(value))));
  }
  if (records.length > 0) {
    const data = Buffer.concat(records);
    yield block(Buffer.from("records"), RECORDS, { size: data.length });
    yield Buffer.concat([data, new Uint8Array(padding(data.length))]);
  }
  const seconds = Math.min(Math.max(0, parts.seconds ?? 0), LONG_MAX);
  yield block(name, kind, { ...parts, seconds });
}

/** Return a header; every bit of it is the same for the same arguments. */
export function block(name: Buffer, kind: string, parts: Parts): Uint8Array {
  const made = Buffer.alloc(BLOCK);
  const octal = (value: number, at: number, width: number, most: number): void => {
    made.write(
      Math.min(value, most)
        .toString(8)
        .padStart(width - 1, "0"),
      at,
      "latin1",
    );
  };
  name.copy(made, 0, 0, NAME_BYTES_MAX);
  octal(parts.mode ?? 0o644, 100, 8, SHORT_MAX);
  octal(parts.uid ?? 0, 108, 8, SHORT_MAX);
  octal(parts.gid ?? 0, 116, 8, SHORT_MAX);
  octal(parts.size, 124, 12, LONG_MAX);
  octal(parts.seconds ?? 0, 136, 12, LONG_MAX);
  made.fill(" ", 148, 156);
  made.write(kind, 156, "latin1");
  parts.target?.copy(made, 157, 0, NAME_BYTES_MAX);
  made.write("ustar\u000000", 257, "latin1");
  parts.prefix?.copy(made, 345);
  const sum = made.reduce((total, each) => total + each, 0);
  made.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148, "latin1");
  return made;
}

// To this host

/** One member of an archive, as far as it is of use here. */
interface Member {
  path: Buffer;
  kind: string;
  mode: number;
  uid: number;
  gid: number;
  size: number;
  seconds: number;
  target: Buffer;
  sparse: number | undefined;
  skipped: Buffer | undefined;
}

/** The bytes of an archive, however they come. */
class Source {
  readonly #pieces: AsyncIterator<Uint8Array>;
  #held: Uint8Array = new Uint8Array();

  constructor(pieces: AsyncIterable<Uint8Array>) {
    this.#pieces = pieces[Symbol.asyncIterator]();
  }

  /** Return the next bytes, at most `most`, and at least one. */
  async some(most: number): Promise<Uint8Array> {
    while (this.#held.length === 0) {
      const next = await this.#pieces.next();
      if (next.done) throw new EngineError("the sandbox's archive ended in the middle");
      this.#held = next.value;
    }
    const data = this.#held.subarray(0, most);
    this.#held = this.#held.subarray(most);
    return data;
  }

  /** Return so many bytes. */
  async exact(count: number): Promise<Buffer> {
    const parts: Uint8Array[] = [];
    for (let left = count; left > 0; ) {
      const data = await this.some(left);
      parts.push(data);
      left -= data.length;
    }
    return Buffer.concat(parts);
  }

  /** Pass over so many bytes. */
  async skip(count: number): Promise<void> {
    for (let left = count; left > 0; ) left -= (await this.some(left)).length;
  }

  /** Let go of what was not read. */
  async end(): Promise<void> {
    await this.#pieces.return?.();
  }
}

/**
 * Make what an archive of an agent's has at `target`: a folder, or one file; counts in `copied`.
 *
 * @param isExact Keep owners, and the bits that change the user.
 */
export async function unpack(
  pieces: AsyncIterable<Uint8Array>,
  target: string,
  copied: Copied,
  isExact: boolean,
): Promise<void> {
  const source = new Source(pieces);
  try {
    let member = await nextMember(source);
    if (member === undefined) throw new EngineError("the sandbox sent an empty archive");
    const isFile = member.kind === FILE;
    const tree = new Tree(isFile ? dirname(target) : target, copied, isExact);
    await tree.begin();
    while (member !== undefined) {
      if (member.skipped !== undefined) noteSkipped(member.skipped, copied);
      if (isFile) member.path = Buffer.from(basename(target));
      const left = await tree.add(member, source);
      await source.skip(left + padding(member.size));
      member = await nextMember(source);
    }
    await tree.end();
  } catch (error) {
    throw refused(target, error);
  } finally {
    await source.end();
  }
}

async function nextMember(source: Source): Promise<Member | undefined> {
  let records = new Map<string, Buffer>();
  for (;;) {
    const found = await source.exact(BLOCK);
    if (found.every((each) => each === 0)) return undefined;
    const member = parsed(found);
    if (member.kind !== RECORDS) return withRecords(member, records);
    if (member.size > RECORDS_BYTES_MAX) throw invalid("an extended header is too long");
    records = recordsOf(await source.exact(member.size));
    await source.skip(padding(member.size));
  }
}

function invalid(why: string): EngineError {
  return new EngineError(`the sandbox sent no valid archive: ${why}`);
}

function parsed(found: Buffer): Member {
  const sum = found.reduce((total, each, at) => total + (at >= 148 && at < 156 ? 32 : each), 0);
  if (sum !== octalAt(found, 148, 8)) throw invalid("a checksum is wrong");
  return {
    path: textAt(found, 0, NAME_BYTES_MAX),
    kind: found.toString("latin1", 156, 157),
    mode: octalAt(found, 100, 8) & ALL_BITS,
    uid: octalAt(found, 108, 8),
    gid: octalAt(found, 116, 8),
    size: octalAt(found, 124, 12),
    seconds: octalAt(found, 136, 12),
    target: textAt(found, 157, NAME_BYTES_MAX),
    sparse: undefined,
    skipped: undefined,
  };
}

function textAt(found: Buffer, at: number, length: number): Buffer {
  const field = found.subarray(at, at + length);
  const end = field.indexOf(0);
  return Buffer.from(end < 0 ? field : field.subarray(0, end));
}

function octalAt(found: Buffer, at: number, length: number): number {
  const digits = textAt(found, at, length).toString("latin1").trim() || "0";
  if (!/^[0-7]+$/.test(digits)) throw invalid("a number is malformed");
  return Number.parseInt(digits, 8);
}

function recordsOf(data: Buffer): Map<string, Buffer> {
  const records = new Map<string, Buffer>();
  for (let at = 0; at < data.length; ) {
    const space = data.indexOf(" ", at);
    const end = space < 0 ? 0 : at + numberOf(data.toString("latin1", at, space));
    const equals = data.indexOf("=", space);
    if (end <= space || end > data.length || equals < 0 || equals >= end || data[end - 1] !== 10) {
      throw invalid("a record is malformed");
    }
    records.set(data.toString("utf8", space + 1, equals), data.subarray(equals + 1, end - 1));
    at = end;
  }
  return records;
}

function numberOf(digits: string, most: number = Number.MAX_SAFE_INTEGER): number {
  const value = Number(digits);
  if (!/^\d{1,20}$/.test(digits) || value > most) throw invalid("a number is malformed");
  return value;
}

function withRecords(member: Member, records: Map<string, Buffer>): Member {
  const numberIn = (key: string, most?: number): number | undefined => {
    const said = records.get(key);
    return said === undefined ? undefined : numberOf(said.toString("latin1"), most);
  };
  return {
    ...member,
    path: records.get("GNU.sparse.name") ?? records.get("path") ?? member.path,
    target: records.get("linkpath") ?? member.target,
    size: numberIn("size") ?? member.size,
    uid: numberIn("uid", OWNER_MAX) ?? member.uid,
    gid: numberIn("gid", OWNER_MAX) ?? member.gid,
    sparse: numberIn("GNU.sparse.realsize"),
    skipped: records.get("FORKD.skipped"),
  };
}

function noteSkipped(said: Buffer, copied: Copied): void {
  try {
    const { skipped, more_skipped: more } = JSON.parse(said.toString());
    for (const each of skipped) skip(copied, String(each.path), shown(String(each.reason)));
    if (more) copied.skipped.push(`${Number(more)} more`);
  } catch (error) {
    throw new EngineError("the sandbox does not say what it left out", { cause: error });
  }
}

/** A part of a path that is no folder, and must not be followed. */
class NotAFolder extends Error {}

/** Makes files below a folder. */
class Tree {
  readonly #top: string;
  readonly #copied: Copied;
  readonly #isExact: boolean;
  readonly #modes: [path: Buffer, mode: number][] = [];
  #left = 0;

  constructor(top: string, copied: Copied, isExact: boolean) {
    this.#top = top;
    this.#copied = copied;
    this.#isExact = isExact;
  }

  async begin(): Promise<void> {
    try {
      await fs.mkdir(this.#top);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
    }
  }

  /** Give folders the permissions with which nothing more could be made in them. */
  async end(): Promise<void> {
    for (const [path, mode] of this.#modes.reverse()) await fs.chmod(path, mode).catch(() => {});
  }

  /** Make a member; returns how many of its bytes are still to be read. */
  async add(member: Member, source: Source): Promise<number> {
    this.#left = member.size;
    try {
      await this.#make(member, source);
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      if (code === "ENOSPC" || code === "EDQUOT") throw refused(member.path.toString(), error);
      if (!(error instanceof NotAFolder) && (error instanceof ForkdError || code === undefined)) {
        throw error;
      }
      skip(this.#copied, member.path, error);
    }
    return this.#left;
  }

  async #make(member: Member, source: Source): Promise<void> {
    const parts = split(member.path);
    if (parts.some((part) => part.equals(Buffer.from("..")) || part.includes(0))) {
      skip(this.#copied, member.path, "leads out of the folder");
    } else if (member.kind === FOLDER) {
      await this.#makeFolder(parts, member);
    } else if (parts.length === 0) {
      skip(this.#copied, member.path, "has no name");
    } else if (member.kind === LINK) {
      const path = await this.#free(parts);
      await fs.symlink(member.target, path);
      if (this.#isExact) await fs.lchown(path, member.uid, member.gid);
      this.#copied.files += 1;
    } else if (member.kind === FILE) {
      await this.#makeFile(parts, member, source);
    } else {
      skip(this.#copied, member.path, "neither file, folder nor link");
    }
  }

  /** Return the path of a folder, which is made as far as it is missing; follows no link. */
  async #enter(parts: Buffer[]): Promise<Buffer> {
    let path: Buffer = Buffer.from(this.#top);
    for (const part of parts) {
      path = joined(path, part);
      try {
        await fs.mkdir(path);
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
        if (!(await fs.lstat(path)).isDirectory()) throw new NotAFolder("Not a directory");
      }
    }
    return path;
  }

  /** Return a path in a folder, where no file or link is. */
  async #free(parts: Buffer[]): Promise<Buffer> {
    const path = joined(await this.#enter(parts.slice(0, -1)), parts.at(-1) as Buffer);
    try {
      await fs.unlink(path);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "ENOENT") throw error;
    }
    return path;
  }

  get #bits(): number {
    return this.#isExact ? ALL_BITS : PERMISSIONS;
  }

  async #makeFolder(parts: Buffer[], member: Member): Promise<void> {
    const path = await this.#enter(parts);
    if (parts.length === 0) return;
    if (this.#isExact) await fs.chown(path, member.uid, member.gid);
    const mode = member.mode & this.#bits;
    await fs.chmod(path, mode | 0o700);
    if ((mode & 0o700) !== 0o700) this.#modes.push([path, mode]);
  }

  async #makeFile(parts: Buffer[], member: Member, source: Source): Promise<void> {
    const folder = await this.#enter(parts.slice(0, -1));
    const aside = joined(folder, Buffer.from(`.${randomBytes(8).toString("hex")}.forkd-part`));
    const { O_WRONLY, O_CREAT, O_EXCL, O_NOFOLLOW } = constants;
    const file = await fs.open(aside, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600);
    try {
      try {
        await this.#fill(file, member, source);
        if (this.#isExact) await file.chown(member.uid, member.gid);
        await file.chmod(member.mode & this.#bits);
        await file.utimes(member.seconds, member.seconds);
      } finally {
        await file.close();
      }
      await fs.rename(aside, joined(folder, parts.at(-1) as Buffer));
    } catch (error) {
      await fs.unlink(aside).catch(() => {});
      throw error;
    }
    this.#copied.files += 1;
  }

  async #fill(file: fs.FileHandle, member: Member, source: Source): Promise<void> {
    const { size, sparse } = member;
    const segments = sparse === undefined ? [[0, size] as const] : await this.#chart(source);
    for (const [offset, length] of segments) {
      if (length > this.#left) throw new EngineError("the sandbox's map of holes is wrong");
      for (let done = 0; done < length; ) {
        const data = await source.some(Math.min(length - done, PIECE_BYTES));
        this.#left -= data.length;
        this.#copied.bytes += data.length;
        for (let at = 0; at < data.length; ) {
          const { bytesWritten } = await file.write(data, at, data.length - at, offset + done + at);
          at += bytesWritten;
        }
        done += data.length;
      }
    }
    if (sparse !== undefined) await file.truncate(sparse);
  }

  /** Read where the data of a file with holes is. */
  async #chart(source: Source): Promise<(readonly [offset: number, length: number])[]> {
    let [text, wanted] = ["", 1];
    while (text.split("\n").length - 1 < wanted) {
      const isLong = text.length > wanted * (NUMBER_CHARS_MAX + 1);
      if (this.#left < BLOCK || wanted > 1 + 2 * SEGMENTS_MAX || isLong) {
        throw new EngineError("the sandbox's map of holes is wrong");
      }
      text += (await source.exact(BLOCK)).toString("latin1");
      this.#left -= BLOCK;
      if (wanted === 1) wanted = 1 + 2 * numberOf(text.split("\n", 1)[0] ?? "");
    }
    const numbers = text
      .split("\n")
      .slice(1, wanted)
      .map((line) => numberOf(line));
    const found: (readonly [number, number])[] = [];
    for (let at = 0; at + 1 < numbers.length; at += 2) {
      found.push([numbers[at] ?? 0, numbers[at + 1] ?? 0]);
    }
    return found;
  }
}

function split(path: Buffer): Buffer[] {
  const parts: Buffer[] = [];
  for (let at = 0; at <= path.length; ) {
    const slash = path.indexOf("/", at);
    const end = slash < 0 ? path.length : slash;
    const part = path.subarray(at, end);
    if (part.length > 0 && !part.equals(Buffer.from("."))) parts.push(part);
    at = end + 1;
  }
  return parts;
}
