"""Build the shell command lines of a session, each of which continues where the previous one ended.

Each command runs in a new shell, which writes its directory and exported variables into a file when
it exits. The next shell reads them. So the exit code of a command is that of its process, and no
output of a command can be mistaken for the next prompt.
"""

from __future__ import annotations

from ratchet.sandbox.base import FIXED_ENVIRONMENT

STATE_FILE = ".ratchet-shell"
EXPORTED_VARIABLES = " ".join(f"{name}={value}" for name, value in FIXED_ENVIRONMENT.items())
# The script's arguments are the state file ($1), the command ($2), and a text ($3) that is printed
# at the end of stdout and stderr to mark them as complete.
SCRIPT = (
    f"export {EXPORTED_VARIABLES}"
    + r"""
_state=$1 _end=$3 _home=$PWD
[ -r "$_state" ] && . "$_state" 2>/dev/null
trap '_code=$?; trap - EXIT
case $PWD/ in "$_home"/*) RATCHET_CWD=".${PWD#"$_home"}" ;; *) RATCHET_CWD=$PWD ;; esac
export RATCHET_CWD
{ export -p; echo "cd \"\$_home\" && cd \"\$RATCHET_CWD\""; } >"$_state" 2>/dev/null
printf %s "$_end"; printf %s "$_end" >&2; exit $_code' EXIT
eval "$2"
"""
)


def build_shell_command(
    shell: str, command: str, state_file: str, end_marker: str = ""
) -> list[str]:
    """Return the words that run a session's command in a new shell.

    Args:
        shell: The shell's program.
        command: The text of the command.
        state_file: Path of the file with the directory and variables of the previous command.
        end_marker: Text to print at the end of stdout and stderr.
    """
    return [shell, "-c", SCRIPT, shell, state_file, command, end_marker]
