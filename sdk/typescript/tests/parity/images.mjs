// Describes images with the built package, for tests/contract/test_sdk_images.py:
//
//     node images.mjs PACKAGE URL <IMAGES
//
// PACKAGE is the folder of the package; each of IMAGES is a list of steps, [name, args, options]
// with the names of Python.  Prints the recipe and the digest of each, or the error; then has the
// daemon at URL use the first in every way, and prints what that gave.

import { createHash } from "node:crypto";
import process from "node:process";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const { Client, Image, Sandbox } = await import(pathToFileURL(`${folder}/dist/index.js`).href);

function camel(name) {
  return name.replace(/_([a-z0-9])/g, (_, letter) => letter.toUpperCase());
}

/** Return the image of some steps. */
function made(steps) {
  return steps.reduce((image, [name, args, options]) => {
    const given = Object.keys(options).length > 0 ? [...args, options] : args;
    return image[camel(name)](...given);
  }, Image);
}

const answers = [];
const images = JSON.parse(await text(process.stdin));
for (const steps of images) {
  try {
    const image = made(steps);
    const digest = createHash("sha256");
    for await (const piece of await image.archive()) digest.update(piece);
    answers.push([String(image), digest.digest("hex")]);
  } catch (error) {
    answers.push([error.code, error.message]);
  }
}

const client = new Client({ url, retriesMax: 0 });
const image = made(images[0]);
const used = [
  (await client.snapshots.create("made", { image })).tag,
  (await client.snapshots.create("again", { recipe: image })).tag,
  (await client.images.build(image)).name,
  (await client.snapshots.forImage(image)).status,
];
const sandbox = await Sandbox.create({ image, client });
used.push(await sandbox.isRunning(), await sandbox.kill());
process.stdout.write(JSON.stringify([answers, used]));
client.close();
