import type { ClientOptions } from "../../src/index.js";

/** The addresses of the daemon that tests/functional/test_sdk_typescript.py has started. */
export function daemons(): { name: string; options: ClientOptions }[] {
  const { FORKD_TEST_URL: url, FORKD_TEST_TCP_URL: tcp, FORKD_TEST_TOKEN: token } = process.env;
  if (!url || !tcp || !token) throw new Error("tests/functional/test_sdk_typescript.py runs these");
  return [
    { name: "a Unix socket", options: { url } },
    { name: "TCP with a token", options: { url: tcp, token } },
  ];
}
