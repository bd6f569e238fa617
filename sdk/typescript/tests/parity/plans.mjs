// Plans builds with the built package, for tests/contract/test_sdk_builds.py:
//
//     node plans.mjs PACKAGE <CASES
//
// PACKAGE is the folder of the package; each of CASES says what is built: text, context, ignore,
// args, target, and the configuration of each base.  Prints for each the steps with their keys, what
// is copied, the key of the result and the warnings; or the error.

import { Buffer } from "node:buffer";
import process from "node:process";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

const [folder] = process.argv.slice(2);
const load = async (name) => await import(pathToFileURL(`${folder}/dist/${name}.js`).href);
const { Context } = await load("build-context");
const { parseIgnore } = await load("build-ignore");
const { END, Packer } = await load("build-packing");
const { plan, Wish } = await load("dockerfile-plan");
const { EMPTY } = await load("dockerfile-settings");
const { parse } = await load("dockerfile-stages");

/** Return the archive of what a step copies from the context. */
async function packed(action, context) {
  const pieces = [];
  for (const part of action.parts) {
    const packer = new Packer({
      owner: part.unpacked ? undefined : { uid: 5, gid: 6 },
      mode: action.mode,
    });
    for await (const piece of packer.ofContext(context, part, part.name)) pieces.push(piece);
  }
  return Buffer.concat([...pieces, END]).toString("base64");
}

/** Return what is planned for a case. */
async function planned({ text: said, context: root, ignore, args, target, config }) {
  const ignored = ignore === null ? undefined : parseIgnore(ignore, ".dockerignore");
  const wish = new Wish(parse(said, "D"), args, target ?? undefined, new Context(root, ignored));
  await plan(wish);
  const base = {
    tag: "image-1",
    identity: "image-1 of today",
    config: { ...EMPTY, ...config },
    depth: 0,
  };
  const bases = new Map([...(await wish.images()).keys()].map((name) => [name, base]));
  const made = await plan(wish, bases);
  const steps = [];
  for (const stage of made.stages) {
    for (const step of stage.steps) {
      const { action } = step;
      const isOurs = action.kind === "copy" && action.origin === null;
      const archive = isOurs ? await packed(action, wish.context) : null;
      steps.push([step.number, step.line, step.shown, step.key, step.folders, archive]);
    }
    steps.push(stage.notes.map((note) => [note.number, note.line, note.text]));
  }
  return [steps, made.last.config, made.imageKey(true, "é😀 ready"), made.warnings];
}

const answers = [];
for (const each of JSON.parse(await text(process.stdin))) {
  try {
    answers.push(await planned(each));
  } catch (error) {
    if (error.code === undefined) throw error;
    answers.push([error.code, error.message]);
  }
}
process.stdout.write(JSON.stringify(answers));
