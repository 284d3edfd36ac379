"""The table of compiled programs is made in pieces, and says with how much effort each was compiled."""

import collections

from tests.compile import table


def test_what_tells_most_is_compiled_first():
    found = table.telling({})
    assert len(set(found)) == len(found)
    assert table.telling({cell: {} for cell in found[:5]}) == found[5:]
    assert not table.telling({cell: {} for cell in found})
    # One recipe of each class on every topology and mesh, before any other recipe.
    first = [cell for cell in found if cell.recipe in table.CLASSES]
    assert first == found[: len(first)]
    assert {(cell.topology, cell.mesh) for cell in first} == table.WANTED.keys()
    # Of the others what compiles in seconds before steps.
    steps = ['step' in cell.program and cell.program != 'decoding step' for cell in found[len(first) :]]
    assert steps == sorted(steps) and 0 < sum(steps) < len(steps)


def test_what_is_dear_to_compile_comes_last():
    cell = next(cell for cell in table.telling({}) if cell.recipe == 'hyena')
    found = [cell.recipe for cell in table.telling({cell: {'seconds': table.DEAR + 1}})]
    assert set(found[found.index('hyena') :]) == {'hyena'}


def test_meshes_are_wanted_of_every_recipe_that_they_divide():
    counts = collections.Counter(cell.mesh for cell in table.telling({}) if cell.mesh)
    assert counts['data=4'] == counts['data=4,fsdp=2,tensor=2'] == len(table.ZOO)
    assert counts['sequence=4'] == sum(recipe.sequence for recipe in table.ZOO.values())


def test_a_line_of_the_default_effort_serves_less_and_none_serves_more():
    version = {'jax': '0.12', 'hash': 'abc'}
    whole, less = version | {'kernels': 5}, version | {'kernels': 5, 'level': 'O1'}
    assert table._serves(whole, version, '') and table._serves(whole, version, 'O1')
    assert table._serves(less, version, 'O1')
    assert not table._serves(less, version, '') and not table._serves(less, version, 'O0')
    assert not table._serves(whole, version | {'hash': 'def'}, '')


def test_the_page_says_how_many_were_compiled_with_less_effort():
    one, other, *_ = (cell for cell in table.telling({}) if cell.topology == 'v6e:2x2')
    lines = {one: {'kernels': 2}, other: {'kernels': 3, 'level': 'O1'}}
    assert ' programs were compiled or tried, 1 of them at O1.' in table.render(lines)
    assert 'at O' not in table.render({one: lines[one]})


def test_the_page_names_recipes_without_a_line_or_those_with_one_whichever_are_fewer():
    names = ('a', 'b', 'c')
    assert table._missing(names, {'c', 'a'}) == '1 of 3: b'
    assert table._missing(names, {'b'}) == '2 of 3, all but b'
    assert (table._missing(names, set(names)), table._missing(names, set())) == ('none', 'all')


def test_a_program_that_the_compiler_dies_of_is_a_line():
    cell = table.Cell('v5p:2x2x1', '', 'moba', 'decoding step')
    compiler = table.Compiler()
    compiler.process.kill()
    line = compiler.found(cell)
    assert table.Cell.of(line) == cell
    assert line['failed'] == 'the compiler died of signal 9'


def test_every_program_has_its_line_whichever_process_compiles_it():
    cells = [table.Cell('H100x1', '', recipe, 'decoding step') for recipe in ('base_conv', 'minlstm', 'rg_lru')]
    lines = list(table.run(cells, {}, workers=2))
    assert {table.Cell.of(line) for line in lines} == set(cells)
    assert not any('failed' in line for line in lines)
