/** Every operation of the API can be reached, at the path that the OpenAPI document says. */
import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import type { Client, Sandbox } from "../../src/index.js";
import { SANDBOX, say, serve } from "./server.js";

const DOCUMENT = new URL("../../../../protocol/rest/openapi-v2.json", import.meta.url);

interface Operation {
  method: string;
  path: RegExp;
}

function documented(): Map<string, Operation> {
  const found = new Map<string, Operation>();
  const { paths } = JSON.parse(readFileSync(DOCUMENT, "utf8"));
  for (const [path, methods] of Object.entries<Record<string, { operationId: string }>>(paths)) {
    const pattern = new RegExp(`^${path.replace(/\{\w+\}/g, "[^/]+")}$`);
    for (const [method, { operationId }] of Object.entries(methods)) {
      found.set(operationId, { method: method.toUpperCase(), path: pattern });
    }
  }
  return found;
}

/** What an operator's monitoring asks, and no program of a user. */
const LEFT_OUT = ["build_link", "health", "metrics", "ready"];

async function drained(pieces: AsyncIterable<unknown>): Promise<void> {
  for await (const _ of pieces);
}

const data = new Uint8Array(1);

const CALLS: Record<string, (client: Client, sandbox: Sandbox) => Promise<unknown>> = {
  branch: (_, sandbox) => sandbox.branch(),
  build_image: (client) => client.images.build("a"),
  change_network: (_, sandbox) => sandbox.network.change({ network: "none" }),
  change_quotas: (client) => client.tenants.changeQuotas("a", { vcpus: "unlimited" }),
  change_sandbox: (_, sandbox) => sandbox.setTtl(5),
  compact_snapshot: (client) => client.snapshots.compact("a"),
  create_snapshot: (client) => client.snapshots.create("a", { recipe: "a" }),
  create_token: (client) => client.tokens.create("a", ["run"]),
  delete_sandbox: (_, sandbox) => sandbox.kill(),
  delete_secret: (client) => client.secrets.delete("a"),
  delete_snapshot: (client) => client.snapshots.delete("a"),
  delete_token: (client) => client.tokens.delete("a"),
  diff: (client) => client.diff("a", "b"),
  eval: (_, sandbox) => sandbox.eval("1"),
  exec: (_, sandbox) => sandbox.exec("true"),
  follow_events: (client) => drained(client.events()),
  fork: (client) => client.fork("a"),
  gc_snapshots: (client) => client.snapshots.gc(),
  get_host: (client) => client.host(),
  get_network: (_, sandbox) => sandbox.network.status(),
  get_recipe: (client) => client.recipes.get("a"),
  get_sandbox: (_, sandbox) => sandbox.refresh(),
  get_snapshot: (client) => client.snapshots.info("a"),
  get_usage: (_, sandbox) => sandbox.usage(),
  list_files: (_, sandbox) => sandbox.files.list("/"),
  list_images: (client) => client.images.list(),
  list_recipes: (client) => client.recipes.list(),
  list_sandboxes: (client) => client.sandboxes.list(),
  list_secrets: (client) => client.secrets.list(),
  list_snapshots: (client) => client.snapshots.list(),
  list_tenants: (client) => client.tenants.list(),
  list_tokens: (client) => client.tokens.list(),
  list_usage: (client) => client.usage(),
  make_dir: (_, sandbox) => sandbox.files.makeDir("/a"),
  move_file: (_, sandbox) => sandbox.files.move("/a", "/b"),
  pack_snapshot: (client) => drained(client.snapshots.pack("a")),
  pause: (_, sandbox) => sandbox.pause(),
  ping: (_, sandbox) => sandbox.ping(),
  promote: (_, sandbox) => sandbox.promote(),
  read_archive: (_, sandbox) => drained(sandbox.files.openArchive("/a")),
  read_file: (_, sandbox) => drained(sandbox.files.open("/a")),
  read_logs: (_, sandbox) => sandbox.logs(),
  remove_file: (_, sandbox) => sandbox.files.remove("/a"),
  remove_image: (client) => client.images.remove("a"),
  remove_quotas: (client) => client.tenants.removeQuotas("a"),
  reset: (_, sandbox) => sandbox.reset(),
  resume: (_, sandbox) => sandbox.resume(),
  set_limits: (_, sandbox) => sandbox.setLimits({ cpuLimit: 1 }),
  set_quotas: (client) => client.tenants.setQuotas("a", { sandboxes: 1 }),
  set_secret: (client) => client.secrets.set("a", "b", ["example.com"]),
  share_snapshot: (client) => client.snapshots.share("a", true),
  snapshot_image: (client) => client.snapshots.forImage("a"),
  stat_file: (_, sandbox) => sandbox.files.stat("/a"),
  tree: (client) => client.tree(),
  unpack_snapshot: (client) => client.snapshots.unpack("a", data),
  upload_recipe: (client) => client.recipes.upload(data),
  version: (client) => client.version(),
  write_archive: (_, sandbox) => sandbox.files.writeArchive("/a", data),
  write_file: (_, sandbox) => sandbox.files.write("/a", data),
};

test("every operation has a call, or is left out on purpose", () => {
  expect([...Object.keys(CALLS), ...LEFT_OUT].sort()).toEqual([...documented().keys()].sort());
});

test("each call is the operation that it is said to be", async () => {
  let answers = 0;
  const { client, seen } = await serve((_, response) => {
    answers += 1;
    if (answers === 1) say(response, SANDBOX);
    else say(response, { error: "as asked", code: "conflict", context: {} }, 409);
  });
  const sandbox = await client.sandboxes.get("sb-1");

  for (const [name, call] of Object.entries(CALLS)) {
    seen.length = 0;
    await expect(call(client, sandbox), name).rejects.toMatchObject({ code: "conflict" });
    const [{ method, path } = { method: "", path: "" }] = seen;
    const wanted = documented().get(name);
    expect(method, name).toBe(wanted?.method);
    expect(path.replace(/\?.*/, ""), name).toMatch(wanted?.path ?? /$^/);
  }
});
