/**
 * Text that a guest's kernel takes: any bytes without a zero, mostly UTF-8.
 *
 * In a string, a lone surrogate U+DC80 to U+DCFF stands for a byte that is not UTF-8, as in the
 * Python SDK.  JSON has no bytes: such text travels as `{"b64": "…"}` in the place of the string.
 */
import { Buffer } from "node:buffer";
import { InvalidRequest } from "./errors.gen.js";

const ESCAPE = 0xdc00;

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Return text as JSON has it. */
export function onWire(text: string): string | { b64: string } {
  return text.isWellFormed() ? text : { b64: asBase64(text) };
}

/** Return the bytes that text stands for, in base64. */
export function asBase64(text: string): string {
  return asBytes(text).toString("base64");
}

/** Return the bytes that text stands for. */
export function asBytes(text: string): Buffer {
  if (text.isWellFormed()) return Buffer.from(text);
  const pieces: Buffer[] = [];
  for (const point of text) {
    const unit = point.charCodeAt(0);
    if (point.isWellFormed()) {
      pieces.push(Buffer.from(point));
    } else if (unit >= ESCAPE + 0x80 && unit <= ESCAPE + 0xff) {
      pieces.push(Buffer.from([unit - ESCAPE]));
    } else {
      throw new InvalidRequest("path: holds a surrogate that stands for no byte", {
        context: { field: "path" },
      });
    }
  }
  return Buffer.concat(pieces);
}

/** Return the text whose bytes are `digits` in base64. */
export function fromBase64(digits: string): string {
  return fromBytes(Buffer.from(digits, "base64"));
}

/** Return the text of these bytes. */
export function fromBytes(bytes: Buffer): string {
  try {
    return strict.decode(bytes);
  } catch {
    return escaped(bytes);
  }
}

function escaped(bytes: Buffer): string {
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const length = characterLength(bytes, at);
    if (length > 0) {
      text += bytes.toString("utf8", at, at + length);
      at += length;
    } else {
      text += String.fromCharCode(ESCAPE + (bytes[at] ?? 0));
      at += 1;
    }
  }
  return text;
}

/** Return how many bytes the character at a place has; 0 if there is none. */
function characterLength(bytes: Buffer, at: number): number {
  for (let length = 1; length <= 4 && at + length <= bytes.length; length += 1) {
    try {
      strict.decode(bytes.subarray(at, at + length));
      return length;
    } catch {
      // it may need one more byte
    }
  }
  return 0;
}

/** Compare texts by their characters' numbers, which is how Python sorts them. */
export function byCharacters(a: string, b: string): number {
  const [left, right] = [a[Symbol.iterator](), b[Symbol.iterator]()];
  for (;;) {
    const [one, other] = [left.next(), right.next()];
    if (one.done || other.done) return Number(!one.done) - Number(!other.done);
    const apart = (one.value.codePointAt(0) ?? 0) - (other.value.codePointAt(0) ?? 0);
    if (apart !== 0) return apart;
  }
}

/** Return text in quotes, shortened, as errors repeat it. */
export function cited(text: string, charsMax = 80): string {
  return `'${JSON.stringify(text.slice(0, charsMax)).slice(1, -1).replaceAll('\\"', '"')}'`;
}
