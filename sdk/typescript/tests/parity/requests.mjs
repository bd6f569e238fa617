// Makes calls through the built package, for tests/contract/test_sdk_parity.py:
//
//     node requests.mjs PACKAGE URL <CALLS
//
// PACKAGE is the folder of the package; each of CALLS has `call`, `args` and `options` in the names
// of Python.  Prints the error of each call, null if there was none.

import process from "node:process";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const { Client } = await import(pathToFileURL(`${folder}/dist/index.js`).href);

function camel(name) {
  return name.replace(/_([a-z0-9])/g, (_, letter) => letter.toUpperCase());
}

/** What Python takes as keyword arguments, and this SDK by its place. */
const BY_PLACE = { "snapshots.share": ["shared"] };

/** How many arguments are before the options, where some of those may be left out. */
const BEFORE = { fork: 2, try_fork: 2, sandbox: 1, "sandbox.branch": 1, "sandbox.try_branch": 1 };

const client = new Client({ url, retriesMax: 0 });
const sandbox = await client.sandboxes.get("sb-1");
const errors = [];
for (const { call, args, options } of JSON.parse(await text(process.stdin))) {
  const path = call.split(".").map(camel);
  const name = path.pop();
  const root = path[0] === "sandbox" ? { sandbox } : client;
  const owner = path.reduce((of, part) => of[part], root);
  const places = BY_PLACE[call] ?? [];
  const given = Object.entries(options).filter(([key]) => !places.includes(key));
  const named = Object.fromEntries(given.map(([key, value]) => [camel(key), value]));
  const words = [...args, ...places.map((key) => options[key])];
  while (given.length > 0 && words.length < (BEFORE[call] ?? 0)) words.push(undefined);
  try {
    const made = owner[name](...words, ...(given.length > 0 ? [named] : []));
    if (made?.[Symbol.asyncIterator]) for await (const _ of made);
    else await made;
    errors.push(null);
  } catch (error) {
    errors.push([error.code ?? error.name, error.message]);
  }
}
client.close();
process.stdout.write(JSON.stringify(errors));
