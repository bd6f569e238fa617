import { describe, expect, test } from "vitest";
import { Controller, ControllerError, Sandbox } from "../../src/compat.js";
import { daemons } from "./daemons.js";

describe.each(daemons())("over $name", ({ options: { url: baseUrl, token } }) => {
  test("a program written for the reference's package runs", async () => {
    const controller = new Controller({ baseUrl, token });
    const [parent] = await controller.spawnSandboxes({ snapshotTag: "python", liveFork: true });
    const id = parent?.id ?? "";
    expect(parent).toMatchObject({ snapshot_tag: "python" });
    await controller.evalCode(id, "numbers = [1, 2, 4]");
    const tag = `compat-${token === undefined ? "unix" : "tcp"}`;
    const branch = await controller.branchSandbox(id, { tag, mode: "live" });
    expect(branch).toMatchObject({ tag, branched_from: id });
    expect((await controller.listSnapshots()).map((each) => each.tag)).toContain(tag);

    const children = await controller.spawnSandboxes({ snapshotTag: tag, n: 2 });
    const ids = (await controller.listSandboxes()).map((each) => each.id);
    expect(ids).toEqual(expect.arrayContaining(children.map((each) => each.id)));
    expect(await controller.evalCode(id, "sum(numbers)")).toMatchObject({ result: "7" });
    expect(await controller.execCommand(id, ["echo", "hi"], { timeoutSecs: 5 })).toMatchObject({
      stdout: "hi\n",
      exit_code: 0,
    });
    expect(await controller.pingSandbox(id)).toMatchObject({ pid: expect.any(Number) });
    for (const each of [id, ...children.map((child) => child.id)]) {
      await controller.killSandbox(each);
    }
    await controller.deleteSnapshot(tag);
    const gone = controller.getSandbox(id);
    await expect(gone).rejects.toThrow(ControllerError);
    await expect(gone).rejects.toMatchObject({ status: 404, body: { error: expect.any(String) } });
  });

  test("a sandbox is used and ended", async () => {
    const made = await Sandbox.with({ snapshotTag: "python", baseUrl, token }, async (sandbox) => {
      expect((await sandbox.exec(["echo", "a"])).stdout).toBe("a\n");
      expect(await sandbox.eval("1 + 1")).toBe("2");
      await expect(sandbox.eval("nothing")).rejects.toThrow(/eval error: NameError/);
      expect(await sandbox.ping()).toBeTypeOf("object");
      return sandbox;
    });
    await made.kill();
    await expect(made.exec(["echo"])).rejects.toMatchObject({ status: 404 });
  });
});

test("requests can be made by another `fetch`", async () => {
  const tcp = daemons()[1]?.options;
  const asked: unknown[] = [];
  const controller = new Controller({
    baseUrl: `${tcp?.url}/`,
    token: tcp?.token,
    fetch: (input, init) => {
      asked.push(input);
      return fetch(input, init);
    },
  });
  expect((await controller.listSnapshots()).length).toBeGreaterThan(0);
  expect(asked).toEqual([`${tcp?.url}/v1/snapshots`]);
  await expect(controller.getSandbox("sb-none")).rejects.toThrow(ControllerError);
});
