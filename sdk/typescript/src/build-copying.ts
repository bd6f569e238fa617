/** What a COPY or an ADD copies, and to where. */
import type { Context, Entry } from "./build-context.js";
import { flag, type Instruction } from "./dockerfile-reading.js";
import { joined } from "./dockerfile-settings.js";
import { type Expander, Malformed, split } from "./dockerfile-words.js";
import { cited } from "./text.js";

const URL = /^(?:[a-zA-Z][a-zA-Z0-9+.-]*:\/\/|git@)/;
const MODE = /^[0-7]{3,4}$/;
const OWNER = /^[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?$/;

/** One source. */
export interface Part {
  /** As it is written. */
  said: string;
  /** What it is in the context; undefined if it is of another origin. */
  entry: Entry | undefined;
  /** The text of a heredoc. */
  content: string;
  /** Names what is in it. */
  key: unknown;
  /** What a copy of it is called in a folder. */
  name: string;
  /** Whether it is an archive whose members are copied. */
  unpacked: boolean;
}

/** Whether what is in a source is copied into the target, a folder, and not it itself. */
export function isWhole(part: Part): boolean {
  return part.unpacked || part.entry?.kind === "folder";
}

/** Files that a step copies. */
export interface CopyAction {
  kind: "copy";
  /** A stage's number, or an image's name; null for the context. */
  origin: number | string | null;
  /** What is copied. */
  parts: readonly Part[];
  /** To where; absolute. */
  target: string;
  /** Whether `target` is a folder for certain; else that depends on what is there. */
  isFolder: boolean;
  /**
   * Whose the copies are: a name or a number, with `:` and a group or without; null for root, and
   * for whom an unpacked archive says.
   */
  owner: string | null;
  /** Their permissions; null for those that they have. */
  mode: number | null;
}

/** Return what the result depends on. */
export function saidOf(action: CopyAction): unknown[] {
  const keys = action.parts.map((part) => part.key);
  return [keys, action.target, action.isFolder, action.owner, action.mode];
}

/**
 * Return what an instruction copies.
 *
 * @param each A COPY or an ADD.
 * @param origin What it copies from; null for the context.
 * @throws {Malformed} It is malformed, or there are no such files.
 */
export async function copyAction(
  each: Instruction,
  words: Expander,
  cwd: string,
  context: Context,
  origin: number | string | null,
): Promise<CopyAction> {
  const chown = flag(each, "chown");
  const owner = chown === undefined ? null : words.word(chown);
  if (owner !== null && !OWNER.test(owner)) {
    throw new Malformed(`--chown is USER or USER:GROUP, not ${cited(owner)}`);
  }
  const texts = each.words ?? split(each.rest);
  if (texts.length < 2) throw new Malformed("needs a source and a target");
  const sources = texts.map((text) => words.word(text));
  const target = sources.pop() ?? "";
  if (target === "") throw new Malformed(`the target ${cited(texts.at(-1) ?? "")} is empty`);
  const parts = await partsOf(each, sources, words, context, origin);
  const isFolder = /\/\.?$/.test(target) || target === "." || target === "..";
  if (parts.length > 1 && !isFolder) {
    const said = `copies several files, so that ${cited(target)} must end with /, as a folder`;
    throw new Malformed(said);
  }
  const mode = modeOf(words.word(flag(each, "chmod") ?? ""));
  return { kind: "copy", origin, parts, target: joined(cwd, target), isFolder, owner, mode };
}

async function partsOf(
  each: Instruction,
  sources: readonly string[],
  words: Expander,
  context: Context,
  origin: number | string | null,
): Promise<Part[]> {
  const heredocs = [...each.heredocs];
  const parts: Part[] = [];
  const plain = { entry: undefined, content: "", unpacked: false };
  for (const said of sources) {
    const heredoc = said.includes("<<") ? heredocs.shift() : undefined;
    if (heredoc !== undefined) {
      const { name, expands } = heredoc;
      const content = expands ? words.text(heredoc.content) : heredoc.content;
      parts.push({ ...plain, said: name, content, key: ["text", name, content], name });
    } else if (URL.test(said)) {
      throw new Malformed(
        `${said.slice(0, 80)} is a remote file, which is not supported: download it to the ` +
          "context, or have a RUN download it",
      );
    } else if (said === "") {
      throw new Malformed("a source is empty");
    } else if (origin !== null) {
      if (said.split("/").includes("..")) {
        throw new Malformed(`${cited(said)} holds '..'; name files by their absolute paths`);
      }
      parts.push({ ...plain, said: joined("/", said), key: ["from", said], name: "" });
    } else {
      for (const entry of await context.sources(said)) {
        parts.push(await partOf(each, said, entry, context));
      }
    }
  }
  return parts;
}

async function partOf(
  each: Instruction,
  said: string,
  entry: Entry,
  context: Context,
): Promise<Part> {
  const unpacked = each.keyword === "ADD" && (await context.isArchive(entry));
  const path = /[*?[]/.test(said) ? entry.path : said.replace(/\/+$/, "");
  const name = path.slice(path.lastIndexOf("/") + 1);
  let key: unknown;
  if (entry.kind !== "folder") {
    key = ["file", unpacked ? "" : name, await context.digest(entry), unpacked];
  } else {
    const head = entry.path === "" ? 0 : entry.path.length + 1;
    const inside: [string, string][] = [];
    for (const below of await context.below(entry)) {
      inside.push([below.path.slice(head), await context.digest(below)]);
    }
    key = ["folder", inside];
  }
  return { said, entry, content: "", key, name, unpacked };
}

function modeOf(text: string): number | null {
  if (text === "") return null;
  if (MODE.test(text)) return Number.parseInt(text, 8);
  throw new Malformed(`--chmod is an octal number such as 755, not ${cited(text)}`);
}
