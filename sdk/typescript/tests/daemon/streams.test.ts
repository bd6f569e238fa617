import { describe, expect, test } from "vitest";
import { Client, Conflict, InvalidRequest, NotFound, type Output } from "../../src/index.js";
import { daemons } from "./daemons.js";

const decoder = new TextDecoder();

describe.each(daemons())("over $name", ({ options }) => {
  const client = new Client(options);

  test("output comes as it is written, in order, and whole", async () => {
    await using sandbox = await client.sandbox("python");
    let [told, lines] = ["", 0];
    const result = await sandbox.exec(["lines", "60000"], {
      onStdout: async (piece) => {
        await Promise.resolve();
        told += piece;
        lines += piece.split("\n").length - 1;
      },
    });
    expect([lines, told.length]).toEqual([60_000, 60_000 * 16]);
    expect(told.endsWith("000000000059999\n")).toBe(true);
    expect(told).toBe(result.stdout);
    expect(result.truncated).toBe(false);
  });

  test("what does not fit is cut, and a callback is told all of it", async () => {
    await using sandbox = await client.sandbox("python");
    const sent = Uint8Array.from({ length: 9 * 1024 * 1024 }, (_, index) => index % 251);
    let told = 0;
    const echoed = await sandbox.exec("cat", {
      stdin: sent,
      text: false,
      onStdout: (piece) => {
        told += piece.length;
      },
    });
    expect([told, echoed.truncated, echoed.stdout.length]).toEqual([sent.length, true, 8 << 20]);
    expect(Buffer.compare(echoed.stdout, sent.subarray(0, 8 << 20))).toBe(0);
  });

  test("a program is an iterator of its output, and can be written to", async () => {
    await using sandbox = await client.sandbox("python");
    const found: Output[] = [];
    for await (const output of sandbox.execStream(["echo", "a"])) found.push(output);
    expect(found.map((each) => [each.stream, decoder.decode(each.data)])).toEqual([
      ["stdout", "a\n"],
    ]);

    await using echo = sandbox.execStream("cat", { stdin: true });
    await echo.write("ü\n");
    await echo.closeStdin();
    const said = [];
    for await (const { data } of echo) said.push(decoder.decode(data));
    expect([said.join(""), echo.exit?.exitCode, echo.pid]).toEqual(["ü\n", 0, 7]);
  });

  test("a program ends by a signal, and by leaving its loop", async () => {
    await using sandbox = await client.sandbox("python");
    await using sleeping = await sandbox.execStream("sleep", { stdin: true }).start();
    await sleeping.sendSignal(15);
    expect(await sleeping.wait()).toMatchObject({ exitCode: null, signal: 15 });

    for await (const output of sandbox.execStream("spew")) {
      expect(output.data.length).toBeGreaterThan(0);
      break;
    }
    await expect.poll(() => sandbox.console()).toMatch(/spew ended/);
  });

  test("an aborted program is killed, and its promise rejected with the reason", async () => {
    await using sandbox = await client.sandbox("python");
    const signal = AbortSignal.timeout(300);
    const asked = await sandbox.exec("forever", { signal }).catch((error) => error);
    expect([asked, asked.name]).toEqual([signal.reason, "TimeoutError"]);
    const streamed = AbortSignal.timeout(300);
    const options = { signal: streamed, text: false } as const;
    const attached = await sandbox.exec("forever", options).catch((error) => error);
    expect([attached, attached.name]).toEqual([streamed.reason, "TimeoutError"]);
    const ends = async () => (await sandbox.console()).split("forever ended").length - 1;
    await expect.poll(ends).toBe(2);
  });

  test("a program that does not exist is an error of its iterator", async () => {
    await using sandbox = await client.sandbox("python");
    await expect(sandbox.execStream("missing").wait()).rejects.toThrow(NotFound);
    const gone = await client.sandbox("python");
    await gone.kill();
    await expect(gone.execStream("cat").wait()).rejects.toThrow(NotFound);
  });

  test("events tell what happened, in order", async () => {
    const controller = new AbortController();
    const { signal } = controller;
    const events = client.events({ signal });
    const first = events.next();
    const sandbox = await client.sandbox("python");
    await sandbox.kill();
    const found = [];
    for (let next = await first; !next.done; next = await events.next()) {
      if (next.value.subject === sandbox.id) found.push(next.value.event);
      if (found.includes("sandbox.deleted")) break;
    }
    controller.abort();
    await expect(events.next()).rejects.toBe(signal.reason);
    expect(found[0]).toBe("sandbox.ready");
    const known = [];
    for await (const each of client.events({ after: 0, follow: false })) known.push(each.id);
    expect(known).toEqual(known.toSorted((a, b) => a - b));
    expect(known.length).toBeGreaterThanOrEqual(2);
  });

  test("a snapshot is written of a running sandbox, forked and removed", async () => {
    await using sandbox = await client.sandbox("python");
    const tag = options.token === undefined ? "over-unix" : "over-tcp";
    expect(await sandbox.snapshot(tag)).toMatchObject({ tag, status: "ready" });
    expect((await client.snapshots.list()).map((each) => each.tag)).toContain(tag);
    const steps: string[] = [];
    await expect(
      client.snapshots.create(tag, {
        recipe: "none",
        onProgress: (each) => steps.push(each.stage),
      }),
    ).rejects.toThrow();
    {
      await using fork = await client.sandbox(tag);
      await expect(client.snapshots.delete(tag)).rejects.toThrow(Conflict);
      expect(fork.tag).toBe(tag);
    }
    expect((await client.snapshots.info(tag)).ancestors).toEqual(["python"]);
    await client.snapshots.delete(tag);
    await expect(client.snapshots.info(tag)).rejects.toThrow(NotFound);
  });

  test("a sandbox is paused, resumed, reset and takes its parent's place", async () => {
    await using sandbox = await client.sandbox("python", { labels: { a: "b" } });
    await sandbox.eval("x = 1");
    expect((await sandbox.pause()).paused).toBe(true);
    expect(await sandbox.isRunning()).toBe(false);
    expect((await sandbox.resume()).paused).toBe(false);
    expect(await sandbox.isRunning()).toBe(true);

    const [better] = await sandbox.branch();
    await better?.eval("x = 2");
    const tree = await client.tree(sandbox.id);
    expect(tree.roots[0]?.children.map((each) => each.id)).toEqual([better?.id]);
    expect((await better?.promote())?.length).toBe(1);
    expect(better?.id).toBe(sandbox.id);
    expect((await better?.eval("x"))?.value).toBe(2);
    expect(await sandbox.reset()).toBeGreaterThan(0);

    const renamed = await sandbox.rename("named");
    expect([renamed.name, (await client.sandboxes.list({ name: "named" })).length]).toEqual([
      "named",
      1,
    ]);
    expect((await sandbox.setLabels({ c: "d" })).labels).toEqual({ c: "d" });
    const changed = await sandbox.changeLabels({ c: null, e: "f" });
    expect(changed.labels).toEqual({ e: "f" });
    expect((await sandbox.eval("1", { runtime: "python" })).value).toBe(1);
    await expect(sandbox.eval("1", { runtime: "other" })).rejects.toThrow(Conflict);
    expect((await sandbox.setTtl(null)).expiresAtUnix).toBe(null);
    expect((await sandbox.setTtl(50)).expiresAtUnix).toBeGreaterThan(0);
    await expect(sandbox.setTtl(-1)).rejects.toMatchObject({ context: { field: "ttlS" } });
    await expect(sandbox.setTtl(-1)).rejects.toThrow(InvalidRequest);
    await expect(sandbox.network.status()).rejects.toThrow(Conflict);
  });
});
