import { defineConfig } from "vitest/config";

// `unit` needs nothing; `daemon` runs against the daemon that FORKD_URL and FORKD_TCP_URL name
// (tests/functional/test_sdk_typescript.py starts one).
export default defineConfig({
  test: {
    testTimeout: 60_000,
    projects: [
      { test: { name: "unit", include: ["tests/unit/*.test.ts"] } },
      { test: { name: "daemon", include: ["tests/daemon/*.test.ts"], fileParallelism: false } },
    ],
  },
});
