# Shared by the scripts beside it, which source it from the repository's root.
export PYTHONUNBUFFERED=1 NO_COLOR=1 CI=true

readme_command() { # the fenced line after the marker <!-- ci: NAME --> in README.md
  awk -v marker="<!-- ci: $1 -->" '$0 == marker {found = 1; next} found && /^```/ {fences++; next}
    found && fences == 1 {print} fences == 2 {exit}' README.md
}

marked_commands() { # fail unless README.md has a command for each of these names
  for name in "$@"; do
    [ -n "$(readme_command "$name")" ] || { echo "README.md has no command marked ci: $name" >&2; return 1; }
  done
}

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
