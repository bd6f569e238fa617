import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { beforeEach, expect, onTestFinished, test, vi } from "vitest";
import { discover, Endpoint } from "../../src/endpoint.js";
import { ERRORS_BY_CODE } from "../../src/error-codes.gen.js";
import * as errors from "../../src/errors.js";
import { ExecResult } from "../../src/results.js";
import { program, shell } from "../../src/running.js";
import { asBase64, fromBase64, onWire } from "../../src/text.js";
import { Transport } from "../../src/transport.js";
import { argument } from "../../src/wire.js";

let folder: string;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "fk"));
  for (const name of ["FORKD_URL", "FORKD_TOKEN", "FORKD_CONTEXT"]) vi.stubEnv(name, "");
  vi.stubEnv("FORKD_HOME", folder);
  vi.stubEnv("XDG_CONFIG_HOME", folder);
  onTestFinished(() => {
    vi.unstubAllEnvs();
    rmSync(folder, { recursive: true });
  });
});

test("the caller's address wins, then the environment, then what `forkd up` wrote", () => {
  writeFileSync(join(folder, "token"), "from-file\n");
  const endpoint = { url: "http://127.0.0.1:1", token_file: join(folder, "token") };
  writeFileSync(join(folder, "endpoint.json"), JSON.stringify(endpoint));
  expect(discover()).toMatchObject({ url: "http://127.0.0.1:1" });
  expect(discover().headers).toEqual({ authorization: "Bearer from-file" });

  vi.stubEnv("FORKD_URL", "https://forkd.example:8889/");
  vi.stubEnv("FORKD_TOKEN", "from-env");
  expect(discover().httpUrl).toBe("https://forkd.example:8889");
  expect(discover().headers).toEqual({ authorization: "Bearer from-env" });

  const given = discover({ url: "unix:///run/x.sock", token: "given" });
  expect([given.socket, given.httpUrl]).toEqual(["/run/x.sock", "http://forkd"]);
  expect(given.headers).toEqual({ authorization: "Bearer given" });
});

test("a context that is used names the daemon, and one that does not exist is refused", () => {
  const contexts = { ci: { url: "http://127.0.0.1:2", token: "t" } };
  writeFileSync(join(folder, "endpoint.json"), JSON.stringify({ url: "http://127.0.0.1:1" }));
  expect(discover().url).toBe("http://127.0.0.1:1");

  const file = join(folder, "forkd/contexts.json");
  mkdirSync(join(folder, "forkd"));
  writeFileSync(file, JSON.stringify({ current: "ci", contexts }));
  expect(discover()).toMatchObject({ url: "http://127.0.0.1:2" });

  vi.stubEnv("FORKD_CONTEXT", "local");
  expect(discover().url).toBe("http://127.0.0.1:1");
  vi.stubEnv("FORKD_CONTEXT", "other");
  expect(() => discover()).toThrow(/no context 'other'; there are: local, ci/);
  writeFileSync(file, "no");
  expect(() => discover()).toThrow(/contexts.json does not hold contexts/);
});

test.each(["ftp://a", "unix://", "http://", "nonsense", "unix://relative/path"])(
  "an address that is none is refused: %s",
  (url) => {
    expect(() => discover({ url })).toThrow(
      `url must be http://host:port, https://host:port or unix:///path, not ${url}`,
    );
    expect(() => discover({ url })).toThrow(errors.InvalidRequest);
  },
);

test("a key without its certificate is refused", () => {
  expect(() => discover({ url: "https://a", clientKey: "k" })).toThrow(/clientCert is not/);
});

test("every code has a class, whose parents are those of the tree", () => {
  const { ForkdError } = errors;
  for (const [code, kind] of Object.entries(ERRORS_BY_CODE)) {
    const made = new kind("said");
    expect([made.code, made.name, made.message]).toEqual([code, kind.name, "said"]);
    expect(made).toBeInstanceOf(ForkdError);
    expect(made).toBeInstanceOf(Error);
  }
  expect(new errors.BudgetError("a")).toBeInstanceOf(errors.Conflict);
  expect(new errors.Busy("a").retryable).toBe(true);
});

test("an error says what to do about it, if that is known", () => {
  const missing = new errors.NotFound("a", { context: { tag: "x" } });
  expect(missing.hint).toMatch(/client.snapshots.list/);
  expect(new errors.NotFound("a").hint).toBeUndefined();
  expect(new errors.Denied("a").hint).toMatch(/FORKD_TOKEN/);
});

test.each([
  ["", ""],
  ["ü/€/😀", undefined],
  ["a\udc80b", "YYBi"],
  ["\udcff\udcfe", "//4="],
])("text stands for bytes, whatever they are: %j", (text, digits) => {
  expect(fromBase64(asBase64(text))).toBe(text);
  if (digits !== undefined) expect(asBase64(text)).toBe(digits);
  expect(onWire(text)).toEqual(text.isWellFormed() ? text : { b64: digits });
});

test("a surrogate that stands for no byte is refused", () => {
  expect(() => asBase64("a\ud800b")).toThrow(/stands for no byte/);
});

test.each([
  ["ttl_secs", "ttlS"],
  ["snapshot_tag", "tag"],
  ["io_limit_mib_s", "ioLimitMibS"],
  ["labels.a_b", "labels.a_b"],
])("members are called as options are: %s", (member, option) => {
  expect(argument(member)).toBe(option);
});

test("a program is a list, or one word; a line is for the shell", () => {
  expect(program(["ls", "-l"])).toEqual(["ls", "-l"]);
  expect(program("ls")).toEqual(["ls"]);
  expect(() => program("ls -l")).toThrow(/run\("ls -l"\) has a shell read the line/);
  expect(shell("ls -l")).toEqual(["/bin/sh", "-c", "ls -l"]);
  expect(() => shell(["ls"] as never)).toThrow(/exec\(\["ls", "-l"\]\)/);
});

test("a result quotes what a program said, without what acts on a terminal", () => {
  const parts = { stdout: "", signal: null, timedOut: false, durationS: 1.25, truncated: false };
  const args = ["sh", "-c", "it's"];
  const failed = new ExecResult({ ...parts, exitCode: 3, stderr: "\u001b[31mno\n", args });
  expect(() => failed.check()).toThrow(`sh -c 'it'"'"'s' exited with 3: \\x1b[31mno`);
  expect(() => failed.check()).toThrow(errors.CommandError);
  const late = new ExecResult({ ...parts, exitCode: 137, stderr: "", args, timedOut: true });
  expect(() => late.check()).toThrow(/was killed after 1.3 s: its time ran out/);
  expect(late.ok).toBe(false);
});

test("a runtime that lacks something is told what to use", () => {
  const socket = new Endpoint({ url: "unix:///run/forkd.sock" });
  vi.spyOn(process, "platform", "get").mockReturnValue("win32");
  expect(() => new Transport(socket)).toThrow(/a Unix socket, which JavaScript cannot use on Win/);
  expect(() => new Transport(socket)).toThrow(/TCP address, such as http:\/\/127.0.0.1:8889/);
  const { isWellFormed } = String.prototype;
  onTestFinished(() => {
    vi.restoreAllMocks();
    Object.assign(String.prototype, { isWellFormed });
  });
  Object.assign(String.prototype, { isWellFormed: undefined });
  expect(() => new Transport(socket)).toThrow(/needs Node.js 20 or later, Bun or Deno; this is N/);
});
