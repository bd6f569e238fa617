// Uses what differs between runtimes, through the installed package: `node program.mjs URL [TOKEN]`.
import assert from "node:assert/strict";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { Client, CommandError, NotFound } from "@forkd/sdk";
import { Controller } from "@forkd/sdk/compat";

const [url, token] = process.argv.slice(2);
const client = new Client({ url, token });
const sandbox = await client.sandbox("python", { env: { A: "b" } });
try {
  assert.equal((await sandbox.run("env")).stdout, "A=b\n");
  assert.equal((await sandbox.eval("40 + 2")).value, 42);
  await assert.rejects(sandbox.run("exit 3", { check: true }), CommandError);

  await sandbox.files.write("/ü", new Uint8Array([1, 2, 3]));
  assert.deepEqual([...(await sandbox.files.read("/ü"))], [1, 2, 3]);
  await assert.rejects(sandbox.files.read("/none"), NotFound);

  const folder = await mkdtemp(join(tmpdir(), "forkd-"));
  await writeFile(join(folder, "a"), "text");
  assert.equal((await sandbox.files.upload(folder, "/copied")).files, 1);
  assert.equal((await sandbox.files.download("/copied", join(folder, "b"))).bytes, 4);
  assert.equal(await readFile(join(folder, "b/a"), "utf8"), "text");
  await rm(folder, { recursive: true });

  const input = new Uint8Array(3 << 20).map((_, at) => at % 251);
  const told = { bytes: 0 };
  const echoed = await sandbox.exec("cat", {
    stdin: input,
    text: false,
    onStdout: (piece) => {
      told.bytes += piece.length;
    },
  });
  assert.equal(told.bytes, input.length);
  assert.deepEqual(echoed.stdout, input);

  const said = [];
  for await (const { data } of sandbox.execStream(["echo", "hi"])) said.push(...data);
  assert.equal(new TextDecoder().decode(new Uint8Array(said)), "hi\n");

  const sleeping = await sandbox.execStream("sleep", { stdin: true }).start();
  await sleeping.sendSignal(9);
  assert.equal((await sleeping.wait()).signal, 9);

  const signal = AbortSignal.timeout(300);
  await assert.rejects(sandbox.exec("forever", { signal }), { name: "TimeoutError" });
  const attached = AbortSignal.timeout(300);
  const streamed = sandbox.exec("forever", { signal: attached, onStdout: () => {} });
  await assert.rejects(streamed, { name: "TimeoutError" });

  const siblings = await sandbox.branch(2);
  assert.deepEqual(
    (await siblings.eval("1")).map((each) => each.value),
    [1, 1],
  );
  await siblings.kill();

  const controller = new Controller({ baseUrl: url, token });
  assert.equal((await controller.evalCode(sandbox.id, "1 + 1")).result, "2");

  const known = [];
  for await (const each of client.events({ after: 0, follow: false })) known.push(each.event);
  assert.ok(known.includes("sandbox.ready"));
} finally {
  await sandbox.kill();
}
await assert.rejects(sandbox.refresh(), NotFound);
client.close(); // Deno does not end while a connection is kept
process.stdout.write("ok\n");
