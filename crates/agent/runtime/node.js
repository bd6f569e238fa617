"use strict";
// Evaluate JavaScript in one global scope that lives as long as the guest.
//
// The agent starts this file with one end of a socket pair as a file descriptor, and speaks
// protocol/runtime/CONTRACT.md over it.  A cell runs in the main context in V8's own REPL mode:
// `let` may be declared again, `await` works, and the value of the last expression is the result.
// The event loop goes on between cells, so timers and servers live.
//
// SIGINT ends code that runs without a pause, and code that waits.  Code that loops after it has
// awaited something does not notice; the agent ends the process then.
//
// Nothing that Node.js 18 lacks.

const crypto = require("crypto");
const fs = require("fs");
const { createRequire } = require("module");
const inspector = require("inspector");
const net = require("net");
const { Writable } = require("stream");
const util = require("util");
const vm = require("vm");

const [REQUEST, REPLY, ERROR, CONTROL, DATA] = [1, 2, 3, 5, 32];
const HEADER_BYTES = 8;
const REPR_MAX = 65536; // characters
const VALUE_MAX = 262144; // bytes of JSON
const TEXT_MAX = 65536; // characters of a message or a traceback
const DEPTH_MAX = 200; // of a value that is sent as JSON
const UUIDS_CACHED = 128; // by crypto.randomUUID, from one draw of random bytes
const INTS_CACHED = 1024; // by crypto.randomInt
const REHEARSALS = 16;
const LATE_MS = 50; // that a signal may take from one thread of Node.js to another
const AGAIN_MS = 2; // until a full pipe is tried again

class Exit extends Error {}
Exit.prototype.name = "Exit";

class Interrupted extends Error {}
Interrupted.prototype.name = "Interrupted";

/** Frames over the agent's socket. */
class Channel {
  constructor(fd, onFrame) {
    this.pending = Buffer.alloc(0);
    this.socket = new net.Socket({ fd, readable: true, writable: true });
    this.socket.on("data", (chunk) => this.take(chunk, onFrame));
    // Without an agent there is nobody to run anything for.
    this.socket.on("end", () => process.reallyExit(0));
    this.socket.on("error", () => process.reallyExit(1));
  }

  take(chunk, onFrame) {
    this.pending = this.pending.length ? Buffer.concat([this.pending, chunk]) : chunk;
    while (this.pending.length >= HEADER_BYTES) {
      const end = HEADER_BYTES + this.pending.readUInt32LE(0);
      if (this.pending.length < end) return;
      const kind = this.pending[4];
      const payload = this.pending.subarray(HEADER_BYTES, end);
      this.pending = this.pending.subarray(end);
      onFrame(kind, payload);
    }
  }

  write(kind, body) {
    const payload = Buffer.from(JSON.stringify(body));
    const header = Buffer.alloc(HEADER_BYTES);
    header.writeUInt32LE(payload.length, 0);
    header[4] = kind;
    this.socket.write(Buffer.concat([header, payload]));
  }
}

/**
 * Standard output or error.  Node.js' own would keep what code that never pauses prints until that
 * ends, and print nothing any more once code was stopped in the midst of printing.
 */
class Output extends Writable {
  constructor(fd) {
    super({ decodeStrings: false });
    this.fd = fd;
  }

  write(chunk, encoding, done) {
    if (typeof encoding === "function") [encoding, done] = [undefined, encoding];
    let rest = typeof chunk === "string" ? Buffer.from(chunk, encoding) : chunk;
    while (rest.length > 0) {
      try {
        rest = rest.subarray(fs.writeSync(this.fd, rest));
      } catch (error) {
        if (error.code !== "EAGAIN") throw error; // a child may have made the pipe so
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, AGAIN_MS);
      }
    }
    if (done) process.nextTick(done);
    return true;
  }

  end() {
    return this;
  }
}

/** Runs cells, one at a time. */
class Cells {
  constructor() {
    this.session = new inspector.Session();
    this.session.connect();
    this.count = 0;
    this.interrupt = () => {}; // ends what is waited for, while a cell runs
    this.signalled = false; // the cell that runs was ended by a signal
    this.owed = false; // a signal was announced and has not come
    this.taken = undefined;
    const hidden = { begin: () => this.begin(), take: (value) => (this.taken = value) };
    Object.defineProperty(globalThis, "__forkd", { value: hidden });
    // Node.js heeds SIGINT in a script, and not in a function that is called.
    this.script = new vm.Script("__forkd.begin()");
    this.idle = new vm.Script(`for (const end = Date.now() + ${LATE_MS}; Date.now() < end; ) ;`);
  }

  /** Resolve to {value}, or to {error} with what was thrown. */
  async run(code) {
    await polled(); // a signal that had come by then is for nobody
    if (this.owed) this.takeLateSignal();
    this.signalled = false;
    const interrupted = new Promise((resolve) => {
      this.interrupt = () => resolve({ error: new Interrupted("the code was interrupted") });
    });
    try {
      const outcome = await Promise.race([this.begun(code), interrupted]);
      if (!util.types.isPromise(outcome.value)) return outcome;
      const kept = (value) => ({ value });
      const settled = outcome.value.then(kept, (error) => ({ error }));
      return await Promise.race([settled, interrupted]);
    } finally {
      this.interrupt = () => {};
    }
  }

  /**
   * Node.js keeps a signal that comes just when a script ends, and ends the next script by it.  So
   * there is a next script.
   */
  takeLateSignal() {
    this.owed = false;
    try {
      this.idle.runInThisContext({ breakOnSigint: true });
    } catch (error) {
      // That was it.
    }
  }

  begun(code) {
    return new Promise((resolve) => {
      this.begin = () => this.evaluate(code, resolve);
      try {
        this.script.runInThisContext({ breakOnSigint: true });
      } catch (error) {
        this.signalled = true;
        this.interrupt();
      }
    });
  }

  evaluate(code, resolve) {
    this.count += 1;
    const expression = `${code}\n//# sourceURL=cell-${this.count}`;
    const options = { expression, replMode: true, awaitPromise: true };
    this.session.post("Runtime.evaluate", options, (error, answer) => {
      if (error) resolve({ error: new Error(error.message) });
      else if (answer.exceptionDetails) {
        const { exception, text } = answer.exceptionDetails;
        resolve({ error: exception ? this.real(exception) : new Error(text) });
      } else resolve({ value: this.real(answer.result) });
    });
  }

  /** The value that the inspector describes. */
  real({ objectId, unserializableValue, value }) {
    if (objectId === undefined) {
      if (unserializableValue === undefined) return value;
      const isBig = unserializableValue.endsWith("n");
      return isBig ? BigInt(unserializableValue.slice(0, -1)) : Number(unserializableValue);
    }
    const functionDeclaration = "function (value) { __forkd.take(value); }";
    const call = { functionDeclaration, objectId, arguments: [{ objectId }] };
    this.session.post("Runtime.callFunctionOn", call);
    this.session.post("Runtime.releaseObject", { objectId });
    const taken = this.taken;
    this.taken = undefined;
    return taken;
  }
}

/** What the agent may ask. */
class Runtime {
  constructor(fd) {
    this.cells = new Cells();
    this.jobs = [];
    this.busy = false;
    this.asked = false; // the agent wants the cell that runs to end
    this.onFork = [];
    this.channel = new Channel(fd, (kind, payload) => this.take(kind, payload));
    process.on("SIGINT", () => {
      if (!this.cells.owed) this.cells.interrupt();
      this.cells.owed = false;
      this.cells.signalled = true;
    });
  }

  take(kind, payload) {
    if (kind !== CONTROL) this.jobs.push([kind, payload.toString()]);
    else if (this.busy) {
      this.asked = true;
      // Its signal may be lost while Node.js changes from one way of heeding signals to the other,
      // and ends nothing else if it is not.
      this.cells.owed = !this.cells.signalled;
      this.cells.interrupt();
    }
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    for (let job = this.jobs.shift(); job !== undefined; job = this.jobs.shift()) {
      this.asked = false;
      this.channel.write(...(await this.answer(...job)));
    }
    this.busy = false;
  }

  async answer(kind, text) {
    if (kind === DATA) return [REPLY, await this.evaluate(text)];
    const request = JSON.parse(text);
    if (kind !== REQUEST || !(request.op in this.operations)) {
      return [ERROR, { code: "protocol", message: `${kind} ${request.op} is not known` }];
    }
    return this.operations[request.op].call(this, request);
  }

  async evaluate(code) {
    const outcome = await this.cells.run(code);
    if (!("error" in outcome)) return described(outcome.value);
    if (outcome.error instanceof Interrupted) await polled();
    return { has_value: false, error: asData(outcome.error), timed_out: this.asked };
  }

  async failing(code, refusal) {
    const { error } = await this.evaluate(code);
    return error ? [ERROR, { code: refusal, message: error.traceback }] : null;
  }

  operations = {
    hello: () => {
      const language = `JavaScript (Node.js ${process.version})`;
      return [REPLY, { contract: 1, language, env: true }];
    },

    async eval({ code, env }) {
      const before = Object.keys(env).map((name) => [name, process.env[name]]);
      Object.assign(process.env, env);
      try {
        return [REPLY, await this.evaluate(code)];
      } finally {
        for (const [name, value] of before) {
          if (value === undefined) delete process.env[name];
          else process.env[name] = value;
        }
      }
    },

    async warm({ code }) {
      return (await this.failing(code, "warm_up_failed")) || [REPLY, {}];
    },

    async freeze() {
      for (let run = 0; run < REHEARSALS; run += 1) {
        for (const code of ["[0.0, 'rehearsal']", "await 0", "throw new Error()"]) {
          await this.evaluate(code);
        }
        reseed(crypto.randomBytes(64));
      }
      collectGarbage();
      return [REPLY, {}];
    },

    async post_fork({ seed, code }) {
      const reseeded = reseed(Buffer.from(seed, "hex"));
      try {
        for (const callback of this.onFork) await callback();
      } catch (error) {
        return [ERROR, { code: "hook_failed", message: asData(error).traceback }];
      }
      const failed = code ? await this.failing(code, "hook_failed") : null;
      const hook = code || this.onFork.length ? "ran" : "none";
      return failed || [REPLY, { reseeded, hook }];
    },
  };
}

/** Resolves once what had arrived on the socket was read. */
async function polled() {
  for (let turn = 0; turn < 2; turn += 1) await new Promise(setImmediate);
}

function described(value) {
  if (value === undefined) return { has_value: false };
  let repr;
  try {
    repr = cut(util.inspect(value, { depth: 4, maxStringLength: REPR_MAX }), REPR_MAX);
  } catch (error) {
    return { has_value: false, error: asData(error) };
  }
  const answer = { has_value: true, repr, value: null, value_is_json: false };
  if (isJson(value, { left: VALUE_MAX, depth: DEPTH_MAX })) {
    const fits = Buffer.byteLength(JSON.stringify(value)) <= VALUE_MAX;
    if (fits) Object.assign(answer, { value, value_is_json: true });
  }
  return answer;
}

/** Whether JSON says a value as it is, and within bounds. */
function isJson(value, bounds) {
  bounds.left -= typeof value === "string" ? value.length + 2 : 1;
  if (bounds.left < 0) return false;
  if (value === null || typeof value === "boolean" || typeof value === "string") return true;
  if (typeof value === "number") return Number.isFinite(value);
  if (typeof value !== "object" || util.types.isProxy(value)) return false;
  const proto = Object.getPrototypeOf(value);
  const plain = proto === null || proto === Object.prototype;
  if (!(plain || Array.isArray(value)) || "toJSON" in value || bounds.depth === 0) return false;
  bounds.depth -= 1;
  const fields = Object.entries(Object.getOwnPropertyDescriptors(value));
  const all = fields.every(([name, field]) => {
    if (!field.enumerable) return true;
    bounds.left -= Array.isArray(value) ? 1 : name.length + 3;
    return "value" in field && isJson(field.value, bounds);
  });
  bounds.depth += 1;
  // A hole in an array has no descriptor.
  return all && (plain || fields.length === value.length + 1);
}

function asData(error) {
  try {
    const isError = util.types.isNativeError(error) || error instanceof Error;
    const type = isError ? String(error.name) : typeof error;
    const message = isError ? String(error.message) : util.inspect(error);
    const stack = isError && typeof error.stack === "string" ? error.stack : `${type}: ${message}`;
    return { type, message: cut(message, TEXT_MAX), traceback: cut(ownFrames(stack), TEXT_MAX) };
  } catch (failed) {
    const text = "an error that cannot be described";
    return { type: "Error", message: text, traceback: text };
  }
}

/** A stack without the frames that called the cell. */
function ownFrames(stack) {
  const lines = stack.split("\n");
  const ours = (line) => line.startsWith("    at Session.post (node:") || line.includes(__filename);
  const first = lines.findIndex(ours);
  return (first < 0 ? lines : lines.slice(0, first)).join("\n");
}

function cut(text, limit) {
  return text.length <= limit ? text : `${text.slice(0, limit - 1)}\u2026`;
}

let random = generator(crypto.randomBytes(16));

/** A generator of Math.random's numbers that, unlike V8's, can be seeded (sfc32, 53 bits). */
function generator(seed) {
  let [a, b, c, d] = [0, 4, 8, 12].map((at) => seed.readInt32LE(at));
  const next = () => {
    const sum = (((a + b) | 0) + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + sum) | 0;
    return sum >>> 0;
  };
  for (let round = 0; round < 16; round += 1) next();
  return () => ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
}

/** Reseed what siblings would share; return the names. */
function reseed(seed) {
  random = generator(seed);
  if (!drawsFromProcessor) return ["node.math"];
  // Both keep random bytes for later, which were drawn before the fork.
  for (let draw = 0; draw < UUIDS_CACHED; draw += 1) crypto.randomUUID();
  for (let draw = 0; draw < INTS_CACHED; draw += 1) crypto.randomInt(2);
  return ["node.math", "openssl"];
}

/**
 * OpenSSL's own generator knows a fork by its process id, which siblings share, and nothing here
 * can reseed it.  So the processor's takes its place, which has no state in the guest.
 */
function useProcessorsRandomness() {
  const warn = process.emitWarning;
  process.emitWarning = () => {};
  try {
    crypto.setEngine("rdrand", crypto.constants.ENGINE_METHOD_RAND);
    return true;
  } catch (error) {
    return false; // neither this processor nor this OpenSSL need have it
  } finally {
    process.emitWarning = warn;
  }
}

const drawsFromProcessor = useProcessorsRandomness();

function collectGarbage() {
  require("v8").setFlagsFromString("--expose-gc");
  vm.runInNewContext("gc")();
}

function main() {
  for (const [name, fd] of [["stdout", 1], ["stderr", 2]]) {
    Object.defineProperty(process, name, { value: new Output(fd), configurable: true });
  }
  const fd = Number(process.argv[2]);
  process.argv = [process.argv[0]];
  const folder = `${process.cwd()}/`;
  Object.assign(globalThis, { require: createRequire(folder), module: { exports: {} } });
  Math.random = () => random();
  process.exit = (code = 0) => {
    throw new Exit(`process.exit(${code})`);
  };
  // What a callback throws, between cells or beside one, ends nothing.
  process.on("uncaughtException", (error) => process.stderr.write(`${asData(error).traceback}\n`));
  const runtime = new Runtime(fd);
  const onFork = (callback) => {
    if (typeof callback !== "function") throw new TypeError("onFork needs a function");
    runtime.onFork.push(callback);
    if (runtime.onFork.length === 1) runtime.channel.write(CONTROL, { on_fork: true });
  };
  Object.defineProperty(globalThis, "forkd", { value: Object.freeze({ onFork }) });
}

main();
