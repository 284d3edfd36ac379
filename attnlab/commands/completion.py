"""`attnlab completion`: a script that completes commands, flags, configs and recipes in a shell.

The script holds all that it completes, so that completing starts no Python; a new version of attnlab wants a new one.
"""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping

from attnlab.commands.arguments import asks_for_help
from attnlab.errors import UserError, nearest

Command = Callable[[list[str]], int]

USAGE = """\
usage: attnlab completion SHELL, one of bash, zsh and fish

The script is printed; where shells look for it:
  bash  ~/.local/share/bash-completion/completions/attnlab
  zsh   _attnlab in a folder of fpath, such as ~/.zfunc/_attnlab
  fish  ~/.config/fish/completions/attnlab.fish"""

SUBCOMMANDS = {'sweep': ('worker', 'status'), 'data': ('list', 'prepare'), 'completion': ('bash', 'zsh', 'fish')}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What can be completed.

    Attributes:
      commands: their names.
      words: flags of each command, and what else stands by itself; those of a subcommand as `sweep status`.
      values: of flags that take one of several.
      configs: that come with attnlab.
      recipes: of the zoo.
    """

    commands: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[str, ...]]
    configs: tuple[str, ...]
    recipes: tuple[str, ...]


def main(argv: list[str], commands: Mapping[str, Command]) -> int:
    """Prints the script for a shell."""
    if asks_for_help(argv):
        print(USAGE)
        return 0
    if len(argv) != 1:
        raise UserError('usage: attnlab completion SHELL, one of bash, zsh and fish')
    if argv[0] not in SCRIPTS:
        raise UserError(f'there is no completion for {argv[0]!r}{nearest(argv[0], SCRIPTS)}')
    print(SCRIPTS[argv[0]](vocabulary(commands)), end='')
    return 0


def vocabulary(commands: Mapping[str, Command]) -> Vocabulary:
    """What there is to complete, read from the help of every command."""
    from attnlab.configuration import PACKAGED
    from attnlab.data.long_range.preparable import DATASETS
    from attnlab.zoo import ZOO

    words: dict[str, tuple[str, ...]] = {}
    values: dict[str, tuple[str, ...]] = {}
    for name, command in commands.items():
        subcommands = [word for parent, found in SUBCOMMANDS.items() if parent == name for word in found]
        for path in (name, *(f'{name} {word}' for word in subcommands)):
            text = _help(command, path.split()[1:])
            words[path] = (*(subcommands if path == name else ()), *_flags(text))
            values |= _choices(text)
    words['zoo'] += tuple(ZOO)
    words['data prepare'] += tuple(DATASETS)
    configs = sorted(str(path.relative_to(PACKAGED).with_suffix('')) for path in PACKAGED.glob('**/[!_]*.py'))
    return Vocabulary(tuple(commands), words, values, tuple(configs), tuple(ZOO))


def _help(command: Command, argv: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command([*argv, '--help'])
    return text.getvalue()


def _flags(text: str) -> list[str]:
    """The flags that a help text lists; those that want a value end in `=`, as `--config=` of a usage does."""
    found = re.findall(r'^ *--(\[no\])?(\w+):', text, flags=re.MULTILINE)
    config = ['--config='] if '--config=' in text else []
    return list(dict.fromkeys([*config, *(f'--{name}{"" if no else "="}' for no, name in found), '--help']))


def _choices(text: str) -> dict[str, tuple[str, ...]]:
    """The values of the flags that take one of several."""
    return {f'--{name}=': tuple(values.split('|')) for name, values in re.findall(r'--(\w+): <([\w|]+)>:', text)}


def bash(known: Vocabulary) -> str:
    """The script for bash, which takes `=` and `:` for ends of words."""
    return f"""\
# bash completion of attnlab, made by: attnlab completion bash
_attnlab() {{
    local line=${{COMP_LINE:0:COMP_POINT}} current candidates stem
    local -a given
    current=${{line##*[[:space:]]}}
    read -ra given <<< "$line"
{_choose(known)}
    stem=${{current%"${{current##*[=:]}}"}}
    mapfile -t COMPREPLY < <(compgen -W "$candidates" -- "$current")
    if [[ ${{#COMPREPLY[@]}} == 0 ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "${{current#"$stem"}}")
        compopt -o filenames
        return
    fi
    [[ ${{COMPREPLY[0]}} == *= || $current == --config=* ]] && compopt -o nospace
    COMPREPLY=("${{COMPREPLY[@]#"$stem"}}")
}}
complete -F _attnlab attnlab
"""


def zsh(known: Vocabulary) -> str:
    """The script for zsh."""
    return f"""\
#compdef attnlab
# zsh completion of attnlab, made by: attnlab completion zsh
_attnlab() {{
    local current=$PREFIX candidates
    local -a given
    given=("${{(@)words[1,CURRENT-1]}}" "$current")
    setopt localoptions ksharrays
{_choose(known)}
    unsetopt ksharrays
    compadd -S '' -- ${{=candidates}} && return
    [[ $current == --*=* ]] && compset -P '*='
    _files
}}
compdef _attnlab attnlab
"""


def fish(known: Vocabulary) -> str:
    """The script for fish."""
    cases = ''.join(
        f"        case '{path}' '{path} *'\n            printf '%s\\n' {' '.join(words)}\n"
        for path, words in sorted(known.words.items(), reverse=True)
    )
    values = ''.join(
        f"        case '{flag}*'\n            printf '{flag}%s\\n' {' '.join(found)}\n            return\n"
        for flag, found in known.values.items()
    )
    return f"""\
# fish completion of attnlab, made by: attnlab completion fish
function __attnlab
    set -l given (commandline -opc)[2..]
    set -l current (commandline -ct)
    switch $current
        case '*zoo=*'
            set -l recipes {' '.join(known.recipes)}
            printf '%s\\n' (string replace -r '[^=+*,]*$' '' -- $current)$recipes
            return
        case '--config=*'
            printf '--config=%s\\n' {' '.join(known.configs)}
            return
{values}        case '--*=*'
            set -l flag (string replace -r '=.*' '=' -- $current)
            __fish_complete_path (string replace -r '^[^=]*=' '' -- $current) | string replace -r -- '^' $flag
            return
    end
    if test (count $given) -eq 0
        printf '%s\\n' {' '.join(known.commands)} --help --version
        return
    end
    set -l words (string match -v -- '-*' $given)
    switch "$words[1..2]"
{cases}    end
    __fish_complete_path $current
end
complete -c attnlab -f -a '(__attnlab)'
"""


def _choose(known: Vocabulary) -> str:
    """Lines of bash and zsh that set `candidates`, by `current` and the words `given`; to nothing for files."""
    words = ''.join(
        f"        '{path}'{'' if ' ' in path else '*'}) candidates='{' '.join(found)}' ;;\n"
        for path, found in sorted(known.words.items(), reverse=True)
    )
    values = ''.join(
        f"        {flag}*) candidates='{' '.join(flag + value for value in found)}' ;;\n"
        for flag, found in known.values.items()
    )
    return f"""\
    local recipe
    case $current in
        *zoo=*)
            for recipe in {' '.join(known.recipes)}; do
                candidates+=" ${{current%"${{current##*[=+*,]}}"}}$recipe"
            done ;;
        --config=*) candidates='{' '.join(f'--config={name}' for name in known.configs)}' ;;
{values}        --*=*) candidates= ;;
        *) case "${{given[1]}} ${{given[2]}}" in
        "$current "*) candidates='{' '.join((*known.commands, '--help', '--version'))}' ;;
{words}        esac ;;
    esac"""


SCRIPTS: Mapping[str, Callable[[Vocabulary], str]] = {'bash': bash, 'zsh': zsh, 'fish': fish}
