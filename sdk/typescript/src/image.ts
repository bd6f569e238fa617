/** Images described step by step: each is a recipe, which the daemon keeps by its content. */
import { Buffer } from "node:buffer";
import { resolve } from "node:path";
import { InvalidRequest } from "./errors.js";
import type { Http } from "./http.js";
import { type Archive, ofParts, type UploadProgress, uploaded } from "./recipe-archive.js";

/** What the recipes are called; images are found by what is in them. */
const NAME = "image";

const REGISTRY = "docker://";

const CODE_FILE = "warmup.py";

/** Dots that a text is written with; a line of a recipe may have only so many. */
const DOTS_MAX = 100;

/** What each image of Debian has, so that code can be evaluated in it. */
const DEBIAN_PACKAGES = ["ca-certificates", "python3"];

/** A file or folder of this host that goes along. */
interface Local {
  source: string;
  target: string;
  mode?: number | undefined;
}

interface Steps {
  readonly suite?: string;
  readonly reference?: string;
  readonly packages: readonly string[];
  readonly requirements: readonly string[];
  readonly lines: readonly string[];
  readonly variables: Readonly<Record<string, string>>;
  readonly folder?: string;
  readonly user?: string;
  readonly files: readonly Local[];
  readonly code: string;
}

const NO_STEPS: Steps = {
  packages: [],
  requirements: [],
  lines: [],
  variables: {},
  files: [],
  code: "",
};

/** Texts, one by one or as lists. */
export type Texts = readonly (string | readonly string[])[];

/**
 * An image, described step by step; every method returns another one.
 *
 * ```ts
 * const image = Image.debian().aptInstall("git").pipInstall("numpy").env({ MODE: "test" });
 * await using sandbox = await Sandbox.create({ image });
 * ```
 *
 * It is built, and its machine baked, the first time that it is used.  Images of the same steps
 * are built once, also if a program in Python describes them.  `String(image)` is its recipe.
 */
export class Image {
  readonly #steps: Steps;

  private constructor(steps: Steps) {
    this.#steps = steps;
  }

  /**
   * Return an image of Debian with Python.
   *
   * @param suite The release of Debian.
   */
  static debian(suite = "bookworm"): Image {
    return new Image({ ...NO_STEPS, suite, packages: DEBIAN_PACKAGES });
  }

  /**
   * Return an image of a registry.
   *
   * @param reference Such as `python:3.12-slim`, or `registry.example.com/team/tool@sha256:…`.
   */
  static fromRegistry(reference: string): Image {
    const given = text("fromRegistry", reference);
    const bare = given.startsWith(REGISTRY) ? given.slice(REGISTRY.length) : given;
    return new Image({ ...NO_STEPS, reference: bare });
  }

  /**
   * Add packages of Debian, with what they depend on.
   *
   * @param packages Their names; `name=version` pins one.
   * @throws {InvalidRequest} It is an image of a registry.
   */
  aptInstall(...packages: Texts): Image {
    if (this.#steps.reference !== undefined) {
      throw refused(
        `aptInstall is for Image.debian(): packages of ${this.#steps.reference} are installed ` +
          "where that image is made",
      );
    }
    return this.#with({ packages: [...this.#steps.packages, ...flat("aptInstall", packages)] });
  }

  /**
   * Add Python packages, which must exist as wheels.
   *
   * @param requirements Their names, with version specifiers: `"pandas>=2"`.
   */
  pipInstall(...requirements: Texts): Image {
    const added = flat("pipInstall", requirements);
    return this.#with({ requirements: [...this.#steps.requirements, ...added] });
  }

  /**
   * Add lines that a shell runs in the machine, in order, before it is frozen.
   *
   * The machine has no network then: install packages with `aptInstall` and `pipInstall`.
   *
   * @param lines What `/bin/sh -c` reads.
   */
  runCommands(...lines: Texts): Image {
    return this.#with({ lines: [...this.#steps.lines, ...flat("runCommands", lines)] });
  }

  /** Set variables of what runs in the guest. */
  env(variables: Readonly<Record<string, string>>): Image {
    for (const each of Object.values(variables)) text("env", each);
    return this.#with({ variables: { ...this.#steps.variables, ...variables } });
  }

  /**
   * Have programs and code start in a folder.
   *
   * @param path In the guest.
   */
  workdir(path: string): Image {
    return this.#with({ folder: text("workdir", path) });
  }

  /**
   * Have programs and code run as another user than root.
   *
   * @param name A name of the image's, or `uid[:gid]`.
   */
  user(name: string): Image {
    return this.#with({ user: text("user", name) });
  }

  /**
   * Add a file of this host.
   *
   * @param source Its path here.
   * @param target Its path in the guest.
   * @param options `mode`: its permissions; those of a program if it is one here, else of a text.
   */
  addLocalFile(source: string, target: string, options: { mode?: number } = {}): Image {
    const here = resolve(text("addLocalFile", source));
    const added = { source: here, target: text("addLocalFile", target), mode: options.mode };
    return this.#with({ files: [...this.#steps.files, added] });
  }

  /**
   * Add a folder of this host with all that is in it.
   *
   * @param source Its path here.
   * @param target Its path in the guest.
   */
  addLocalDir(source: string, target: string): Image {
    return this.addLocalFile(source, target);
  }

  /**
   * Evaluate Python once before the machine is frozen: its names are there in each fork.
   *
   * @param code Such as `import numpy`; after that of an earlier `warmUp`.
   */
  warmUp(code: string): Image {
    return this.#with({ code: `${this.#steps.code}${text("warmUp", code)}\n` });
  }

  /**
   * Return the archive of its recipe, which `recipes.upload` takes.
   *
   * @throws {InvalidRequest} A file of this host cannot be read, or there is too much.
   */
  async archive(): Promise<Archive> {
    const { code, files } = this.#steps;
    const texts: [string, Buffer][] = code === "" ? [] : [[CODE_FILE, Buffer.from(code)]];
    const named = files.map((each, at): [string, string] => [inside(at), each.source]);
    return await ofParts(Buffer.from(String(this)), texts, named);
  }

  /** Its recipe, as TOML. */
  toString(): string {
    const steps = this.#steps;
    const parts = [`name = ${toml(NAME)}`];
    if (steps.folder !== undefined) parts.push(`cwd = ${toml(steps.folder)}`);
    if (steps.user !== undefined) parts.push(`user = ${toml(steps.user)}`);
    if (steps.reference !== undefined) {
      parts.push(`\n[image]\noci = ${toml(REGISTRY + steps.reference)}`);
    } else {
      const packages = list([...new Set(steps.packages)].sort());
      parts.push(`\n[image.debian]\nsuite = ${toml(steps.suite ?? "")}\npackages = ${packages}`);
    }
    if (steps.requirements.length > 0) {
      parts.push(`\n[pip]\nrequirements = ${list(steps.requirements)}`);
    }
    const variables = Object.entries(steps.variables);
    if (variables.length > 0) {
      const pairs = variables.map(([name, value]) => `${toml(name)} = ${toml(value)}`);
      parts.push(["\n[env]", ...pairs].join("\n"));
    }
    parts.push(`\n[warmup]\nruntime = "${steps.code === "" ? "auto" : "python"}"`);
    if (steps.code !== "") parts.push(`file = ${toml(CODE_FILE)}`);
    if (steps.lines.length > 0) parts.push(`run = ${list(steps.lines)}`);
    for (const [at, each] of steps.files.entries()) {
      parts.push(`\n[[files]]\nsource = ${toml(inside(at))}`, `target = ${toml(each.target)}`);
      if (each.mode !== undefined) parts.push(`mode = 0o${each.mode.toString(8)}`);
    }
    return [...parts, ""].join("\n");
  }

  #with(steps: Partial<Steps>): Image {
    return new Image({ ...this.#steps, ...steps });
  }
}

/** Return what a file or folder is called beside the recipe. */
function inside(number: number): string {
  return `files/${number}`;
}

function refused(message: string): InvalidRequest {
  return new InvalidRequest(message, { context: { field: "image" } });
}

/** Return a text that plain JavaScript may not have given. */
function text(called: string, given: string): string {
  if (typeof given === "string") return given;
  throw refused(`${called} takes texts, and ${JSON.stringify(given)} is none`);
}

/** Return texts that were given one by one, or as lists. */
function flat(called: string, given: Texts): string[] {
  return given.flat().map((each) => text(called, each));
}

/** Return texts as TOML, each on a line of its own. */
function list(texts: readonly string[]): string {
  return `[\n${texts.map((each) => `    ${toml(each)},\n`).join("")}]`;
}

/** Return a text as TOML, on one line and with few dots. */
function toml(value: string): string {
  const said = JSON.stringify(value).replaceAll("\u007f", "\\u007f");
  return said.split(".").length > DOTS_MAX + 1 ? said.replaceAll(".", "\\u002e") : said;
}

/**
 * Return what a request says for an image: one of this host is uploaded first.
 *
 * @internal
 */
export async function imageReference(
  http: Http,
  image: string | Image,
  onProgress: UploadProgress,
  signal?: AbortSignal,
): Promise<string> {
  if (!(image instanceof Image)) return image;
  return (await uploaded(http, await image.archive(), onProgress, signal)).recipe;
}
