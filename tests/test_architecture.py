"""Imports run one way, and a few habits hold everywhere; read from syntax trees, so that nothing need be imported."""

import ast
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {'errors', 'typing', 'signature', 'config', 'renamed', 'context', 'random'},
            {'functional'},
            {'nn'},
            {'mixers'},
            {'blocks'},
            {'zoo', 'models'},
            {'losses', 'metrics', 'data'},
            {'tasks'},
            {'train'},
            {'evals'},
            {'runs'},
            {'sweep', 'convert', 'quantize'},
            {'compare', 'analysis'},
            {'experiment', 'testing', 'configuration', 'cli', 'help', '__init__', '__main__'},
        ),
    )
)
"""Parts of attnlab from the bottom up: each may import those below it, and those beside it."""

APART = frozenset({'zoo', 'models'})
"""Parts side by side that do not know each other."""

FILES = sorted(path for package in ('attnlab', 'pallas_kernels') for path in (ROOT / package).rglob('*.py'))


def parametrized(paths: list[pathlib.Path]) -> Callable:
    return pytest.mark.parametrize('path', [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths])


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports anywhere, names imported from a package spelled out: they may be modules too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f'line {node.lineno}: a relative import; name the module in full')
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def height(part: str) -> int:
    """The layer of a part of attnlab."""
    for place, layer in enumerate(LAYERS):
        if part in layer:
            return place
    raise AssertionError(f'attnlab.{part} has no place in the import rule')


def part_of(module: str) -> str:
    """The part of attnlab that a dotted name belongs to; what is in no part is in the package's own `__init__`."""
    parts = module.split('.')
    known = frozenset().union(*LAYERS)
    if len(parts) == 1 or parts[1] not in known:
        return '__init__'
    return parts[1]


def forbidden(importer: str, imported: str) -> str | None:
    """Why a module may not import another, both by dotted name; `None` when it may."""
    package, target = importer.split('.')[0], imported.split('.')[0]
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


def dotted(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' and len(parts) > 2 else parts)


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


@parametrized(FILES)
def test_imports_run_one_way(path: pathlib.Path):
    importer = dotted(path)
    reasons = {imported: forbidden(importer, imported) for imported in imports(ast.parse(path.read_text()))}
    assert not {imported: reason for imported, reason in reasons.items() if reason is not None}


@parametrized(FILES)
def test_habits(path: pathlib.Path):
    tree = ast.parse(path.read_text())
    assert path.name != 'utils.py', 'a helper lives with its one user, or in a module named for its subject'
    assert not configs_asked_for_defaults(tree), 'a config is asked for what it has, without a default'
    assert not environment_reads(tree), 'nothing depends on environment variables'
    assert path.name == '__main__.py' or not calls_on_import(tree), 'nothing happens on import'


@pytest.mark.parametrize(
    ('importer', 'imported'),
    [
        ('attnlab.nn.norms', 'attnlab.train.loop'),
        ('attnlab.mixers.softmax.attention', 'attnlab.zoo.ZOO'),
        ('attnlab.zoo.softmax.baselines', 'attnlab.models.stack.Stack'),
        ('attnlab.models.stack', 'attnlab.zoo'),
        ('attnlab.config', 'attnlab.functional.rotary'),
        ('attnlab.train.loop', 'attnlab.make_mixer'),
        ('attnlab.tasks.task', 'configs.language'),
        ('pallas_kernels.attention.api', 'attnlab.errors'),
        ('pallas_kernels.attention.api', 'numpy'),
    ],
)
def test_the_rule_refuses(importer: str, imported: str):
    assert forbidden(importer, imported) is not None


@pytest.mark.parametrize(
    ('importer', 'imported'),
    [
        ('attnlab.__init__', 'attnlab.zoo.ZOO'),
        ('attnlab.cli', 'attnlab.train.run'),
        ('attnlab.mixers.softmax.attention', 'pallas_kernels'),
        ('attnlab.losses', 'attnlab.metrics.Mean'),
        ('pallas_kernels.attention.api', 'jax.numpy'),
        ('pallas_kernels.dispatch', 'contextvars'),
    ],
)
def test_the_rule_allows(importer: str, imported: str):
    assert forbidden(importer, imported) is None


def test_a_part_without_a_place_is_named():
    with pytest.raises(AssertionError, match=r'attnlab\.extras has no place'):
        height('extras')


def test_every_part_has_a_place():
    for path in (ROOT / 'attnlab').iterdir():
        if (path.is_dir() and (path / '__init__.py').exists()) or path.suffix == '.py':
            height(path.stem)


@pytest.mark.parametrize(
    ('finder', 'source'),
    [
        (configs_asked_for_defaults, "rate = config.optimizer.get('rate', 1e-3)"),
        (configs_asked_for_defaults, "rate = cfg.get('rate')"),
        (environment_reads, "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'"),
        (environment_reads, 'from os import getenv'),
        (calls_on_import, "jax.config.update('jax_enable_x64', True)"),
    ],
)
def test_a_broken_habit_is_found(finder: Callable[[ast.AST], list[int]], source: str):
    assert finder(ast.parse(source))


@pytest.mark.parametrize(
    ('finder', 'source'),
    [
        (configs_asked_for_defaults, "names = table.get('rate')"),
        (environment_reads, 'import os\nos.replace(a, b)'),
        (calls_on_import, '"""Text."""\nf.defvjp(forward, backward)\nx = g()'),
    ],
)
def test_a_kept_habit_is_not(finder: Callable[[ast.AST], list[int]], source: str):
    assert not finder(ast.parse(source))
