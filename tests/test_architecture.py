"""Imports run one way, and a few habits hold everywhere; read from syntax trees, so that nothing need be imported."""

import ast
import functools
import graphlib
import pathlib
import sys
from collections.abc import Iterator, Mapping, Set

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {
                'errors',
                'flags',
                'files',
                'tables',
                'locks',
                'typing',
                'signature',
                'module',
                'config',
                'configuration',
                'config_keys',
                'figures',
                'renamed',
                'trust',
                'context',
                'random',
            },
            {'functional'},
            {'nn', 'losses'},
            {'mixers'},
            {'blocks'},
            {'zoo', 'models'},
            {'metrics', 'data'},
            {'tasks'},
            {'train'},
            {'evals'},
            {'runs'},
            {'sweep', 'convert', 'quantize'},
            {'compare', 'analysis'},
            {'experiment', 'testing', 'run_config', 'commands', 'cli', '__init__', '__main__'},
        ),
    )
)
"""Parts of attnlab from the bottom up: each may import those below it, and those beside it."""

APART = frozenset({'zoo', 'models'})
"""Parts side by side that do not know each other."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every file of both packages, by the name that it is imported by."""
    files = (path for package in ('attnlab', 'pallas_kernels') for path in sorted((ROOT / package).rglob('*.py')))
    return {dotted(path): ast.parse(path.read_text()) for path in files}


def dotted(path: pathlib.Path) -> str:
    """The name that a file is imported by; that of a package for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """What a file imports anywhere, in functions too; names from a package are spelled out, for they may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f'{"." * node.level}{node.module or ""}.{alias.name}' for alias in node.names)


def importing(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """The files that each file imports, of those given."""
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for imported in imports(tree):
            while imported and imported not in trees:
                imported = imported.rpartition('.')[0]
            if imported:
                found[name].add(imported)
    return found


def circles(graph: Mapping[str, Set[str]]) -> list[str]:
    """Circles of a graph, as `a > b > a`, until none is left when an arrow of each is taken away."""
    left, found = {name: set(targets) for name, targets in graph.items()}, []
    while True:
        try:
            tuple(graphlib.TopologicalSorter(left).static_order())
            return found
        except graphlib.CycleError as error:
            # Backwards: each is imported by the next.
            circle = error.args[1]
            found.append(' > '.join(reversed(circle)))
            left[circle[1]].remove(circle[0])


def height(part: str) -> int:
    """The layer of a part of attnlab."""
    for place, layer in enumerate(LAYERS):
        if part in layer:
            return place
    raise AssertionError(f'attnlab.{part} has no place in the import rule')


def part_of(module: str) -> str:
    """The part of attnlab that a dotted name belongs to; what is in no part is in the package's own `__init__`."""
    parts = module.split('.')
    return parts[1] if len(parts) > 1 and parts[1] in frozenset().union(*LAYERS) else '__init__'


def forbidden(importer: str, imported: str) -> str | None:
    """Why a module may not import another, both by dotted name; `None` when it may."""
    package, target = importer.split('.')[0], imported.split('.')[0]
    if not target:
        return 'relative: name the module in full'
    if target in ('configs', 'experiments', 'scripts', 'tests'):
        return f'{package} does not know {target}'
    if package == 'pallas_kernels':
        allowed = target in ('jax', 'pallas_kernels') or target in sys.stdlib_module_names
        return None if allowed else f'pallas_kernels stands on jax alone, not on {target}'
    if target != 'attnlab':
        return None
    part, other = part_of(importer), part_of(imported)
    if part == other:
        return None
    if height(other) > height(part):
        return f'{part} lies below {other}'
    return f'{part} and {other} lie apart' if {part, other} <= APART else None


def configs_asked_for_defaults(tree: ast.AST) -> list[int]:
    """The lines that call `.get` on something named for a config."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == 'get'
        and ('config' in (receiver := ast.unparse(node.func.value)).lower() or 'cfg' in receiver.lower())
    ]


def environment_reads(tree: ast.AST) -> list[int]:
    """The lines that name the process environment."""
    names = ('environ', 'environb', 'getenv', 'putenv')
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == 'os':
            found += [node.lineno for alias in node.names if alias.name in names]
    return found


def calls_on_import(tree: ast.Module) -> list[int]:
    """The lines at the top of a module that call something for its effect; derivative rules are the exception."""
    return [
        node.lineno
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and not (isinstance(node.value.func, ast.Attribute) and node.value.func.attr in ('defvjp', 'defjvp'))
    ]


def writes(tree: ast.AST) -> list[int]:
    """The lines that write a file by hand, so that a reader could meet half of it, or replace one."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in ('write_text', 'write_bytes') or ast.unparse(node.func) == 'os.replace')
    ]


def programs_of_parts(tree: ast.AST) -> list[int]:
    """The lines of dataclasses and of classes with a base, which a config may name, that run or end programs."""
    parts = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (node.bases or any('dataclass' in ast.unparse(each) for each in node.decorator_list))
    ]
    used = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Attribute)]
    return [node.lineno for node in used if ast.unparse(node).startswith(('subprocess.', 'os.system', 'os.kill'))]


FRONT = ('attnlab.functional.cores', 'attnlab.functional.ring', 'attnlab.functional.sequence')
"""What reaches the cores of pallas_kernels; all else goes through the first, which knows of meshes."""

CORES = (
    'attention',
    'attention_part',
    'cross_entropy',
    'cross_entropy_part',
    'delta_rule',
    'diagonal_low_rank',
    'linear_attention',
    'linear_scan',
    'long_conv',
    'selective_scan',
    'short_conv',
)


def core_calls(tree: ast.AST) -> list[int]:
    """The lines that name a core of pallas_kernels itself."""
    named = [f'pallas_kernels.{core}' for core in CORES]
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) in named]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == 'pallas_kernels':
            found += [node.lineno for alias in node.names if alias.name in CORES]
    return found


def broken_habits(name: str, tree: ast.Module) -> Iterator[str]:
    """What a file does that none does, as lines to read."""
    if name.endswith('.utils'):
        yield f'{name}: a helper lives with its one user, or in a module named for its subject'
    findings = {
        'a config is asked for what it has, without a default': configs_asked_for_defaults(tree),
        # Which sets those of the compilers that it calls.
        'nothing depends on environment variables': environment_reads(tree)
        if name != 'attnlab.train.topologies'
        else [],
        'files are written by attnlab.files': writes(tree)
        if name.startswith('attnlab.') and name != 'attnlab.files'
        else [],
        'cores are called through attnlab.functional.cores': core_calls(tree)
        if name.startswith('attnlab.') and name not in FRONT
        else [],
        'what a config may name runs no program': programs_of_parts(tree),
        'nothing happens on import': [] if name.endswith('.__main__') else calls_on_import(tree),
    }
    yield from (f'{name}, line {line}: {reason}' for reason, lines in findings.items() for line in lines)


def test_imports_run_one_way():
    wrong = [
        f'{importer} imports {imported}: {reason}'
        for importer, tree in trees().items()
        for imported in imports(tree)
        if (reason := forbidden(importer, imported)) is not None
    ]
    assert not wrong, '\n'.join(wrong)


def test_no_files_import_each_other_in_a_circle():
    found = circles(importing(trees()))
    assert not found, '\n'.join(found)


def test_no_rooms_import_each_other_in_a_circle():
    rooms: dict[str, set[str]] = {}
    for importer, imported in importing(
        {name: t for name, t in trees().items() if name.startswith('attnlab.')}
    ).items():
        rooms.setdefault(part_of(importer), set()).update({part_of(name) for name in imported} - {part_of(importer)})
    found = circles(rooms)
    assert not found, '\n'.join(found)


def test_habits():
    wrong = [line for name, tree in trees().items() for line in broken_habits(name, tree)]
    assert not wrong, '\n'.join(wrong)


def test_both_packages_are_read_whole():
    assert {'attnlab', 'attnlab.cli', 'attnlab.nn.norms', 'pallas_kernels.attention.api'} < trees().keys()
    assert 'attnlab.compare.runs_table' in importing(trees())['attnlab.commands.compare'], 'imports in functions count'


def test_every_part_has_a_place():
    known = frozenset().union(*LAYERS)
    there = [path for path in (ROOT / 'attnlab').iterdir() if not path.is_symlink()]
    parts = {path.stem for path in there if path.suffix == '.py' or any(path.glob('*.py'))}
    assert not parts - known, 'without a place in the import rule'


REFUSED = (
    ('attnlab.nn.norms', 'attnlab.train.loop'),
    ('attnlab.mixers.softmax.attention', 'attnlab.zoo.ZOO'),
    ('attnlab.zoo.softmax.baselines', 'attnlab.models.stack.Stack'),
    ('attnlab.models.stack', 'attnlab.zoo'),
    ('attnlab.config', 'attnlab.functional.rotary'),
    ('attnlab.train.loop', 'attnlab.make_mixer'),
    ('attnlab.tasks.task', 'configs.language'),
    ('attnlab.tasks.task', '.task'),
    ('pallas_kernels.attention.api', 'attnlab.errors'),
    ('pallas_kernels.attention.api', 'numpy'),
)
ALLOWED = (
    ('attnlab', 'attnlab.zoo.ZOO'),
    ('attnlab.cli', 'attnlab.train.run'),
    ('attnlab.mixers.softmax.attention', 'pallas_kernels'),
    ('attnlab.data.text', 'attnlab.metrics.Mean'),
    ('pallas_kernels.attention.api', 'jax.numpy'),
    ('pallas_kernels.dispatch', 'contextvars'),
)


def test_the_rule_refuses_and_allows():
    assert [pair for pair in REFUSED if forbidden(*pair) is None] == []
    assert [pair for pair in ALLOWED if forbidden(*pair) is not None] == []
    with pytest.raises(AssertionError, match=r'attnlab\.extras has no place'):
        height('extras')


def test_circles_are_found():
    files = {
        'a.x': 'from a.y import f',
        'a.y': 'def f():\n    from a import z',
        'a.z': 'import a.x',
        'a.v': 'import a.w',
        'a.w': 'from a.v import g\nimport a.x',
        'a.u': 'import a.x',
    }
    found = circles(importing({name: ast.parse(source) for name, source in files.items()}))
    assert sorted(found, key=len) == ['a.w > a.v > a.w', 'a.x > a.y > a.z > a.x']
    assert circles({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}) == []


BROKEN = (
    (configs_asked_for_defaults, "rate = config.optimizer.get('rate', 1e-3)"),
    (configs_asked_for_defaults, "rate = cfg.get('rate')"),
    (environment_reads, "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'"),
    (environment_reads, 'from os import getenv'),
    (writes, "path.write_text('half')"),
    (writes, 'import os\nos.replace(a, b)'),
    (core_calls, 'import pallas_kernels\ny = pallas_kernels.attention(q, k, v)'),
    (core_calls, 'from pallas_kernels import delta_rule'),
    (programs_of_parts, '@dataclass\nclass Job:\n    def __call__(self):\n        subprocess.Popen(self.argv)'),
    (programs_of_parts, 'class Part(nnx.Module):\n    def __init__(self):\n        os.kill(1, 9)'),
    (calls_on_import, "jax.config.update('jax_enable_x64', True)"),
)
KEPT = (
    (configs_asked_for_defaults, "names = table.get('rate')"),
    (environment_reads, 'import os\nos.replace(a, b)'),
    (writes, "name.replace('a', 'b')"),
    (core_calls, 'from pallas_kernels import Softmax\ny = cores.attention(q, k, v)'),
    (programs_of_parts, 'class Job:\n    def __call__(self):\n        subprocess.Popen(self.argv)'),
    (calls_on_import, '"""Text."""\nf.defvjp(forward, backward)\nx = g()'),
)


def test_broken_habits_are_found_and_kept_ones_are_not():
    assert [source for finder, source in BROKEN if not finder(ast.parse(source))] == []
    assert [source for finder, source in KEPT if finder(ast.parse(source))] == []
    assert len(list(broken_habits('attnlab.utils', ast.parse('f()')))) == 2
    assert not list(broken_habits('attnlab.__main__', ast.parse('f()')))
