"""Start the command line, as `ratchet` or, for launchers such as torchrun, `python -m ratchet`."""

import sys

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended: 128 + SIGINT


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while modules are imported."""
    try:
        from ratchet.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
