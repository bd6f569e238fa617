import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, expect, onTestFinished, test } from "vitest";
import {
  Client,
  CommandError,
  Conflict,
  ExecTimeout,
  NotFound,
  type OutputMessage,
  type Result,
  Sandbox,
} from "../../src/index.js";
import { daemons } from "./daemons.js";

describe.each(daemons())("over $name", ({ options }) => {
  const client = () => new Client(options);

  test("a sandbox runs programs and code, and is gone after its block", async () => {
    let id: string;
    {
      await using sandbox = await Sandbox.create("python", { client: client(), env: { A: "b" } });
      id = sandbox.id;
      expect((await sandbox.run("env")).stdout).toBe("A=b\n");
      const done = await sandbox.exec(["echo", "hello", "you"]);
      expect([done.stdout, done.exitCode, done.ok]).toEqual(["hello you\n", 0, true]);
      const result = await sandbox.eval("print('hi'); x = 41; x + 1");
      expect([result.value, result.text, result.logs.stdout]).toEqual([42, "42", ["hi\n"]]);
      expect((await sandbox.eval("x")).value).toBe(41);
    }
    await expect(Sandbox.connect(id, { client: client() })).rejects.toThrow(NotFound);
  });

  test("evaluated code tells what it writes, and has variables of its own", async () => {
    await using sandbox = await client().sandbox("python");
    const code = "import os, sys; print('out'); print('err', file=sys.stderr); os.environ['A']";
    const said: OutputMessage[] = [];
    const seen: unknown[] = [];
    const take = {
      onStdout: async (message: OutputMessage) => void said.push(message),
      onStderr: (message: OutputMessage) => said.push(message),
      onResult: (result: Result) => seen.push(result),
      onError: (error: { name: string }) => seen.push(error.name),
    };
    const execution = await sandbox.runCode(code, { envs: { A: "b" }, ...take });
    expect(said.map(({ line, error }) => [line, error])).toEqual([
      ["out\n", false],
      ["err\n", true],
    ]);
    expect([String(said[0]), Number(said[0]?.timestamp) > 1.7e18]).toEqual(["out\n", true]);
    expect([execution.stdout, execution.stderr, execution.text]).toEqual(["out\n", "err\n", "'b'"]);
    expect(seen).toEqual(execution.results);
    await sandbox.runCode(code, take);
    expect(seen.at(-1)).toBe("KeyError");
    const pieces: string[] = [];
    await sandbox.eval(code, { env: { A: "b" }, onStdout: (piece) => pieces.push(piece) });
    expect(pieces).toEqual(["out\n"]);
    const refused = sandbox.eval("1", { runtime: "node", onStdout: () => {} });
    await expect(refused).rejects.toThrow(Conflict);
    const failing = () => {
      throw new RangeError("from the callback");
    };
    await expect(sandbox.eval(code, { onStdout: failing })).rejects.toThrow(RangeError);
  });

  test("what goes wrong in a guest is an error of its own class", async () => {
    await using sandbox = await client().sandbox("python");
    expect((await sandbox.run("exit 3")).exitCode).toBe(3);
    const failed = sandbox.run("exit 3", { check: true });
    await expect(failed).rejects.toThrow(CommandError);
    await expect(failed).rejects.toMatchObject({ code: "command", result: { exitCode: 3 } });
    await expect(sandbox.exec("missing")).rejects.toThrow(NotFound);
    await expect(sandbox.exec("late", { timeoutS: 5 })).rejects.toThrow(ExecTimeout);
    expect((await sandbox.exec("late", { timeoutS: 5, check: false })).signal).toBe(9);
    expect((await sandbox.eval("nothing")).error?.type).toBe("NameError");
    await expect(sandbox.eval("nothing", { check: true })).rejects.toThrow(/NameError/);
  });

  test("files are written, listed, moved and removed", async () => {
    await using sandbox = await client().sandbox("python");
    const { files } = sandbox;
    const all = Uint8Array.from({ length: 256 }, (_, index) => index);
    expect(await files.write("/a folder/ü", "text", { makeParents: true })).toBe(4);
    expect(await files.readText("/a folder/ü")).toBe("text");
    await files.rename("/a folder/ü", "/kept");
    expect((await files.list("/")).map((each) => each.name)).toContain("kept");
    expect(await files.getInfo("/kept")).toMatchObject({ sizeBytes: 4, path: "/kept" });
    await files.remove("/kept");
    expect(await files.exists("/kept")).toBe(false);
    await files.makeDir("/a folder/b", { parents: true });
    expect((await files.stat("/a folder/b")).kind).toBe("directory");
    async function* pieces() {
      for (let n = 0; n < 64; n += 1) yield all;
    }
    expect(await files.write("/big", pieces())).toBe(64 * 256);
    expect(await files.read("/big")).toEqual(new Uint8Array(64 * 256).map((_, at) => at % 256));
    await expect(files.read("/none")).rejects.toThrow(NotFound);
  });

  test("folders are copied into a sandbox and back", async () => {
    const folder = mkdtempSync(join(tmpdir(), "fk"));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    mkdirSync(join(folder, "a/b"), { recursive: true });
    writeFileSync(join(folder, "a/b/c"), "text");
    writeFileSync(join(folder, "a/large"), new Uint8Array(700_000).fill(7));
    await using sandbox = await client().sandbox("python");
    const { files } = sandbox;
    const sent = { files: 2, bytes: 700_004, skipped: [] };
    expect(await files.upload(join(folder, "a"), "/there")).toEqual(sent);
    expect(await files.readText("/there/b/c")).toBe("text");
    expect(await files.download("/there", join(folder, "back"))).toEqual(sent);
    expect(readFileSync(join(folder, "back/b/c"), "utf8")).toBe("text");
    expect(readFileSync(join(folder, "back/large")).length).toBe(700_000);
    await files.upload(join(folder, "a/b/c"), "/one");
    expect(await files.readText("/one")).toBe("text");
    await expect(files.download("/none", join(folder, "x"))).rejects.toThrow(NotFound);
    await expect(files.upload(join(folder, "none"), "/x")).rejects.toThrow(NotFound);
  });

  test("siblings go on from one instant, and all are killed at the end", async () => {
    await using source = await client().sandbox("python", { labels: { for_me: "a_b" } });
    expect(source.labels).toEqual({ for_me: "a_b" });
    await source.eval("x = 7", { check: true });
    let ids: string[];
    {
      await using siblings = await source.branch(2);
      ids = [...siblings].map((each) => each.id);
      await siblings[0]?.eval("x = 8");
      expect((await siblings.eval("x")).map((each) => each.value)).toEqual([8, 7]);
    }
    const left = (await client().sandboxes.list()).map((each) => each.id);
    expect(left.filter((each) => ids.includes(each))).toEqual([]);
  });

  test("a name that is taken is a conflict, and a tag that does not exist is named", async () => {
    await using first = await client().sandbox("python", { name: "one" });
    expect((await Sandbox.connect("one", { client: client() })).id).toBe(first.id);
    await expect(client().sandbox("python", { name: "one" })).rejects.toThrow(Conflict);
    const missing = client().sandbox("nothing");
    await expect(missing).rejects.toThrow(NotFound);
    await expect(missing).rejects.toMatchObject({ context: { tag: "nothing" } });
  });
});
