import { once } from "node:events";
import { connect, createServer, type Socket } from "node:net";
import { describe, expect, test } from "vitest";
import {
  Client,
  Conflict,
  type ForkdError,
  InvalidRequest,
  type Sandbox,
  TransportError,
} from "../../src/index.js";
import { daemons } from "./daemons.js";

/** A program that says in capitals what it was told, when it was told all of it. */
const CAPITALS = `
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
def serve(one):
    said = b""
    while piece := one.recv(65536):
        said += piece
    one.sendall(said.upper())
    one.close()
def accept():
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
listener.getsockname()[1]
`;

const CLOSED = `
import socket
with socket.create_server(("127.0.0.1", 0)) as unused:
    port = unused.getsockname()[1]
port
`;

async function portOf(sandbox: Sandbox, code: string): Promise<number> {
  return Number((await sandbox.eval(code, { check: true })).value);
}

async function all(pieces: AsyncIterable<Uint8Array>): Promise<string> {
  const found: Uint8Array[] = [];
  for await (const each of pieces) found.push(each);
  return Buffer.concat(found).toString();
}

/** Return what a client of this host is told, once it has said something and ended. */
async function asked(where: { host: string; port: number }, said: string): Promise<string> {
  const client = connect({ ...where, allowHalfOpen: true });
  client.end(said);
  return await all(client);
}

describe.each(daemons())("over $name", ({ options }) => {
  const client = new Client(options);

  test("a program that listens is talked to", async () => {
    await using sandbox = await client.sandbox("python");
    await using port = await sandbox.connectPort(await portOf(sandbox, CAPITALS));
    await port.send("hello ".repeat(50_000));
    await port.send(new TextEncoder().encode("you"));
    await port.sendEnd();
    expect(await all(port)).toBe(`${"HELLO ".repeat(50_000)}YOU`);
    expect((await port.receive()).length).toBe(0);
    await port.close();
    await expect(port.send("late")).rejects.toThrow(TransportError);
  });

  test("what cannot be connected is an error of its own", async () => {
    await using sandbox = await client.sandbox("python");
    const closed = await portOf(sandbox, CLOSED);
    const refused = sandbox.connectPort(closed);
    await expect(refused).rejects.toThrow(Conflict);
    await expect(refused).rejects.toThrow(`nothing listens on port ${closed} `);
    for (const wrong of [0, 65_536, 1.5]) {
      const said = `port must be 1 to 65535, not ${wrong}`;
      await expect(sandbox.connectPort(wrong)).rejects.toThrow(said);
      await expect(sandbox.forward(wrong)).rejects.toThrow(said);
    }
    await expect(sandbox.forward(80, { hostPort: 65_536 })).rejects.toMatchObject({
      context: { field: "hostPort" },
    });
    for (const [host, said] of [
      ["example.com", "is not an address to listen on"],
      ["192.0.2.1", "cannot listen on 192.0.2.1"],
    ] as const) {
      const forward = sandbox.forward(80, { host });
      await expect(forward).rejects.toThrow(InvalidRequest);
      await expect(forward).rejects.toThrow(said);
    }
    const options = { port: 80 } as object;
    await expect(sandbox.forward(80, options)).rejects.toThrow(/no option 'port'/);
  });

  test("a forwarded port is one of this host", async () => {
    await using sandbox = await client.sandbox("python");
    const guestPort = await portOf(sandbox, CAPITALS);
    const forward = await sandbox.forward(guestPort);
    expect([forward.address, forward.guestPort]).toEqual([`127.0.0.1:${forward.port}`, guestPort]);
    const long = "said ".repeat(200_000);
    const texts = [long, "a", "b", "c"];
    const heard = await Promise.all(texts.map((text) => asked(forward, text)));
    expect(heard.map((each) => each.length)).toEqual(texts.map((each) => each.length));
    expect(heard).toEqual(texts.map((each) => each.toUpperCase()));
    const taken = sandbox.forward(guestPort, { hostPort: forward.port });
    await expect(taken).rejects.toThrow(Conflict);
    await expect(taken).rejects.toThrow(/in use on this host/);
    await forward.close();
    await forward.close();
    await expect(asked(forward, "x")).rejects.toMatchObject({ code: "ECONNREFUSED" });
  });

  test("a connection that is refused, or left at the end, is reset", async () => {
    await using sandbox = await client.sandbox("python");
    const told: ForkdError[] = [];
    const onError = (error: ForkdError) => told.push(error);
    {
      const closed = await portOf(sandbox, CLOSED);
      await using forward = await sandbox.forward(closed, { onError });
      await expect(asked(forward, "x")).rejects.toMatchObject({ code: "ECONNRESET" });
    }
    expect(told).toMatchObject([{ code: "conflict" }]);

    const controller = new AbortController();
    const { signal } = controller;
    const guestPort = await portOf(sandbox, CAPITALS);
    const forward = await sandbox.forward(guestPort, { onError, signal });
    const left = connect({ port: forward.port, host: forward.host });
    left.write("half");
    expect(await asked(forward, "other")).toBe("OTHER"); // `left` is served by now
    const ended = once(left, "error");
    controller.abort();
    expect((await ended)[0]).toMatchObject({ code: "ECONNRESET" });
    await forward.close();
    expect(told.length).toBe(1);
  });

  test("a client that does not read holds its program back", async () => {
    await using sandbox = await client.sandbox("python");
    let [sent, held] = [0, 0];
    const server = createServer((one: Socket) => {
      const spew = () => {
        while (sent < 64 << 20) {
          sent += 65_536;
          if (!one.write(new Uint8Array(65_536))) return;
        }
        one.end();
      };
      one.on("drain", spew).on("error", () => {});
      spew();
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    // the fake guests connect to ports of this host
    await using forward = await sandbox.forward((server.address() as { port: number }).port);
    const reader = connect({ port: forward.port, host: forward.host });
    reader.pause();
    await expect
      .poll(
        () => {
          const before = held;
          held = sent;
          return sent > 0 && sent === before;
        },
        { interval: 300, timeout: 20_000 },
      )
      .toBe(true);
    expect(sent).toBeLessThan(64 << 20);
    expect((await all(reader)).length).toBe(sent);
    server.close();
  });

  test("an aborted connection rejects with the reason", async () => {
    await using sandbox = await client.sandbox("python");
    const controller = new AbortController();
    const options = { signal: controller.signal };
    const port = await sandbox.connectPort(await portOf(sandbox, CAPITALS), options);
    const heard = port.receive();
    controller.abort(new Error("enough"));
    await expect(heard).rejects.toThrow("enough");
  });

  test("a sandbox that has ended is no longer waited for", async () => {
    const sandbox = await client.sandbox("python");
    expect(await sandbox.wait({ timeoutS: 0 })).toBe(null);
    expect(await sandbox.wait({ timeoutS: 0.1 })).toBe(null);
    const aborted = sandbox.wait({ signal: AbortSignal.timeout(100) });
    await expect(aborted).rejects.toMatchObject({ name: "TimeoutError" });
    const waiting = sandbox.wait();
    await sandbox.kill();
    expect(await waiting).toBe("deleted");
  });
});
