import { createServer } from "node:net";
import { expect, onTestFinished, test } from "vitest";
import {
  CapacityError,
  Client,
  ClientClosed,
  Denied,
  ForkdError,
  InvalidRequest,
  NotFound,
  RequestError,
  Sandbox,
  TransportError,
} from "../../src/index.js";
import { SANDBOX, say, serve } from "./server.js";

const FULL = { error: "full", code: "capacity", context: { retry_after_s: 0 } };

test("a host that is full is asked again when it says so, with the same key", async () => {
  const { client, seen } = await serve((_, response, number) => {
    if (number < 3) say(response, FULL, 503);
    else say(response, [SANDBOX], 201);
  });

  expect((await client.fork("python")).length).toBe(1);
  expect(seen.map((each) => each.headers["idempotency-key"])).toEqual(
    Array(3).fill(expect.stringMatching(/^[0-9a-f]{32}$/)),
  );
  expect(new Set(seen.map((each) => each.headers["idempotency-key"])).size).toBe(1);
});

test("a host that is full and does not say until when is not asked again", async () => {
  const { client, seen } = await serve((_, response) => {
    say(response, { error: "full", code: "capacity", context: {} }, 503);
  });

  await expect(client.fork("python")).rejects.toThrow(CapacityError);
  expect(seen.length).toBe(1);
});

test("nothing is tried more often than the client says", async () => {
  const { client, seen } = await serve((_, response) => say(response, FULL, 503), {
    retriesMax: 1,
  });

  await expect(client.fork("python")).rejects.toThrow(CapacityError);
  expect(seen.length).toBe(2);
});

test("an answer that is lost is asked for again, unless that would do something twice", async () => {
  const { client, seen } = await serve((one, response, number) => {
    if (one.path.endsWith("/eval") || number % 2 === 1) response.destroy();
    else say(response, one.method === "GET" ? SANDBOX : [SANDBOX]);
  });

  const sandbox = await client.sandboxes.get("sb-1");
  await client.fork("python");
  expect(seen.map((each) => each.method)).toEqual(["GET", "GET", "POST", "POST"]);
  await expect(sandbox.eval("x = 1")).rejects.toThrow(TransportError);
  expect(seen.length).toBe(5);
});

test("a deletion whose answer was lost has been done, if the second finds nothing", async () => {
  const { client, seen } = await serve((one, response, number) => {
    if (one.method === "GET") say(response, SANDBOX);
    else if (number === 2) response.destroy();
    else say(response, { error: "gone", code: "not_found", context: { sandbox: "sb-1" } }, 404);
  });

  const sandbox = await client.sandboxes.get("sb-1");
  expect(await sandbox.kill()).toBe(true);
  expect(await sandbox.kill()).toBe(false);
  expect(seen.length).toBe(4);
});

test("a daemon that is not there is tried three times, and the error says how to start it", async () => {
  const client = new Client({ url: "unix:///nowhere/forkd.sock" });

  const asked = client.version();
  await expect(asked).rejects.toThrow(/no daemon answers at unix.*ENOENT.*`forkd up` starts one/);
  await expect(asked).rejects.toMatchObject({ code: "transport", retryable: true });
});

test("an answer that is cut short is an error, not half an answer", async () => {
  const { client } = await serve(
    (_, response) => {
      response.writeHead(200, { "content-length": "100" });
      response.write('{"version": ');
      setImmediate(() => response.destroy());
    },
    { retriesMax: 0 },
  );

  await expect(client.version()).rejects.toThrow(
    /ended the connection before its answer was whole/,
  );
});

test.each([
  ["<html>", /makes no sense to us/],
  ["{}", /Version lacks version/],
  ["[]", /Version lacks everything/],
])("an answer that is not the daemon's is refused: %s", async (text, message) => {
  const { client } = await serve((_, response) => response.end(text));

  await expect(client.version()).rejects.toThrow(message);
  await expect(client.version()).rejects.toThrow(TransportError);
});

test("an error becomes the class of its code, with the names that options have here", async () => {
  const { client } = await serve((_, response) => {
    const body = { error: "ttl_secs: too long", code: "invalid_request", field: "ttl_secs" };
    say(response, { ...body, context: {} }, 400);
  });

  const error = await client.fork("python", 1, { ttlS: 1e12 }).catch((each) => each);
  expect(error).toBeInstanceOf(InvalidRequest);
  expect(error).toBeInstanceOf(RequestError);
  expect(error).toMatchObject({
    name: "InvalidRequest",
    message: "ttlS: too long",
    context: { field: "ttlS" },
  });
});

test.each([
  [401, Denied],
  [418, RequestError],
  [502, ForkdError],
])("an answer %i that is not the daemon's is an error with its text", async (status, kind) => {
  const { client } = await serve((_, response) => {
    response.writeHead(status).end("proxy says no");
  });

  const error = await client.version().catch((each) => each);
  expect(error.constructor).toBe(kind);
  expect(error.message).toBe(`HTTP ${status}: proxy says no`);
});

test("a code that this SDK does not know is kept", async () => {
  const { client } = await serve((_, response) => {
    say(response, { error: "new", code: "brand_new", context: {} }, 400);
  });

  await expect(client.version()).rejects.toMatchObject({ name: "ForkdError", code: "brand_new" });
});

test("what the caller names keeps its names; everything else is camelCase", async () => {
  const { client, seen } = await serve((one, response) => {
    if (one.path.endsWith("/eval")) {
      const nothing = { result: null, stdout: "", stderr: "", has_value: true, exit_code: 0 };
      say(response, { ...nothing, value: { a_b: 1 }, value_is_json: true });
    } else say(response, one.method === "GET" ? SANDBOX : [SANDBOX]);
  });

  const [made] = await client.fork("python", 1, {
    labels: { a_b: "c_d" },
    env: { A_B: "\udc80" },
    ioLimitMibS: 1,
    ttlS: null,
  });
  expect(made?.info).toMatchObject({ snapshotTag: "python", labels: { snake_case: "kept_as_is" } });
  expect((await made?.eval("x"))?.value).toEqual({ a_b: 1 });
  expect(JSON.parse(seen[0]?.body ?? "")).toEqual({
    snapshot_tag: "python",
    n: 1,
    all_or_nothing: true,
    labels: { a_b: "c_d" },
    env: { A_B: { b64: "gA==" } },
    io_limit_mib_s: 1,
  });
});

test("one sandbox has the daemon's default time to live, unless the caller says otherwise", async () => {
  const { client, seen } = await serve((_, response) => say(response, [SANDBOX]));

  await Sandbox.create({ client });
  await Sandbox.create("python", { client, ttlS: null });
  await Sandbox.create({ client, template: "python", timeoutMs: 1500, metadata: { a: "b" } });
  expect(seen.map((each) => JSON.parse(each.body))).toMatchObject([
    { snapshot_tag: "pyagent", ttl_secs: "default" },
    { snapshot_tag: "python" },
    { snapshot_tag: "python", ttl_secs: 1.5, labels: { a: "b" } },
  ]);
  expect(JSON.parse(seen[1]?.body ?? "")).not.toHaveProperty("ttl_secs");
});

test.each([
  [{ ttl_s: 5 }, /fork\(\) has no option 'ttl_s'; did you mean ttlS\?/],
  [{ memory: 5 }, /fork\(\) has no option 'memory'; did you mean memoryLimitMib\?/],
  [{ zzz: 5 }, /fork\(\) has no option 'zzz'; its options are memoryLimitMib, /],
  [[], /fork\(\) takes its options as an object/],
  [{ deadlineS: Number.POSITIVE_INFINITY }, /deadlineS: must be a finite number, not Infinity/],
])("an option that a call does not have is named: %j", async (options, message) => {
  const { client, seen } = await serve((_, response) => say(response, [SANDBOX]));

  await expect(client.fork("python", 1, options as object)).rejects.toThrow(message);
  await expect(client.fork("python", 1, options as object)).rejects.toThrow(InvalidRequest);
  expect(seen).toEqual([]);
});

test("an aborted call ends with the signal's reason, and its connection with it", async () => {
  const controller = new AbortController();
  let closed: Promise<unknown> = Promise.resolve();
  const { client } = await serve((_, response) => {
    closed = new Promise((resolve) => response.on("close", resolve));
    controller.abort(new Error("enough"));
  });

  await expect(client.version({ signal: controller.signal })).rejects.toThrow("enough");
  await closed;
  await expect(client.version({ signal: controller.signal })).rejects.toThrow("enough");
});

test("an aborted call does not wait for its next attempt", async () => {
  const controller = new AbortController();
  const { client } = await serve((_, response) => {
    say(response, { ...FULL, context: { retry_after_s: 15 } }, 503);
    setImmediate(() => controller.abort());
  });

  const asked = client.fork("python", 1, { signal: controller.signal });
  await expect(asked).rejects.toMatchObject({ name: "AbortError" });
});

test("a client that was closed sends nothing", async () => {
  const { client, seen } = await serve((_, response) => say(response, { version: "1" }));

  client.close();
  await expect(client.version()).rejects.toThrow(ClientClosed);
  expect(seen).toEqual([]);
});

test("the token goes along, and is in no error", async () => {
  const { client, seen } = await serve((_, response) => say(response, { version: "1" }), {
    token: "very-secret",
  });

  await client.version();
  expect(seen[0]?.headers.authorization).toBe("Bearer very-secret");
  expect(JSON.stringify(client.endpoint)).not.toContain("very-secret");
});

test("a server that speaks no HTTP is named", async () => {
  const server = createServer((socket) => socket.end("SSH-2.0\r\n"));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  onTestFinished(() => void server.close());
  const { port } = server.address() as { port: number };

  const client = new Client({ url: `http://127.0.0.1:${port}`, retriesMax: 0 });
  await expect(client.version()).rejects.toThrow(TransportError);
});

test("steps of a bake are told once, although its connection broke", async () => {
  const step = (stage: string) =>
    `${JSON.stringify({ event: "progress", stage, message: "", fraction: null })}\n`;
  const snapshot = { event: "snapshot", snapshot: { tag: "new", memory_mib: 512 } };
  const { client, seen } = await serve((_, response, number) => {
    response.write(step("boot"));
    if (number === 1) setImmediate(() => response.destroy());
    else response.end(`${step("warm")}${JSON.stringify(snapshot)}\n`);
  });

  const told: string[] = [];
  const made = await client.snapshots.create("new", {
    recipe: "python",
    onProgress: (each) => told.push(each.stage),
  });
  expect([made.tag, made.memoryMib, told]).toEqual(["new", 512, ["boot", "warm"]]);
  expect(seen.length).toBe(2);
  expect(seen[0]?.headers["idempotency-key"]).toBe(seen[1]?.headers["idempotency-key"]);
});

test("a bake that fails midway throws the daemon's error", async () => {
  const failure = { event: "error", error: "it raised", code: "warm_up", context: { recipe: "a" } };
  const { client } = await serve((_, response) => response.end(`${JSON.stringify(failure)}\n`));

  const asked = client.snapshots.create("new", { recipe: "a" });
  await expect(asked).rejects.toMatchObject({ name: "WarmUpError", context: { recipe: "a" } });
});

test("events go on after a connection that broke, from where it was", async () => {
  const event = (id: number) => {
    const data = { id, event: "sandbox.ready", at_unix: 1, subject: "sb", tenant: null };
    const rest = { principal: null, request_id: null, detail: { by_ms: 1 } };
    return `id: ${id}\nevent: sandbox.ready\ndata: ${JSON.stringify({ ...data, ...rest })}\n\n`;
  };
  const { client, seen } = await serve((_, response, number) => {
    response.write(number === 1 ? `id: 6\n\n${event(7)}` : event(8));
    if (number === 1) setTimeout(() => response.destroy(), 50);
  });

  const found: number[] = [];
  for await (const each of client.events()) {
    found.push(each.id);
    expect(each.detail).toEqual({ by_ms: 1 });
    if (found.length === 2) break;
  }
  expect(found).toEqual([7, 8]);
  expect(seen.map((each) => each.path)).toEqual([
    "/v2/events?follow=true",
    "/v2/events?after=7&follow=true",
  ]);
});

test("no event is asked for again from a daemon that was never reached", async () => {
  const client = new Client({ url: "unix:///nowhere/forkd.sock", retriesMax: 0 });

  await expect(client.events().next()).rejects.toThrow(TransportError);
});

test("a list is asked for in parts", async () => {
  const { client, seen } = await serve((_, response, number) => {
    if (number === 1) response.setHeader("Forkd-Next", "sb-1");
    say(response, [SANDBOX]);
  });

  const found: Sandbox[] = [];
  const filter = { labels: { a: "b", c: null }, pageSize: 1 };
  for await (const each of client.sandboxes.iterate(filter)) found.push(each);
  expect(found.length).toBe(2);
  expect(seen.map((each) => each.path)).toEqual([
    "/v2/sandboxes?label=a%3Db&label=c&limit=1",
    "/v2/sandboxes?label=a%3Db&label=c&limit=1&after=sb-1",
  ]);
});

test("the first error of many is thrown when all have been asked", async () => {
  const { client, seen } = await serve((one, response) => {
    if (one.path === "/v2/sandboxes")
      say(
        response,
        ["a", "b"].map((id) => ({ ...SANDBOX, id })),
      );
    else say(response, { error: one.path, code: "not_found", context: {} }, 404);
  });

  const many = await client.fork("python", 2);
  expect([many.length, many[1]?.id, many.at(-1)?.id]).toEqual([2, "b", "b"]);
  await expect(many.run("true")).rejects.toThrow(/sandboxes\/a\/exec/);
  await expect(many.run("true")).rejects.toThrow(NotFound);
  expect(seen.length).toBe(5);
  await expect(many.map(async () => 1, { parallelMax: 0 })).rejects.toThrow(/at least 1/);
});

test("options in the place of a number are refused before anything is asked", async () => {
  const { client, seen } = await serve((_, response) => say(response, SANDBOX));
  const options = { ttlS: 5 } as unknown as number;
  const refused = client.fork("a", options);
  await expect(refused).rejects.toThrow(InvalidRequest);
  await expect(refused).rejects.toThrow("n: must be a whole number, not an object: options come");
  await expect(client.tryFork("a", 1.5)).rejects.toThrow("n: must be a whole number, not 1.5");
  expect(seen).toEqual([]);
  const sandbox = await client.sandboxes.get("sb-1");
  await expect(sandbox.branch(options)).rejects.toMatchObject({ context: { field: "n" } });
});

test("what code showed comes in the forms that it has", async () => {
  const { client } = await serve((one, response) => {
    if (!one.path.endsWith("/eval")) return say(response, [SANDBOX]);
    say(response, {
      ...{ result: "the value", stdout: "", stderr: "", has_value: true, exit_code: 0 },
      ...{ value: null, value_is_json: false, more_results: 2 },
      results: [
        {
          data: { "text/plain": "a", "image/png": "cG5n", "x_y/z": "own" },
          omitted: { "a_b/c": 7 },
        },
        { is_main: true, data: { "text/html": "<b>", "application/json": '{"a_b": 1}' } },
      ],
    });
  });

  const [made] = await client.fork("python");
  const shown = await made?.eval("x");

  const [first, main] = shown?.results ?? [];
  expect(first).toMatchObject({ text: "a", png: "cG5n", json: null, isMainResult: false });
  expect(first).toMatchObject({ extra: { "x_y/z": "own" }, omitted: { "a_b/c": 7 } });
  expect(first?.formats()).toEqual(["text", "png", "x_y/z"]);
  expect(main).toMatchObject({ text: "the value", html: "<b>", json: { a_b: 1 } });
  expect([main?.isMainResult, shown?.results.length, shown?.moreResults]).toEqual([true, 2, 2]);
});
