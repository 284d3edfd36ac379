"""Generated pages are up to date."""

import pathlib
import re
import subprocess
from typing import Any

import jax
import numpy as np

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.runs.loading import load_run
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import convolved
from attnlab.zoo.recipe import Recipe

ROOT = pathlib.Path(__file__).parents[1]


def test_the_zoo_table_is_what_the_command_prints(capsys):
    assert main(['zoo', '--format=markdown']) == 0
    assert capsys.readouterr().out.strip() in (ROOT / 'docs' / 'zoo.md').read_text()


def test_the_table_of_heads_is_what_the_command_prints(capsys):
    assert main(['zoo', '--heads', '--format=markdown']) == 0
    assert capsys.readouterr().out.strip() in (ROOT / 'docs' / 'heads.md').read_text()


def test_pages_that_count_recipes_count_those_of_the_zoo():
    rows, counted = list(ZOO.values()), f'of {len(ZOO)}'
    readme, training = ((ROOT / name).read_text() for name in ('README.md', 'docs/training.md'))
    streaming, packed = sum(row.streaming for row in rows), sum(row.packed for row in rows)
    assert f'({streaming} {counted} recipes stream, {packed} take packed documents)' in readme
    assert f'`attnlab zoo` lists {len(ZOO)} recipes' in readme
    assert f'the {sum(not row.causal for row in rows)} {counted} that are only bidirectional' in training
    assert f'The others are refused, {sum(map(without_prelude, rows))} {counted} rows' in training


def without_prelude(row: Recipe) -> bool:
    try:
        convolved(row, 'canon')
    except UserError:
        return True
    return False


def test_the_page_on_kernels_runs_as_it_stands():
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / 'kernels.md').read_text(), flags=re.DOTALL)
    (example,) = (block for block in blocks if 'class SquaredRelu' in block)
    body = example.partition('"""\n\n')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30
    with jax.numpy_rank_promotion('allow'):
        exec('\n'.join(blocks), {'__name__': 'kernels'})


def test_a_run_is_loaded_from_python_as_the_page_says(tmp_path, monkeypatch, capsys):
    (tmp_path / 'text.txt').write_text('def function(argument):\n    return argument + 1\n' * 50)
    monkeypatch.chdir(tmp_path)
    small = ('steps=2', 'batch_size=2', 'length=16', 'model.dim=8', 'model.stack.depth=1', 'evals=()')
    argv = ['train', '--config=language:zoo=mingru,data=text.txt', '--workdir=runs/gla', '--compilation_cache=']
    assert main([*argv, *(f'--config.{item}' for item in small)]) == 0
    capsys.readouterr()
    found: dict[str, Any] = {'__name__': 'page'}
    exec(after_training()[0], found)
    assert capsys.readouterr().out.startswith('2 (1, 4, 256) b') and found['logits'].dtype == 'float32'
    assert found['source'][0]['tokens'].shape == (16,)


def test_runs_are_converted_from_python_as_the_page_says(tmp_path, monkeypatch, capsys):
    (tmp_path / 'text.txt').write_text('def function(argument):\n    return argument + 1\n' * 50)
    monkeypatch.chdir(tmp_path)
    argv = ['train', '--config=language:zoo=mha,data=text.txt', '--workdir=runs/mha', '--compilation_cache=']
    assert (
        main([*argv, *(f'--config.{item}' for item in ('steps=1', 'batch_size=2', 'length=8', 'model.stack.depth=2'))])
        == 0
    )
    capsys.readouterr()
    found: dict[str, Any] = {'__name__': 'page'}
    for block in after_training()[1:]:
        exec(block, found)
    assert capsys.readouterr().out.startswith("{'valid/loss': 5.")
    again = load_run(tmp_path / 'runs' / 'unified').model()
    hidden, expected = (model.hidden(found['tokens'], found['ctx'])[0] for model in (again, found['smaller']))
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)
    assert found['hidden'].shape == (8, 8, 128)


def after_training() -> list[str]:
    """The blocks of Python of the page on what is done after training, in their order."""
    return re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / 'after_training.md').read_text(), flags=re.DOTALL)


def test_the_list_of_experiments_has_all_of_them_their_questions_and_where_they_were_run():
    root = ROOT / 'experiments'
    listed = [line for line in (root / 'README.md').read_text().splitlines() if line.startswith('| [')]
    expected = []
    for folder in [*sorted(root.iterdir()), *sorted((root / 'published').iterdir())]:
        if (folder / 'sweep.py').exists():
            title = (folder / 'README.md').read_text().splitlines()[0].removeprefix('# ')
            sizes = [size for size in ('cpu', 'full') if (folder / 'results' / f'{size}.json').exists()]
            name = folder.relative_to(root)
            said = f' {verdicts(folder)} |' if folder.parent != root else ''
            expected.append(f'| [{name}]({name}) | {title} | {", ".join(sizes) or "not yet"} |{said}')
    assert listed == expected


def verdicts(folder: pathlib.Path) -> str:
    """How many numbers of a published result agree, differ or are not comparable, by the table of its page."""
    _, _, text = (folder / 'README.md').read_text().partition('<!-- results of size cpu -->')
    lines = [line for line in text.partition('<!-- end of size cpu -->')[0].splitlines() if line.startswith('| ')]
    found = [line.removesuffix(' |').rpartition(' | ')[2].partition(':')[0] for line in lines[2:]]
    return ', '.join(f'{each}: {found.count(each)}' for each in dict.fromkeys(found))


def test_the_map_of_the_house_names_files_that_are_there():
    there = [
        path
        for room in ('attnlab', 'pallas_kernels', 'configs', 'scripts', 'tests')
        for path in (ROOT / room).rglob('*')
    ]
    paths = {f'/{path.relative_to(ROOT)}' for path in there} | {
        '/experiments',
        '/scripts',
        '/configs',
        '/tests',
        '/pallas_kernels',
    }
    named = re.findall(r'`([\w./]+/[\w./]*|\w+\.py)`', (ROOT / 'docs' / 'architecture.md').read_text())
    missing = [name for name in named if not any(path.endswith(f'/{name.rstrip("/")}') for path in paths)]
    assert len(named) > 80 and [name for name in missing if 'FAMILY' not in name] == []


def test_the_map_of_the_house_leaves_out_no_file_of_the_large_rooms():
    text = (ROOT / 'docs' / 'architecture.md').read_text()
    rooms = [ROOT / 'attnlab' / room for room in ('analysis', 'compare', 'functional')]
    files = [path.relative_to(ROOT / 'attnlab') for room in rooms for path in room.rglob('*.py')]
    assert [str(path) for path in files if path.name != '__init__.py' and f'`{path}`' not in text] == []


def test_every_page_is_reached_from_the_readme():
    found, left = set(), [ROOT / 'README.md']
    while left:
        page = left.pop()
        if page not in found:
            found.add(page)
            links = re.findall(r'\]\(([^)#:]+\.md)(?:#[^)]*)?\)', page.read_text())
            missing = [link for link in links if not (page.parent / link).is_file()]
            assert not missing, f'{page} links to {missing}, which are not there'
            left += [(page.parent / link).resolve() for link in links]
    pages = {*(ROOT / 'docs').glob('*.md'), ROOT / 'experiments' / 'README.md', ROOT / 'CONTRIBUTING.md'}
    assert pages - found == set()
    listed = re.findall(r'^\| \[[^]]+\]\(([^)]+)\) \|', (ROOT / 'docs' / 'README.md').read_text(), flags=re.MULTILINE)
    assert {page.name for page in (ROOT / 'docs').glob('*.md')} - {*listed} == {'README.md'}


def test_no_file_holds_both_sides_of_a_merge():
    found = subprocess.run(
        ['git', 'grep', '-lE', f'^({"<" * 7}|{">" * 7}) '], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1 and not found.stdout, found.stdout
