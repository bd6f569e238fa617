"""`python -m forkd.daemon` is `forkd-daemon`, without needing to know where scripts are."""

from forkd.daemon.main import main

main()
