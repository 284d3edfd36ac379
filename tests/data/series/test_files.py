"""Series in files, and the published ones."""

import dataclasses
import datetime
import gzip
import hashlib
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from attnlab.data.series import published
from attnlab.data.series.columns import Columns
from attnlab.data.series.files import CSVSeries, NPZSeries, ParquetSeries, read_array, read_table
from attnlab.data.series.published import PUBLISHED, PublishedSeries, blob_digest
from attnlab.data.series.series import Shares
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError

NUMBERS = np.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('dates.csv', 'date,a,b\n' + ''.join(f'2020-01-0{i},{2 * i},{2 * i + 1}\n' for i in range(6))),
        ('plain.csv', ''.join(f'{2 * i};{2 * i + 1}\n' for i in range(6))),
        ('marked.csv', '\ufeffa\tb\n' + ''.join(f'{2 * i}\t{2 * i + 1}\n' for i in range(6))),
    ],
)
def test_tables_of_text(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding='utf-8')
    (tmp_path / f'{name}.gz').write_bytes(gzip.compress(text.encode()))
    for suffix in ('', '.gz'):
        series = CSVSeries(str(tmp_path / f'{name}{suffix}'))
        np.testing.assert_array_equal(series.values(), NUMBERS)
        assert series.variates == 2
    second = CSVSeries(str(tmp_path / name), columns=('b' if 'a' in text else '1',))
    np.testing.assert_array_equal(second.values(), NUMBERS[:, 1:])
    assert second.variates == 1
    content = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert second.describe()['content'] == content


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('date,a\n2020,1\n2021,\n', "line 3, column 'a' is empty"),
        ('date,a\nx,1\ny,one\n', "line 3, column 'a' is 'one'"),
        ('a,b\n1,2\n\n3,x\n', "line 4, column 'b' is 'x'"),
        ('a,b\n1,2\n3\n', 'line 3 has 1 cells, not 2 as line 1'),
        ('a,b\n1,2\n1,5,2\n3,4\n', 'line 3 has 3 cells, not 2 as line 1'),
        ('date,a\n2020-01-01,1\n2020-01-02,1,234.5\n', 'line 3 has 3 cells, not 2 as line 1'),
        ('1;2\n\n3;4;5\n', 'line 3 has 3 cells, not 2 as line 1'),
        ('a,b\n1,2\n3,nan\n', 'missing or infinite values, the first in row 1, variate 1'),
        ('', 'is empty, or begins with an empty line'),
        ('a,b,c\n1,2\n', '3 names in line 1 and 2 cells in line 2'),
    ],
)
def test_wrong_cells_are_named(tmp_path, text, message):
    (tmp_path / 'a.csv').write_text(text)
    with pytest.raises(UserError, match=message):
        CSVSeries(str(tmp_path / 'a.csv')).values()


def test_wrong_columns_and_files_are_named(tmp_path):
    (tmp_path / 'a.csv').write_text('date,load\nx,1\n')
    with pytest.raises(UserError, match=r"has no column 'lode'; did you mean 'load'"):
        CSVSeries(str(tmp_path / 'a.csv'), columns=('lode',)).values()
    with pytest.raises(UserError, match=r'there is no file nowhere\.csv'):
        CSVSeries('nowhere.csv').values()
    (tmp_path / 'twice.csv').write_text('date,a,a\nx,1,2\ny,3,4\n')
    series = CSVSeries(str(tmp_path / 'twice.csv'))
    np.testing.assert_array_equal(series.values(), [[1, 2], [3, 4]])
    with pytest.raises(UserError, match="the series has 2 columns called 'a'; rename them in the file"):
        Columns(targets=('a',)).places(series)
    with pytest.raises(UserError, match="has 2 columns called 'a'; rename them in the file"):
        CSVSeries(str(tmp_path / 'twice.csv'), columns=('a',)).values()
    with pytest.raises(UserError, match=r"column 'load' of .* is asked for 2 times; once is enough"):
        CSVSeries(str(tmp_path / 'a.csv'), columns=('load', 'load')).values()
    (tmp_path / 'quoted.csv').write_text('date,"temp, C",b\nx,1,2\n')
    with pytest.raises(UserError, match='has 4 names in line 1 and 3 cells in line 2; a cell in quotes must not hold'):
        CSVSeries(str(tmp_path / 'quoted.csv')).values()


def test_arrays(tmp_path):
    np.savez(tmp_path / 'a.npz', data=np.stack([NUMBERS, -NUMBERS], axis=2))
    np.save(tmp_path / 'a.npy', NUMBERS)
    for series in (NPZSeries(str(tmp_path / 'a.npz')), NPZSeries(str(tmp_path / 'a.npy'))):
        np.testing.assert_array_equal(series.values(), NUMBERS)
    second = NPZSeries(str(tmp_path / 'a.npz'), feature=1)
    np.testing.assert_array_equal(second.values(), -NUMBERS)
    assert second.describe()['feature'] == 1
    with pytest.raises(UserError, match="has no array 'dat'; did you mean 'data'"):
        NPZSeries(str(tmp_path / 'a.npz'), key='dat').values()
    with pytest.raises(UserError, match=r'feature is 2; .* has 2 features'):
        NPZSeries(str(tmp_path / 'a.npz'), feature=2).values()


def test_the_first_column_may_have_dates(tmp_path):
    (tmp_path / 'a.csv').write_text('date,a\n2020-01-01 22:00,1\n2020-01-01 23:00,2\n2020-01-02 00:00,3\n')
    series = CSVSeries(str(tmp_path / 'a.csv'))
    np.testing.assert_array_equal(series.dates(), np.datetime64('2020-01-01T22', 's') + 3600 * np.arange(3))
    assert (series.names, series.every) == (('a',), 'hour')
    (tmp_path / 'b.csv').write_text('a,b\n1,2\n')
    assert CSVSeries(str(tmp_path / 'b.csv')).dates() is None
    (tmp_path / 'c.csv').write_text('where,a\nBerlin,1\n')
    with pytest.raises(UserError, match=r"the first column of .*c\.csv cannot be read: 'Berlin', in row 0"):
        CSVSeries(str(tmp_path / 'c.csv')).dates()


@pytest.mark.parametrize(
    ('header', 'first', 'names'),
    [
        ('date,0,1', '2016-07-0{},', ('0', '1')),
        ('date,0,OT', '2016/7/{} 02:00,', ('0', 'OT')),
        (',a,b', '{},', ('a', 'b')),
        (',0,1', '{},', ('0', '1')),
        ('"",a,b', '2016-07-0{},', ('a', 'b')),
        ('date,a,b', '2016070{},', ('a', 'b')),
        ('Date,0,1', '2016070{},', ('0', '1')),
        ('Unnamed: 0,a,b', '{},', ('a', 'b')),
        ('Unnamed: 0,0,1', '{},', ('0', '1')),
        ('Unnamed: 0,a,b', '2016-07-0{},', ('a', 'b')),
    ],
)
def test_headers_and_first_columns_of_others(tmp_path, header, first, names):
    rows = ''.join(f'{first.format(i + 1)}{2 * i},{2 * i + 1}\n' for i in range(6))
    (tmp_path / 'a.csv').write_text(f'{header}\n{rows}')
    series = CSVSeries(str(tmp_path / 'a.csv'))
    assert series.names == names
    np.testing.assert_array_equal(series.values(), NUMBERS)
    np.testing.assert_array_equal(CSVSeries(str(tmp_path / 'a.csv'), columns=names[1:]).values(), NUMBERS[:, 1:])
    if first == '{},':
        assert series.dates() is None
    else:
        assert series.dates().astype('datetime64[D]').astype(str).tolist() == [f'2016-07-0{i}' for i in range(1, 7)]


@pytest.mark.parametrize('text', ['0,1,2\n1.5,2.5,3.5\n', '0,1,2\n5,2,7\n', '0;1\n0.5;-2.0\n'])
def test_numbers_counted_from_zero_are_a_header(tmp_path, text):
    """As `DataFrame(array).to_csv(index=False)` of pandas writes it."""
    (tmp_path / 'a.csv').write_text(text)
    series = CSVSeries(str(tmp_path / 'a.csv'))
    assert series.names == ('0', '1', '2')[: series.variates] and len(series.values()) == 1


@pytest.mark.parametrize(
    ('text', 'names', 'rows'),
    [
        ('0,1\n2,3\n', ('0', '1'), 2),
        ('0,1\n0.5,2\n', ('0', '1'), 2),
        ('0,1,2\n', ('0', '1', '2'), 1),
        ('0\n1.5\n', ('0',), 2),
        ('Berlin,1,2\nParis,3,4\n', ('1', '2'), 2),
        ('2016-07-01,1,2\n2016-07-02,3,4\n', ('1', '2'), 2),
        ('20160701,1\n20160702,2\n', ('0', '1'), 2),
        ('load,a\n20160701,1\n', ('load', 'a'), 1),
        ('time,a\n0,1\n1,2\n', ('time', 'a'), 2),
    ],
)
def test_what_is_no_header_and_no_date(tmp_path, text, names, rows):
    (tmp_path / 'a.csv').write_text(text)
    series = CSVSeries(str(tmp_path / 'a.csv'))
    assert series.names == names and series.values().shape == (rows, len(names))


HOURS = [datetime.datetime(2020, 1, 1, hour) for hour in range(6)]
DATES = {
    'times': pa.array(HOURS, pa.timestamp('us')),
    'zone': pa.array([hour - datetime.timedelta(hours=1) for hour in HOURS], pa.timestamp('s', 'Europe/Berlin')),
    'texts': pa.array([hour.isoformat(' ') for hour in HOURS]),
    'none': None,
}


@pytest.mark.parametrize('dates', DATES)
def test_parquet(tmp_path, dates):
    columns = {'a': pa.array(NUMBERS[:, 0].astype(int)), 'b': pa.array(NUMBERS[:, 1], pa.float32())}
    first = {} if DATES[dates] is None else {'date': DATES[dates]}
    path = tmp_path / 'a.parquet'
    pa.parquet.write_table(pa.table(first | columns), path)
    series = ParquetSeries(str(path))
    np.testing.assert_array_equal(series.values(), NUMBERS)
    assert (series.variates, series.names) == (2, ('a', 'b'))
    np.testing.assert_array_equal(ParquetSeries(str(path), columns=('b',)).values(), NUMBERS[:, 1:])
    if dates == 'none':
        assert series.dates() is None
    else:
        np.testing.assert_array_equal(series.dates(), np.array(HOURS, 'datetime64[s]'))
    assert series.describe()['content'] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize('step', [datetime.timedelta(days=-1), datetime.timedelta(milliseconds=-250)])
def test_a_table_that_is_newest_first_is_named(tmp_path, step):
    days = [datetime.datetime(2020, 3, 1, 12) + i * step for i in range(6)]
    (tmp_path / 'a.csv').write_text('date,a\n' + ''.join(f'{day},{i}\n' for i, day in enumerate(days)))
    pa.parquet.write_table(pa.table({'date': days, 'a': NUMBERS[:, 0]}), tmp_path / 'a.parquet')
    for series in (CSVSeries(str(tmp_path / 'a.csv')), ParquetSeries(str(tmp_path / 'a.parquet'))):
        with pytest.raises(UserError, match=rf'{series.path} .* 2020-03-01T12:00:00 .*; sort them, oldest first'):
            series.values()


def test_rows_that_stand_still_or_have_no_dates_are_read(tmp_path):
    clocks = ('02:00', '02:30', '02:00', '02:30', '03:00')
    (tmp_path / 'hour_again.csv').write_text('date,a\n' + ''.join(f'2020-10-25 {each},1\n' for each in clocks))
    (tmp_path / 'tenths.csv').write_text('date,a\n' + ''.join(f'2020-10-25 02:00:00.{i},1\n' for i in range(5)))
    (tmp_path / 'german.csv').write_text('date,a\n' + ''.join(f'{9 - i}.5.2020,1\n' for i in range(5)))
    for path in tmp_path.iterdir():
        assert CSVSeries(str(path)).values().shape == (5, 1), path


def test_the_index_of_pandas_is_no_variate(tmp_path):
    path = tmp_path / 'a.parquet'
    columns = {'a': NUMBERS[:, 0], 'b': NUMBERS[:, 1]}
    pa.parquet.write_table(pa.table(columns | {'__index_level_0__': np.arange(9, 15)}), path)
    series = ParquetSeries(str(path))
    assert series.names == ('a', 'b') and series.dates() is None
    np.testing.assert_array_equal(series.values(), NUMBERS)
    pa.parquet.write_table(pa.table(columns | {'__index_level_0__': pa.array(HOURS)}), path)
    np.testing.assert_array_equal(ParquetSeries(str(path)).dates(), np.array(HOURS, 'datetime64[s]'))


def test_what_a_reader_of_parquet_does_not_do_is_named(tmp_path, monkeypatch):
    """As of damaged schemas, which may say that whole numbers have more bits than there are."""
    pyarrow.parquet.write_table(pa.table({'a': [1.0, 2.0]}), tmp_path / 'a.parquet')

    def refused(*_, **__):
        raise pa.ArrowNotImplementedError('Integers with more than 64 bits not implemented')

    monkeypatch.setattr(pyarrow.parquet, 'read_table', refused)
    with pytest.raises(UserError, match=r'a\.parquet cannot be read as Parquet: Integers with more than 64 bits'):
        ParquetSeries(str(tmp_path / 'a.parquet')).values()


def test_damaged_pages_of_parquet_are_named(tmp_path):
    path = tmp_path / 'a.parquet'
    dates = [f'2020-01-01 00:00:{i:02}' for i in range(60)]
    table = pa.table({'date': dates, 'a': np.random.default_rng(0).normal(size=60)})
    pa.parquet.write_table(table, path, compression='none')
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole) * 3 // 4).join([whole[:4], whole[4 + len(whole) * 3 // 4 :]]))
    series = ParquetSeries(str(path))
    for read in (series.values, series.dates):
        with pytest.raises(UserError, match=rf'{path} cannot be read as Parquet: '):
            read()
    path.write_bytes(whole.replace(b'00:00:', b'00\xff00:'))
    with pytest.raises(UserError, match=rf'{path} cannot be read as Parquet: .*UTF8'):
        series.dates()
    assert series.values().shape == (60, 1)


def test_mistakes_in_parquet_are_named(tmp_path, monkeypatch):
    path = tmp_path / 'a.parquet'
    series = ParquetSeries(str(path))
    with pytest.raises(UserError, match='there is no file'):
        series.values()
    path.write_text('a,b')
    with pytest.raises(UserError, match='cannot be read as Parquet'):
        series.values()
    pa.parquet.write_table(pa.table({'a': [1.0, None], 'b': [1, 2]}), path)
    with pytest.raises(UserError, match='1 missing or infinite values, the first in row 1, variate 0'):
        series.values()
    with pytest.raises(UserError, match="has no column 'c' of numbers"):
        ParquetSeries(str(path), columns=('c',)).values()
    pa.parquet.write_table(pa.table({'a': [1.0, 2.0], 'where': ['here', 'there']}), path)
    with pytest.raises(UserError, match="has column 'where' of string; one of dates, others of numbers"):
        series.values()
    pa.parquet.write_table(pa.table({'day': pa.array([datetime.date(2020, 1, 1), None]), 'a': [1, 2]}), path)
    with pytest.raises(UserError, match="has 1 rows without a date in column 'day'"):
        series.dates()
    pa.parquet.write_table(pa.table({'day': pa.array(HOURS[:2], pa.timestamp('s', 'Mars/Olympus')), 'a': [1, 2]}), path)
    with pytest.raises(UserError, match=r'cannot be read as Parquet: .*Mars/Olympus'):
        series.dates()
    assert series.values().shape == (2, 1)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(UserError, match=r'Parquet needs pyarrow, .*: pip install "attnlab\[parquet\]"'):
        series.values()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A published series of six rows, in a folder."""
    (tmp_path / 'toy.csv').write_text('a,b\n' + '\n'.join(f'{2 * i},{2 * i + 1}' for i in range(6)))
    path = tmp_path / 'toy.csv'
    row = published.Published('toy.csv', 2, 6, 1, Shares(0.5, 0.2), blob=blob_digest(path))
    monkeypatch.setattr(published, 'PUBLISHED', {**PUBLISHED, 'toy': row})
    return PublishedSeries('toy', str(tmp_path))


def test_a_published_file_is_checked(toy, tmp_path):
    np.testing.assert_array_equal(toy.values(), NUMBERS)
    assert scaled(toy).borders['test'] == (5, 6) and toy.names == ('a', 'b') and toy.dates() is None
    (tmp_path / 'toy.csv').write_text('a,b\n1,2\n')
    with pytest.raises(UserError, match='is not the published file of toy'):
        toy.values()


def test_a_published_file_has_the_published_shape(toy, tmp_path, monkeypatch):
    short = published.Published('toy.csv', 2, 7, 1)
    monkeypatch.setattr(published, 'PUBLISHED', {'toy': short})
    with pytest.raises(UserError, match='has 6 rows; toy has 7'):
        toy.values()


def test_what_cannot_be_downloaded_is_put_there_by_hand(tmp_path):
    with pytest.raises(UserError, match=r'weather has to be put by hand at .*weather.csv'):
        PublishedSeries('weather', str(tmp_path)).values()
    with pytest.raises(UserError, match="no published series 'etth3'; did you mean 'etth"):
        PublishedSeries('etth3')
    with pytest.raises(UserError, match="etth1 has no column 'OTT'; did you mean 'OT'"):
        PublishedSeries('etth1', str(tmp_path), columns=('OTT',))
    with pytest.raises(UserError, match="exchange has no column 'OT'; "):
        PublishedSeries('exchange', str(tmp_path), columns=('OT',))


def test_columns_of_a_published_array_are_those_that_are_named(tmp_path, monkeypatch):
    row = dataclasses.replace(PUBLISHED['pems08'], variates=4, rows=6)
    monkeypatch.setattr(published, 'PUBLISHED', {**PUBLISHED, 'pems08': row})
    numbers = np.arange(6 * 4.0).reshape(6, 4)
    np.savez(tmp_path / row.file, data=numbers)
    series = PublishedSeries('pems08', str(tmp_path), columns=('3', '0'))
    np.testing.assert_array_equal(series.values(), numbers[:, [3, 0]])
    assert Columns(targets=('0',)).places(series).targets == (1,)


def test_git_names_a_file_by_its_content(tmp_path):
    (tmp_path / 'a').write_bytes(b'what is up, doc?')
    assert blob_digest(tmp_path / 'a') == 'bd9dbf5aae1a3862dd1526723246b20206e5fc37'


def test_every_published_series_has_splits_of_its_rows():
    for name, row in PUBLISHED.items():
        assert sum(row.split.counts(row.rows)) <= row.rows and row.season >= 1, name


def flagged(archive, flag):
    """An archive of one member with a flag set of it, where it begins and in the directory."""
    found = bytearray(archive)
    for place in (6, archive.rindex(b'PK\1\2') + 8):
        found[place] |= flag
    return bytes(found)


def test_files_that_are_damaged_are_named(tmp_path):
    path = tmp_path / 'a.npz'
    np.savez(path, data=NUMBERS)
    whole = path.read_bytes()
    np.savez(path, data=np.array([[1, None]], dtype=object))
    for content in (whole.replace(b"{'descr'", b"{'de(((", 1), path.read_bytes(), whole[:-30], b''):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf'{path} cannot be read as an array of numpy'):
            read_array(path, 'data', 0)
    # The first member says that it is encrypted, or a patch: what Python's reader of archives does not do.
    for flag in (1, 32):
        path.write_bytes(flagged(whole, flag))
        with pytest.raises(UserError, match=rf'{path} cannot be read as an array of numpy'):
            read_array(path, 'data', 0)
    (tmp_path / 'a.npy').write_bytes(b'')
    with pytest.raises(UserError, match=r'a\.npy cannot be read as an array of numpy'):
        read_array(tmp_path / 'a.npy', 'data', 0)
    text = gzip.compress(''.join(f'{i},{i * i}\n' for i in range(20_000)).encode())
    broken = text[: len(text) // 2] + bytes(40) + text[len(text) // 2 + 40 :]
    for name, content in (('cut', text[:-100]), ('broken', broken)):
        (tmp_path / f'{name}.csv.gz').write_bytes(content)
        with pytest.raises(UserError, match=rf'{name}.csv.gz (is no text in UTF-8|cannot be read as a table)'):
            read_table(tmp_path / f'{name}.csv.gz')
