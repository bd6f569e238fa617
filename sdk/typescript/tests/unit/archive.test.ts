import { execFileSync } from "node:child_process";
import * as fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import { type Copied, countSkipped, packed, unpack } from "../../src/archive.js";
import { EngineError, HostError, InvalidRequest, NotFound } from "../../src/index.js";

let folder: string;

beforeEach(() => {
  folder = fs.mkdtempSync(join(tmpdir(), "fk"));
  onTestFinished(() => fs.rmSync(folder, { recursive: true }));
});

function nothing(): Copied {
  return { files: 0, bytes: 0, skipped: [] };
}

async function* pieces(data: Uint8Array, size = 1000) {
  for (let at = 0; at < data.length; at += size) yield data.subarray(at, at + size);
}

async function archiveOf(source: string, target = "/there", isExact = false): Promise<Buffer> {
  const [, made] = await packed(source, target, nothing(), isExact);
  const found: Uint8Array[] = [];
  for await (const each of made) found.push(each);
  return Buffer.concat(found);
}

/** Return an archive of members by hand: names, kinds and contents. */
function archive(...members: [name: string, kind: string, data?: string, target?: string][]) {
  const found: Buffer[] = [];
  for (const [name, kind, data = "", target = ""] of members) {
    const head = Buffer.alloc(512);
    head.write(name);
    head.write("0000755\0", 100);
    head.write("0000000\u00000000000\0", 108);
    head.write(`${data.length.toString(8).padStart(11, "0")}\u000000000000000\0        `, 124);
    head.write(kind, 156);
    head.write(target, 157);
    const sum = head.reduce((total, each) => total + each, 0);
    head.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
    found.push(head, Buffer.from(data), Buffer.alloc((512 - (data.length % 512)) % 512));
  }
  return Buffer.concat([...found, Buffer.alloc(1024)]);
}

function recorded(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`;
  return `${rest.length + 2}${rest}`;
}

test("a folder is the same after it was packed and unpacked", async () => {
  const source = join(folder, "source");
  const long = "l".repeat(150);
  fs.mkdirSync(join(source, "inner", long), { recursive: true });
  fs.writeFileSync(join(source, "inner", long, "ü"), "deep");
  fs.writeFileSync(Buffer.concat([Buffer.from(`${source}/`), Buffer.from([0x61, 0xff])]), "byte");
  fs.writeFileSync(join(source, "large"), new Uint8Array(700_001).fill(7));
  fs.writeFileSync(join(source, "program"), "#!/bin/sh\n", { mode: 0o755 });
  fs.writeFileSync(join(source, "empty"), "");
  fs.symlinkSync(`../${long}/${long}`, join(source, "link"));
  fs.utimesSync(join(source, "empty"), 1e9, 1e9);
  execFileSync("mkfifo", [join(source, "pipe")]);

  const sent = nothing();
  const [there, made] = await packed(source, "/there", sent, false);
  expect(there).toBe("/there");
  const data: Uint8Array[] = [];
  for await (const each of made) data.push(each);
  expect(sent.files).toBe(6);
  expect(sent.bytes).toBe(700_001 + 4 + 4 + 10);
  expect(sent.skipped).toEqual([`${join(source, "pipe")}: a device, a pipe or a socket`]);
  const listed = execFileSync("tar", ["-tf", "-"], { input: Buffer.concat(data) }).toString();
  expect(listed.split("\n")).toContain(`inner/${long}`);

  const target = join(folder, "target");
  const got = nothing();
  await unpack(pieces(Buffer.concat(data)), target, got, false);
  expect(got).toEqual({ ...sent, skipped: [] });
  expect(fs.readFileSync(join(target, "inner", long, "ü"), "utf8")).toBe("deep");
  const names = fs.readdirSync(target, { encoding: "buffer" }).map((each) => each.toString("hex"));
  expect(names).toContain("61ff");
  expect(fs.readFileSync(join(target, "large")).every((each) => each === 7)).toBe(true);
  expect(fs.statSync(join(target, "program")).mode & 0o777).toBe(0o755);
  expect(fs.statSync(join(target, "empty")).mtimeMs).toBe(1e12);
  expect(fs.readlinkSync(join(target, "link"))).toBe(`../${long}/${long}`);
});

test("one file is copied under the name of its target", async () => {
  fs.writeFileSync(join(folder, "a"), "text");
  const [there, made] = await packed(join(folder, "a"), "/some/b", nothing(), false);
  expect(there).toBe("/some");
  await unpack(made, join(folder, "c"), nothing(), false);
  expect(fs.readFileSync(join(folder, "c"), "utf8")).toBe("text");
  await expect(packed(join(folder, "a"), "/b/", nothing(), false)).rejects.toThrow(InvalidRequest);
  const missing = packed(join(folder, "none"), "/b", nothing(), false);
  await expect(missing).rejects.toThrow(NotFound);
  await expect(missing).rejects.toThrow("no such file or folder");
  await expect(packed("/dev/null", "/b", nothing(), false)).rejects.toThrow(InvalidRequest);
});

test("nothing is written outside of the folder", async () => {
  const outside = join(folder, "outside");
  fs.mkdirSync(outside);
  const target = join(folder, "target");
  const copied = nothing();
  const hostile = archive(
    ["./", "5"],
    ["../outside/a", "0", "bad"],
    ["to-outside", "2", "", outside],
    ["to-outside/b", "0", "bad"],
    ["to-outside/c/d", "5"],
    ["device", "3"],
    ["/absolute", "0", "kept"],
    ["to-outside", "0", "a file in the place of the link"],
  );
  await unpack(pieces(hostile), target, copied, false);
  expect(fs.readdirSync(outside)).toEqual([]);
  expect(fs.readFileSync(join(target, "absolute"), "utf8")).toBe("kept");
  expect(fs.lstatSync(join(target, "to-outside")).isFile()).toBe(true);
  expect(copied.skipped).toEqual([
    "../outside/a: leads out of the folder",
    "to-outside/b: Not a directory",
    "to-outside/c/d: Not a directory",
    "device: neither file, folder nor link",
  ]);
});

test("files with holes are made, and what the sandbox left out is told", async () => {
  const chart = "1\n1048576\n3\n".padEnd(512, "\0");
  const records = [
    recorded("GNU.sparse.name", "holes"),
    recorded("GNU.sparse.realsize", "2097152"),
    recorded("FORKD.skipped", '{"skipped":[{"path":"a","reason":"b"}],"more_skipped":2}'),
  ];
  const copied = nothing();
  const sent = archive(["./", "5"], ["x", "x", records.join("")], ["y", "0", `${chart}end`]);
  await unpack(pieces(sent), join(folder, "t"), copied, false);
  const found = fs.readFileSync(join(folder, "t/holes"));
  expect([found.length, found.toString("utf8", 1 << 20, (1 << 20) + 3)]).toEqual([2 << 20, "end"]);
  expect(copied).toEqual({ files: 1, bytes: 3, skipped: ["a: b", "2 more"] });
});

test("what is no archive of an agent's is refused", async () => {
  const good = archive(["./", "5"], ["a", "0", "text"]);
  const wrong = Buffer.from(good);
  wrong[0] = 1;
  const long = "9".repeat(70_000);
  for (const [sent, said] of [
    [good.subarray(0, 600), "ended in the middle"],
    [Buffer.alloc(1024), "an empty archive"],
    [wrong, "a checksum is wrong"],
    [archive(["x", "x", "5 no record"], ["a", "0"]), "a record is malformed"],
    [archive(["x", "x", long]), "an extended header is too long"],
    [archive(["x", "x", recorded("uid", "4294967295")], ["a", "0"]), "a number is malformed"],
    [archive(["x", "x", recorded("GNU.sparse.realsize", "1")], ["a", "0", "1"]), "map of holes"],
  ] as const) {
    const made = unpack(pieces(sent), join(folder, "t"), nothing(), false);
    await expect(made, said).rejects.toThrow(EngineError);
    await expect(made).rejects.toThrow(said);
  }
  fs.writeFileSync(join(folder, "file"), "");
  const under = unpack(pieces(good), join(folder, "file/t"), nothing(), false);
  await expect(under).rejects.toThrow(HostError);
});

test("what a sandbox left out is taken from the count", () => {
  const copied = { files: 5, bytes: 9, skipped: [] };
  const skipped = [{ path: "a\n", reason: "full" }];
  countSkipped(copied, { entries: 1, bytes: 1, skipped, moreSkipped: 2 });
  expect(copied).toEqual({ files: 2, bytes: 9, skipped: ["a\\u{a}: full", "2 more"] });
});

test("owners and the bits that change the user are kept if that is asked for", async () => {
  fs.mkdirSync(join(folder, "s"));
  fs.writeFileSync(join(folder, "s/a"), "");
  fs.chmodSync(join(folder, "s/a"), 0o4755);
  for (const [isExact, mode] of [
    [false, 0o755],
    [true, 0o4755],
  ] as const) {
    const target = join(folder, String(isExact));
    await unpack(
      pieces(await archiveOf(join(folder, "s"), "/t", true)),
      target,
      nothing(),
      isExact,
    );
    expect(fs.statSync(join(target, "a")).mode & 0o7777).toBe(mode);
  }
});
