"use strict";
// Evaluate JavaScript for the Python beside it: one line of JSON for each cell, and one back.
//
// The argument is the number of a connected socket. A cell runs in V8's REPL mode: `let` may be
// declared again, `await` works, and the value of the last expression is the result. SIGINT ends
// the cell. Standard output and error are the caller's.

const crypto = require("crypto");
const inspector = require("inspector");
const { createRequire } = require("module");
const net = require("net");
const util = require("util");
const vm = require("vm");

const TEXT_MAX = 65536; // characters of a value or a traceback
const VALUE_MAX = 262144; // characters of a value as JSON
const UUIDS_CACHED = 128; // by crypto.randomUUID, from one draw of random bytes
const INTS_CACHED = 1024; // by crypto.randomInt

const session = new inspector.Session();
session.connect();
const hidden = { begin() {}, take(value) { hidden.value = value; } };
Object.defineProperty(globalThis, "__cells", { value: hidden });
// Node.js heeds SIGINT in a script, and not in a function that is called.
const script = new vm.Script("__cells.begin()");
let interrupt = () => {};
let cells = 0;

/** Resolve to {value} or {error}. */
function evaluate(code) {
  cells += 1;
  const expression = `${code}\n//# sourceURL=cell-${cells}`;
  return new Promise((resolve) => {
    interrupt = () => resolve({ error: new Error("the cell was interrupted") });
    hidden.begin = () => {
      const options = { expression, replMode: true, awaitPromise: true };
      session.post("Runtime.evaluate", options, (error, answer) => {
        if (error) return resolve({ error: new Error(error.message) });
        const { exceptionDetails: thrown, result } = answer;
        if (!thrown) return resolve({ value: real(result) });
        resolve({ error: thrown.exception ? real(thrown.exception) : new Error(thrown.text) });
      });
    };
    try {
      script.runInThisContext({ breakOnSigint: true });
    } catch {
      interrupt();
    }
  });
}

/** The value that the inspector describes. */
function real({ objectId, unserializableValue, value }) {
  if (objectId === undefined) {
    if (unserializableValue === undefined) return value;
    const isBig = unserializableValue.endsWith("n");
    return isBig ? BigInt(unserializableValue.slice(0, -1)) : Number(unserializableValue);
  }
  const functionDeclaration = "function (value) { __cells.take(value); }";
  session.post("Runtime.callFunctionOn", { functionDeclaration, objectId, arguments: [{ objectId }] });
  session.post("Runtime.releaseObject", { objectId });
  const taken = hidden.value;
  hidden.value = undefined;
  return taken;
}

function described({ value, error }) {
  if (error !== undefined) {
    const isError = error instanceof Error;
    const stack = isError ? String(error.stack).split("\n    at Session.post")[0] : "";
    const message = isError ? error.message : util.inspect(error);
    const said = { name: isError ? error.name : typeof error, message, stack: stack || message };
    return { error: Object.fromEntries(Object.entries(said).map(([key, text]) => [key, cut(text)])) };
  }
  if (value === undefined) return {};
  return { text: cut(util.inspect(value, { depth: 4, maxStringLength: TEXT_MAX })), json: json(value) };
}

/** A value as JSON, or null if that is no JSON, or long, or says something else. */
function json(value) {
  try {
    const text = JSON.stringify(value);
    const same = text && text.length <= VALUE_MAX && util.isDeepStrictEqual(JSON.parse(text), value);
    return same ? text : null;
  } catch {
    return null;
  }
}

function cut(text) {
  return String(text).slice(0, TEXT_MAX);
}

/**
 * Forks share the state of OpenSSL's generator, and nothing here can reseed it. The processor's
 * takes its place, which has no state in the machine. False where there is none.
 */
function drawFromProcessor() {
  process.emitWarning = () => {};
  try {
    crypto.setEngine("rdrand", crypto.constants.ENGINE_METHOD_RAND);
  } catch {
    return false;
  }
  Math.random = () => Number(crypto.randomBytes(8).readBigUInt64LE() >> 11n) / 2 ** 53;
  return true;
}

/** Use up the random bytes that Node.js has drawn before the fork. */
function forgetDraws() {
  for (let draw = 0; draw < UUIDS_CACHED; draw += 1) crypto.randomUUID();
  for (let draw = 0; draw < INTS_CACHED; draw += 1) crypto.randomInt(2);
}

async function answer(line) {
  const request = JSON.parse(line);
  if (request.op === "fork") forgetDraws();
  return request.op === "cell" ? described(await evaluate(request.code)) : { drawsFromProcessor };
}

const drawsFromProcessor = drawFromProcessor();
globalThis.require = createRequire(`${process.cwd()}/`);
process.on("SIGINT", () => interrupt());
// What a callback throws, between cells or beside one, ends nothing.
process.on("uncaughtException", (error) => process.stderr.write(`${util.inspect(error)}\n`));
const socket = new net.Socket({ fd: Number(process.argv[2]), readable: true, writable: true });
let pending = "";
let turn = Promise.resolve();
socket.setEncoding("utf8");
socket.on("data", (chunk) => {
  const lines = (pending + chunk).split("\n");
  pending = lines.pop();
  for (const line of lines) {
    turn = turn.then(() => answer(line)).then((body) => socket.write(`${JSON.stringify(body)}\n`));
  }
});
socket.on("end", () => process.exit(0));
