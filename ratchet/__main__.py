"""Start the command line, as `ratchet` or, for launchers such as torchrun, `python -m ratchet`."""

import sys

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended: 128 + SIGINT


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while modules are imported."""
    if sys.platform == "win32":
        sys.exit("Ratchet runs on Linux and macOS. On Windows, install it in WSL: wsl --install")
    try:
        from ratchet.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
