import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, expect, onTestFinished, test } from "vitest";
import {
  BuildError,
  type BuildOptions,
  type BuildResult,
  Client,
  Conflict,
  InvalidRequest,
  NotFound,
} from "../../src/index.js";
import { daemons } from "./daemons.js";

/** Return a build context with a few files. */
function context(): string {
  const folder = mkdtempSync(join(tmpdir(), "fk"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  mkdirSync(join(folder, "src/deep"), { recursive: true });
  for (const name of ["one.txt", "src/main.py", "src/deep/tool", "src/secret.key"]) {
    writeFileSync(join(folder, name), `${name}\n`);
  }
  writeFileSync(join(folder, ".dockerignore"), "**/*.key\n");
  return folder;
}

/** Return the lines of the steps that were done, not found. */
function done(made: BuildResult): number[] {
  return made.steps.filter((each) => each.changesFiles && !each.cached).map((each) => each.line);
}

describe.each(daemons())("over $name", ({ name, options }) => {
  const client = new Client(options);
  const tag = `app-${name.length}`;

  const build = async (folder: string, text: string, more: BuildOptions = {}) => {
    writeFileSync(join(folder, "Dockerfile"), text);
    return await client.builds.build(folder, more);
  };

  /** Remove what a test has built, the links included. */
  const cleanUp = () =>
    onTestFinished(async () => {
      const built = (await client.snapshots.list()).filter((each) => each.tag !== "python");
      for (const each of built.reverse()) {
        await client.snapshots.delete(each.tag, { cascade: true }).catch(() => {});
      }
    });

  test("a build copies what is not ignored, tells its steps, and is found again", async () => {
    const folder = context();
    cleanUp();
    const text = [
      "FROM python",
      "WORKDIR /srv",
      "ARG MODE",
      "ENV MODE=$MODE",
      "COPY src .",
      "RUN echo built",
      "COPY --chown=7:8 --chmod=600 one.txt /etc/one",
      "COPY <<there /",
      "mode $MODE",
      "there",
      'CMD ["run"]',
      "",
    ].join("\n");
    const told: string[] = [];
    const steps: string[] = [];
    const more = { tag, buildArgs: { MODE: `fast ${name}` } };

    const made = await build(folder, text, {
      ...more,
      onStep: ({ text: said, cached }) => steps.push(`${cached ? "found" : "done"} ${said}`),
      onProgress: ({ stage, message }) => told.push(`${stage}: ${message}`),
    });

    expect(done(made)).toEqual([5, 6, 7, 8]);
    expect(made.snapshot).toMatchObject({ tag, status: "ready", chainDepth: 5 });
    expect(made.steps.map((each) => each.number)).toEqual([1, 2, 3, 4, 5, 6, 7, 8, 9]);
    expect(steps).toHaveLength(9);
    expect(steps).toContain("done RUN echo built");
    expect(told).toContain("step: [6/9] RUN echo built");
    expect(told).toContain("run: built");
    {
      await using sandbox = await client.sandbox(tag);
      const { files } = sandbox;
      const there = (await files.list("/srv")).map((each) => each.name);
      expect(there).toEqual(expect.arrayContaining(["deep", "main.py"]));
      expect(await files.exists("/srv/secret.key")).toBe(false);
      expect(await files.readText("/srv/deep/tool")).toBe("src/deep/tool\n");
      expect(await files.readText("/there")).toBe(`mode fast ${name}\n`);
    }
    const info = await client.snapshots.info(tag);
    expect(info.config).toMatchObject({ cwd: "/srv", cmd: ["run"] });

    const again = await build(folder, text, more);
    expect([done(again), again.snapshot]).toEqual([[], made.snapshot]);
    writeFileSync(join(folder, "src/secret.key"), "another, and left out");
    expect(done(await build(folder, text, more))).toEqual([]);
    writeFileSync(join(folder, "one.txt"), "changed\n");
    expect(done(await build(folder, text, more))).toEqual([7, 8]);
    expect(done(await build(folder, "FROM python\nRUN echo a\n", { cache: false }))).toEqual([2]);
  });

  test("a stage copies from another, and no stage that is not needed is built", async () => {
    const folder = context();
    cleanUp();
    const first = "FROM python AS Build\nCOPY src /out\n";
    const text =
      `${first}FROM python AS unused\nRUN exit 1\nFROM python\n` +
      "COPY --from=build /out/main.py /bin/tool\nCOPY --from=0 /out /all\n" +
      "COPY --from=build /out/m*.py /some/\n";
    expect(done(await build(folder, text, { tag }))).toEqual([2, 6, 7, 8]);
    await using sandbox = await client.sandbox(tag);
    for (const path of ["/bin/tool", "/all/main.py", "/some/main.py"]) {
      expect(await sandbox.files.readText(path)).toBe("src/main.py\n");
    }
    expect(await sandbox.files.readText("/all/deep/tool")).toBe("src/deep/tool\n");
    for (const source of ["/missing", "/out/x*"]) {
      const failed = build(folder, `${first}FROM python\n\nCOPY --from=0 ${source} /x\n`);
      await expect(failed).rejects.toThrow(BuildError);
      await expect(failed).rejects.toThrow(/^Dockerfile:5: COPY: n/);
    }
  });

  test("what is wrong names file and line, before anything is built", async () => {
    const folder = context();
    const before = await client.snapshots.list();
    for (const [text, message] of [
      ["FROM python\nRUN true\nONBUILD RUN x", /^Dockerfile:3: ONBUILD is not supported/],
      ["FROM python\nRUN true\nCOPY src/secret.key /", /^Dockerfile:3: COPY: .*\.dockerignore:1/],
      ["FROM python\nRUN true\nCOPY ../x /", /^Dockerfile:3: COPY: '..\/x' leads out/],
      ["FROM ./image.tar\n", /^Dockerfile:1: \.\/image\.tar is an image of this host/],
      ["FROM python\nARG A=\\\n'x\n", /^Dockerfile:2: ARG: a single quote/],
    ] as const) {
      const refused = build(folder, text);
      await expect(refused).rejects.toThrow(InvalidRequest);
      await expect(refused).rejects.toThrow(message);
    }
    await expect(client.builds.build(`${folder}/none`)).rejects.toThrow(/does not exist/);
    const absent = client.builds.build(folder, { dockerfile: `${folder}/none` });
    await expect(absent).rejects.toThrow(NotFound);
    await expect(build(folder, "FROM python\n", { ready: "true" })).rejects.toThrow(/with warm/);
    await expect(build(folder, "FROM python\n", { warm: true })).rejects.toThrow(/no ENTRYPOINT/);
    await expect(build(folder, "FROM python\n", { tag: "a b" })).rejects.toThrow(
      /"a b" is no name/,
    );
    const misspelt = { buildargs: {} } as BuildOptions;
    await expect(build(folder, "FROM python\n", misspelt)).rejects.toThrow(
      /did you mean buildArgs/,
    );
    expect(await client.snapshots.list()).toEqual(before);
  });

  test("a failed step says how, and leaves the steps before it", async () => {
    const folder = context();
    cleanUp();
    const text = `FROM python\nENV A='${name}'\nRUN echo one\n\nRUN exit 3\n`;
    const failed = build(folder, text, { tag });
    await expect(failed).rejects.toThrow(BuildError);
    await expect(failed).rejects.toThrow(/^Dockerfile:5: RUN exit 3: exited with 3\n/);
    expect(done(await build(folder, text.replace("exit 3", "echo 3")))).toEqual([5]);
    await expect(build(folder, "FROM python\nRUN true\n", { tag: "python" })).rejects.toThrow(
      Conflict,
    );
  });

  test("an aborted build leaves nothing", async () => {
    const folder = context();
    const controller = new AbortController();
    const onProgress = ({ message }: { message?: string | null }) => {
      if (message?.includes("forever")) controller.abort(new RangeError("enough"));
    };
    const { signal } = controller;
    const made = build(folder, 'FROM python\nRUN ["forever"]\n', { signal, onProgress });
    await expect(made).rejects.toThrow(RangeError);
    expect(await client.sandboxes.list()).toEqual([]);
  });
});
