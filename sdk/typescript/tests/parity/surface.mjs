// Prints what the package exports: `node surface.mjs`, read by tests/contract/test_sdk_parity.py.
//
// {"Class": {"method": ["argument", "option", …], "property": null}}
import process from "node:process";
import { fileURLToPath } from "node:url";
import ts from "typescript";

const index = fileURLToPath(new URL("../../src/index.ts", import.meta.url));
const program = ts.createProgram([index], {
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.NodeNext,
  strict: true,
  lib: ["lib.es2023.d.ts", "lib.esnext.disposable.d.ts"],
  types: ["node"],
});
const checker = program.getTypeChecker();

/** Return the names of the members of an argument that holds options; none for another. */
function optionsOf(parameter) {
  const type = checker.getTypeOfSymbol(parameter);
  const parts = type.isUnion() ? type.types : [type];
  const ours = parts.filter((each) => isOptions(each));
  return ours.flatMap((each) => each.getProperties().map((member) => member.name));
}

/** Whether a type is an object of options: each may be left out, or it takes a signal. */
function isOptions(type) {
  if (!(type.flags & (ts.TypeFlags.Object | ts.TypeFlags.Intersection))) return false;
  if (type.getCallSignatures().length > 0 || type.getStringIndexType() !== undefined) return false;
  const members = type.getProperties();
  return members.some((each) => ["signal", "parallelMax", "url", "mode"].includes(each.name));
}

function argumentsOf(signatures) {
  const names = signatures.flatMap((signature) =>
    signature.getParameters().flatMap((each) => [each.name, ...optionsOf(each)]),
  );
  return [...new Set(names)].filter((name) => name !== "options");
}

function isPublic(member) {
  const declaration = member.valueDeclaration ?? member.declarations?.[0];
  const tags = declaration === undefined ? 0 : ts.getCombinedModifierFlags(declaration);
  const hidden = tags & (ts.ModifierFlags.Private | ts.ModifierFlags.Protected);
  const internal = member.getJsDocTags().some((each) => each.name === "internal");
  return !hidden && !internal && !/^(#|__)/.test(member.escapedName);
}

function described(type) {
  const found = {};
  for (const member of type.getProperties()) {
    if (!isPublic(member)) continue;
    const signatures = checker.getTypeOfSymbol(member).getCallSignatures();
    found[member.name] = signatures.length > 0 ? argumentsOf(signatures) : null;
  }
  return found;
}

const surface = {};
const exported = checker.getExportsOfModule(
  checker.getSymbolAtLocation(program.getSourceFile(index)),
);
for (const symbol of exported) {
  const real = symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol;
  if (!(real.flags & (ts.SymbolFlags.Class | ts.SymbolFlags.Interface))) continue;
  const members = described(checker.getDeclaredTypeOfSymbol(real));
  if (real.flags & ts.SymbolFlags.Class) {
    const made = checker.getTypeOfSymbolAtLocation(real, real.valueDeclaration);
    const statics = described(made);
    delete statics.prototype;
    Object.assign(members, statics);
    members.constructor = argumentsOf(made.getConstructSignatures());
  }
  surface[symbol.name] = members;
}
process.stdout.write(JSON.stringify(surface));
