"""Lists the plugins of support/; nothing else.

`needs` and `soak` are not here: they add options, so pyproject.toml loads them
before the command line is read.
"""

pytest_plugins = [
    "tests.support.interrupts",
    "tests.support.leaks",
    "tests.support.daemon",
    "tests.support.cli",
    "tests.support.real_host",
    "tests.support.bakes",
    "tests.support.container_image",
    "tests.support.service_host",
    "tests.support.web",
    "tests.support.fault_trial",
    "tests.support.warm",
]
