/** A daemon that answers what a test says, on a Unix socket of its own. */
import { mkdtempSync, rmSync } from "node:fs";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { onTestFinished } from "vitest";
import { Client } from "../../src/index.js";

/** One request that came. */
export interface Seen {
  method: string;
  path: string;
  headers: IncomingMessage["headers"];
  body: string;
}

type Handler = (seen: Seen, response: ServerResponse, number: number) => unknown;

/** What is served: a client, and the requests so far. */
export interface Served {
  client: Client;
  url: string;
  seen: Seen[];
}

/** Serve until the test ends. */
export async function serve(handler: Handler, options = {}): Promise<Served> {
  const folder = mkdtempSync(join(tmpdir(), "fk"));
  const socket = join(folder, "forkd.sock");
  const seen: Seen[] = [];
  const server = createServer(async (request, response) => {
    const pieces: Buffer[] = [];
    for await (const piece of request) pieces.push(piece);
    const { method = "", url: path = "", headers } = request;
    const one = { method, path, headers, body: Buffer.concat(pieces).toString() };
    seen.push(one);
    handler(one, response, seen.length);
  });
  await new Promise<void>((resolve) => server.listen(socket, resolve));
  const client = new Client({ url: `unix://${socket}`, ...options });
  onTestFinished(async () => {
    client.close();
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
    rmSync(folder, { recursive: true });
  });
  return { client, url: `unix://${socket}`, seen };
}

/** Answer with JSON. */
export function say(response: ServerResponse, body: unknown, status = 200): void {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(body));
}

/** What the daemon says of a sandbox; only what this SDK cannot do without. */
export const SANDBOX = {
  id: "sb-1",
  snapshot_tag: "python",
  status: "running",
  hostname: "sb-1",
  pid: 1,
  guest_addr: null,
  created_at_unix: 0,
  memory_limit_mib: null,
  disk_limit_mib: null,
  fork_ms: null,
  labels: { snake_case: "kept_as_is" },
};
