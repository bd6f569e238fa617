import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, onTestFinished, test } from "vitest";
import { Image, InvalidRequest } from "../../src/index.js";
import { say, serve } from "./server.js";

const MISSING = { error: "no such recipe", code: "not_found", context: {} };
const SNAPSHOT = {
  event: "snapshot",
  snapshot: {
    tag: "t",
    status: "ready",
    memory_mib: 1,
    created_at_unix: 0,
    vcpus: 1,
    disk_mib: 1,
    size_bytes: 1,
    parent: null,
  },
};

test("a step changes no image that was there before", () => {
  const base = Image.debian();
  const before = String(base);
  base.aptInstall("git").env({ A: "b" }).runCommands("true").pipInstall("six").warmUp("1");
  expect(String(base)).toBe(before);
});

test("what is no text is refused by its step", () => {
  const given = 7 as unknown as string;
  for (const step of ["aptInstall", "pipInstall", "runCommands"] as const) {
    expect(() => Image.debian()[step]("a", ["b", given])).toThrow(
      `${step} takes texts, and 7 is none`,
    );
  }
  expect(() => Image.debian().env({ A: given })).toThrow(InvalidRequest);
  expect(() => Image.fromRegistry("a").aptInstall("git")).toThrow(/packages of a are installed/);
});

test("an image is uploaded once, and named in the request", async () => {
  const folder = mkdtempSync(join(tmpdir(), "fk"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  writeFileSync(join(folder, "big"), new Uint8Array(9_000_000));
  const image = Image.debian().addLocalFile(join(folder, "big"), "/big");
  let known: string | undefined;
  const { client, seen } = await serve(({ method, path }, response) => {
    if (path === "/v2/snapshots:image") {
      response.writeHead(200, { "content-type": "application/x-ndjson" });
      response.end(`${JSON.stringify(SNAPSHOT)}\n`);
    } else if (method === "POST") {
      known = seen[0]?.path.replace("/v2/recipes/", "");
      say(response, { recipe: decodeURIComponent(known ?? ""), name: "image", bytes: 1 }, 201);
    } else if (known === undefined) say(response, MISSING, 404);
    else say(response, { recipe: decodeURIComponent(known), name: "image", bytes: 1 });
  });
  const steps: (string | null | undefined)[] = [];
  const onProgress = (step: { message?: string | null }) => steps.push(step.message);

  await client.snapshots.forImage(image, { onProgress });
  await client.snapshots.forImage(image, { onProgress });

  expect(seen.map(({ method, path }) => [method, path.slice(0, 18)])).toEqual([
    ["GET", "/v2/recipes/sha256"],
    ["POST", "/v2/recipes"],
    ["POST", "/v2/snapshots:imag"],
    ["GET", "/v2/recipes/sha256"],
    ["POST", "/v2/snapshots:imag"],
  ]);
  expect(seen[1]?.headers["content-type"]).toBe("application/x-tar");
  expect(JSON.parse(seen[2]?.body ?? "").image).toMatch(/^sha256:[0-9a-f]{64}$/);
  expect(steps).toEqual(["uploading image, 8 MiB"]);
});

test("a file that became shorter, or is gone, is one error", async () => {
  const folder = mkdtempSync(join(tmpdir(), "fk"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const file = join(folder, "a");
  writeFileSync(file, "12345");
  const image = Image.debian().addLocalFile(file, "/a");
  const archive = await image.archive();
  const read = async () => {
    for await (const _ of archive);
  };
  writeFileSync(file, "123");
  await expect(read()).rejects.toThrow(/became shorter/);
  rmSync(file);
  await expect(read()).rejects.toThrow(/cannot read .*: no such file/);
  await expect(image.archive()).rejects.toThrow(InvalidRequest);
});
