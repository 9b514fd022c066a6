"""Tab completion of commands and options, for bash, and for zsh by ``bashcompinit``."""

from collections.abc import Callable, Iterable, Mapping

from stateline.cli.parser import Parser

_SCRIPT = """\
# bash: eval "$(stateline --completion)"; zsh: first autoload bashcompinit && bashcompinit
_stateline() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  [ "$COMP_CWORD" = 1 ] && words="{commands}"
  [ "$COMP_CWORD" != 1 ] && [ "${{2#-}}" = "$2" ] && words=""
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _stateline stateline
"""


def completion(commands: Iterable[str], make: Callable[[str], Parser]) -> str:
    """The script that a shell evaluates."""
    options: Mapping[str, str] = {name: " ".join(_options(make(name))) for name in commands}
    cases = "\n".join(f'    {name}) words="{own}" ;;' for name, own in options.items())
    return _SCRIPT.format(cases=cases, commands=" ".join(options))


def _options(parser: Parser) -> list[str]:
    known = {name for name in parser._option_string_actions if name.startswith("--")}
    return sorted(known | {"--import"})
