/** Reads tar archives of this host: those that ADD unpacks, and what another machine has sent. */
import { Buffer } from "node:buffer";
import { createWriteStream } from "node:fs";
import { type FileHandle, mkdtemp, open, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Readable, Transform } from "node:stream";
import { pipeline } from "node:stream/promises";
import { createGunzip } from "node:zlib";
import { padding } from "./archive.js";
import { Malformed } from "./dockerfile-words.js";
import { cited, fromBytes } from "./text.js";

const BLOCK = 512;
const PIECE_BYTES = 256 * 1024;

/** Longest extended header, longest name, and longest map of holes that is read. */
const RECORDS_BYTES_MAX = 1024 * 1024;

/** Most pieces of a file with holes. */
const SEGMENTS_MAX = 10_000;

/** Programs whose compression is not read, by the bytes that it begins with. */
const UNREAD: readonly (readonly [program: string, begins: Buffer])[] = [
  ["xz", Buffer.from("fd377a585a00", "hex")],
  ["bzip2", Buffer.from("BZh")],
];

const GZIP = Buffer.from("1f8b", "hex");

const KINDS: Readonly<Record<string, Member["kind"]>> = {
  "0": "file",
  "\0": "file",
  "7": "file",
  "1": "hard",
  "2": "link",
  "5": "folder",
};

/** One member of an archive. */
export interface Member {
  name: string;
  kind: "file" | "folder" | "link" | "hard" | "other";
  mode: number;
  uid: number;
  gid: number;
  seconds: number;
  /** Where a link leads. */
  target: string;
  /** How many bytes it has. */
  size: number;
  /** What a machine of forkd says that it left out. */
  skipped: string | undefined;
  /** Where its data are: in the file, and in it. */
  segments: readonly Segment[];
}

interface Segment {
  /** In the archive. */
  from: number;
  /** In the member. */
  at: number;
  length: number;
}

/**
 * Whether a file is a tar archive, compressed with gzip or not.
 *
 * @throws {Malformed} It is compressed in a way that is not read.
 */
export async function isTar(path: Buffer): Promise<boolean> {
  const first = await beginning(path);
  for (const [program, begins] of UNREAD) {
    if (!first.subarray(0, begins.length).equals(begins)) continue;
    throw new Malformed(
      `${path} is compressed with ${program}, which the TypeScript SDK does not read: compress it ` +
        "with gzip, or COPY it, and have a RUN unpack it",
    );
  }
  const head = isGzip(first) ? await unzippedBeginning(path) : first;
  return head.length === BLOCK && hasChecksum(head);
}

/** Yield the bytes of a file; streams of files take no such path everywhere. */
export async function* piecesOf(path: Buffer): AsyncGenerator<Uint8Array, void, void> {
  await using file = await open(path);
  for (;;) {
    const { bytesRead, buffer } = await file.read(Buffer.alloc(PIECE_BYTES), 0, PIECE_BYTES, null);
    if (bytesRead === 0) return;
    yield buffer.subarray(0, bytesRead);
  }
}

async function beginning(path: Buffer): Promise<Buffer> {
  await using file = await open(path);
  return await readAt(file, 0, BLOCK);
}

async function unzippedBeginning(path: Buffer): Promise<Buffer> {
  const source = Readable.from(piecesOf(path), { objectMode: false });
  const pieces: Buffer[] = [];
  let length = 0;
  try {
    for await (const piece of source.pipe(createGunzip())) {
      pieces.push(piece);
      length += piece.length;
      if (length >= BLOCK) break;
    }
  } catch {
    return Buffer.alloc(0); // it only begins as gzip does
  } finally {
    source.destroy();
  }
  return Buffer.concat(pieces).subarray(0, BLOCK);
}

function isGzip(first: Buffer): boolean {
  return first.subarray(0, GZIP.length).equals(GZIP);
}

async function readAt(file: FileHandle, at: number, length: number): Promise<Buffer> {
  const data = Buffer.alloc(length);
  let done = 0;
  while (done < length) {
    const { bytesRead } = await file.read(data, done, length - done, at + done);
    if (bytesRead === 0) break;
    done += bytesRead;
  }
  return data.subarray(0, done);
}

/** An archive that is open. */
export class TarFile implements AsyncDisposable {
  readonly #file: FileHandle;
  readonly #folder: string | undefined;
  readonly #path: string;
  #members: Promise<readonly Member[]> | undefined;

  private constructor(file: FileHandle, path: string, folder: string | undefined) {
    this.#file = file;
    this.#path = path;
    this.#folder = folder;
  }

  /**
   * Open an archive; one that is compressed is unpacked to a temporary file.
   *
   * @param bytesMax The most that it may unpack to.
   */
  static async open(path: Buffer, bytesMax: number): Promise<TarFile> {
    const said = fromBytes(path);
    if (!isGzip(await beginning(path))) return new TarFile(await open(path), said, undefined);
    const folder = await mkdtemp(join(tmpdir(), "forkd-build-"));
    try {
      const whole = join(folder, "tar");
      const room = limited(bytesMax, said);
      await pipeline(piecesOf(path), createGunzip(), room, createWriteStream(whole));
      return new TarFile(await open(whole), said, folder);
    } catch (error) {
      await rm(folder, { recursive: true, force: true });
      if (error instanceof Malformed) throw error;
      throw new Malformed(`${said} is damaged: ${error instanceof Error ? error.message : error}`);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#file.close();
    if (this.#folder !== undefined) await rm(this.#folder, { recursive: true, force: true });
  }

  /** Return what is in it. */
  members(): Promise<readonly Member[]> {
    this.#members ??= this.#read();
    return this.#members;
  }

  /**
   * Return the member whose contents one has: for a hard link, an earlier one.
   *
   * @throws {Malformed} There is none.
   */
  async original(member: Member): Promise<Member> {
    if (member.kind !== "hard") return member;
    const all = await this.members();
    const before = all.slice(0, all.indexOf(member));
    const found = before.findLast((each) => each.name === member.target);
    if (found !== undefined) return await this.original(found);
    throw this.#damaged(
      `${cited(member.name)} is a link to ${cited(member.target)}, of which there is none`,
    );
  }

  /** Yield the bytes of a file. */
  async *contents(member: Member): AsyncGenerator<Uint8Array, void, void> {
    let at = 0;
    for (const segment of [...member.segments, { from: 0, at: member.size, length: 0 }]) {
      for (; at < segment.at; ) {
        const hole = Math.min(segment.at - at, PIECE_BYTES);
        yield new Uint8Array(hole);
        at += hole;
      }
      for (let done = 0; done < segment.length; ) {
        const wanted = Math.min(segment.length - done, PIECE_BYTES);
        const piece = await readAt(this.#file, segment.from + done, wanted);
        if (piece.length < wanted) throw this.#damaged("it is cut short");
        yield piece;
        done += wanted;
        at += wanted;
      }
    }
  }

  #damaged(why: string): Malformed {
    return new Malformed(`${this.#path} is damaged: ${why}`);
  }

  async #read(): Promise<Member[]> {
    const found: Member[] = [];
    const general = new Map<string, Buffer>();
    let records = new Map<string, Buffer>();
    for (let at = 0; ; ) {
      const head = await readAt(this.#file, at, BLOCK);
      if (head.length === 0 || head.every((each) => each === 0)) return found;
      if (head.length < BLOCK || !hasChecksum(head)) throw this.#damaged("a header is malformed");
      const kind = head.toString("latin1", 156, 157);
      const size =
        numberIn(records.get("size") ?? general.get("size")) ?? this.#number(head, 124, 12);
      const data = at + BLOCK;
      at = data + size + padding(size);
      if (kind === "x" || kind === "g") {
        for (const [key, value] of this.#records(await this.#long(data, size))) {
          (kind === "g" ? general : records).set(key, value);
        }
      } else if (kind === "L" || kind === "K") {
        const text = upToZero(await this.#long(data, size));
        records.set(kind === "L" ? "path" : "linkpath", text);
      } else {
        const all = new Map([...general, ...records]);
        found.push(await this.#member(head, kind, all, data, size));
        records = new Map();
      }
    }
  }

  async #member(
    head: Buffer,
    type: string,
    records: ReadonlyMap<string, Buffer>,
    data: number,
    stored: number,
  ): Promise<Member> {
    const prefix = head.toString("latin1", 257, 263) === "ustar\0" ? textAt(head, 345, 155) : "";
    const plain = textAt(head, 0, 100);
    const named = records.get("GNU.sparse.name") ?? records.get("path");
    const name = named === undefined ? (prefix && `${prefix}/`) + plain : fromBytes(named);
    if (type === "S" || records.has("GNU.sparse.map") || records.has("GNU.sparse.numblocks")) {
      throw new Malformed(
        `${this.#path} holds ${cited(name)} as a file with holes, in a form that is not read: make ` +
          "the archive without `--sparse`",
      );
    }
    const isOldFolder = (type === "0" || type === "\0") && name.endsWith("/");
    const kind = isOldFolder ? "folder" : (KINDS[type] ?? "other");
    const target = records.get("linkpath");
    const whole = numberIn(records.get("GNU.sparse.realsize"));
    return {
      name,
      kind,
      mode: this.#number(head, 100, 8) & 0o7777,
      uid: numberIn(records.get("uid")) ?? this.#number(head, 108, 8),
      gid: numberIn(records.get("gid")) ?? this.#number(head, 116, 8),
      seconds: Math.floor(numberIn(records.get("mtime")) ?? this.#number(head, 136, 12)),
      target: target === undefined ? textAt(head, 157, 100) : fromBytes(target),
      size: kind === "file" ? (whole ?? stored) : 0,
      skipped: records.get("FORKD.skipped")?.toString(),
      segments:
        whole === undefined
          ? [{ from: data, at: 0, length: stored }]
          : await this.#holes(data, stored, whole),
    };
  }

  /** Read where the data of a file with holes are: its map comes before them. */
  async #holes(data: number, stored: number, whole: number): Promise<Segment[]> {
    let [text, blocks, wanted] = ["", 0, 1];
    while (text.split("\n").length - 1 < wanted) {
      if ((blocks + 1) * BLOCK > Math.min(stored, RECORDS_BYTES_MAX)) {
        throw this.#damaged("a map of holes is wrong");
      }
      text += (await readAt(this.#file, data + blocks * BLOCK, BLOCK)).toString("latin1");
      blocks += 1;
      const count = numberIn(Buffer.from(text.split("\n", 1)[0] ?? "")) ?? 0;
      if (count > SEGMENTS_MAX) throw this.#damaged("a map of holes is wrong");
      if (text.includes("\n")) wanted = 1 + 2 * count;
    }
    const numbers = text.split("\n").slice(1, wanted).map(Number);
    const segments: Segment[] = [];
    let from = data + blocks * BLOCK;
    let end = 0;
    for (let each = 0; each + 1 < numbers.length; each += 2) {
      const [at = Number.NaN, length = Number.NaN] = numbers.slice(each, each + 2);
      const isRight = at >= end && length >= 0 && at + length <= whole;
      if (!isRight || from + length > data + stored) throw this.#damaged("a map of holes is wrong");
      segments.push({ from, at, length });
      from += length;
      end = at + length;
    }
    return segments;
  }

  async #long(at: number, size: number): Promise<Buffer> {
    if (size > RECORDS_BYTES_MAX) throw this.#damaged("an extended header is too long");
    const data = await readAt(this.#file, at, size);
    if (data.length < size) throw this.#damaged("it is cut short");
    return data;
  }

  *#records(data: Buffer): Generator<[string, Buffer], void, void> {
    for (let at = 0; at < data.length && data[at] !== 0; ) {
      const space = data.indexOf(" ", at);
      const length = space < 0 ? Number.NaN : Number(data.toString("latin1", at, space));
      const [equals, end] = [data.indexOf("=", space), at + length];
      if (!(end > equals && equals > space && end <= data.length)) {
        throw this.#damaged("an extended header is malformed");
      }
      yield [data.toString("utf8", space + 1, equals), data.subarray(equals + 1, end - 1)];
      at = end;
    }
  }

  #number(head: Buffer, at: number, length: number): number {
    const field = head.subarray(at, at + length);
    if (field[0] === 0x80) return Number(BigInt(`0x${field.subarray(1).toString("hex")}`));
    const digits = upToZero(field).toString("latin1").trim() || "0";
    if (!/^[0-7]+$/.test(digits)) throw this.#damaged("a number is malformed");
    return Number.parseInt(digits, 8);
  }
}

/** Return a stream that passes on so many bytes. */
function limited(bytesMax: number, said: string): Transform {
  let left = bytesMax;
  return new Transform({
    transform(piece: Buffer, _, done) {
      left -= piece.length;
      if (left >= 0) done(null, piece);
      else done(new Malformed(`${said} unpacks to more than a context may hold`));
    },
  });
}

function upToZero(field: Buffer): Buffer {
  const end = field.indexOf(0);
  return end < 0 ? field : field.subarray(0, end);
}

function textAt(head: Buffer, at: number, length: number): string {
  return fromBytes(upToZero(head.subarray(at, at + length)));
}

function numberIn(said: Buffer | undefined): number | undefined {
  return said === undefined ? undefined : Number(said.toString("latin1")) || 0;
}

function hasChecksum(head: Buffer): boolean {
  const digits = upToZero(head.subarray(148, 156)).toString("latin1").trim();
  const sum = head.reduce((total, each, at) => total + (at >= 148 && at < 156 ? 32 : each), 0);
  return /^[0-7]+$/.test(digits) && Number.parseInt(digits, 8) === sum;
}
