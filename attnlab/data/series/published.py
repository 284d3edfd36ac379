"""The published series of long-term forecasting: splits, seasons, and the files they are in."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attnlab.data.download import fetch
from attnlab.data.series.dates import Dates
from attnlab.data.series.files import digest, read_array, read_table, table, table_dates
from attnlab.data.series.series import Counts, Series, Shares, Values, check_values
from attnlab.errors import UserError, nearest

FOLDER = '~/.cache/attnlab/series'
"""The default folder of downloads."""


@dataclasses.dataclass(frozen=True)
class Published:
    """One published series.

    Attributes:
      file: its name in the folder of downloads.
      variates: columns.
      rows: steps.
      season: steps of a day; of a year for weekly data; 1 for days.
      split: as the papers divide it.
      url: where the file is; `None`: nowhere that a program can read it, so that it has to be put there by hand.
      size: bytes of the file; `None`: not known.
      md5: its checksum, as libraries that download it have it.
      blob: its checksum as a blob of git, SHA-1 over its length and content.
      every: how far its rows are apart, where the file has dates (`attnlab.data.series.dates.MARKS`).
      names: of the columns, where the header of a file with one (`.csv`) is known.
    """

    file: str
    variates: int
    rows: int
    season: int
    split: Shares | Counts = Shares()
    url: str | None = None
    size: int | None = None
    md5: str | None = None
    blob: str | None = None
    every: str | None = None
    names: tuple[str, ...] | None = None


HOUR = Counts(8640, 2880, 2880)
"""12, 4 and 4 months of 30 days in hours."""
QUARTER = Counts(34560, 11520, 11520)
"""The same in quarters of an hour."""


def _traffic_flow(rows: int) -> Counts:
    """Cuts at `int(0.6 n)` and `int(0.8 n)` of n rows, as the released loader of the PEMS files makes them.

    `Dataset_PEMS` of https://github.com/thuml/iTransformer, `data_provider/data_loader.py`; `Shares` rounds the test
    split, and has its first row one later where 0.8 n is no whole number.
    """
    first, second = int(0.6 * rows), int(0.8 * rows)
    return Counts(first, second - first, rows - second)


TRANSFORMER = ('HUFL', 'HULL', 'MUFL', 'MULL', 'LUFL', 'LULL', 'OT')
"""Columns of the four series of transformers' temperatures."""
ETT = 'https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small'
LAI = 'https://raw.githubusercontent.com/laiguokun/multivariate-time-series-data/master'

PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        'etth1': Published(
            'ETTh1.csv',
            7,
            17420,
            24,
            HOUR,
            f'{ETT}/ETTh1.csv',
            2589657,
            '8381763947c85f4be6ac456c508460d6',
            every='hour',
            names=TRANSFORMER,
        ),
        'etth2': Published(
            'ETTh2.csv',
            7,
            17420,
            24,
            HOUR,
            f'{ETT}/ETTh2.csv',
            2417960,
            '51a229a3fc13579dd939364fefe9c7ab',
            every='hour',
            names=TRANSFORMER,
        ),
        'ettm1': Published(
            'ETTm1.csv',
            7,
            69680,
            96,
            QUARTER,
            f'{ETT}/ETTm1.csv',
            10360719,
            '82d6bd89109c63d075d99c1077b33f38',
            every='minute',
            names=TRANSFORMER,
        ),
        'ettm2': Published(
            'ETTm2.csv',
            7,
            69680,
            96,
            QUARTER,
            f'{ETT}/ETTm2.csv',
            9677236,
            '7687e47825335860bf58bccb31be0c56',
            every='minute',
            names=TRANSFORMER,
        ),
        'electricity': Published(
            'electricity.txt.gz',
            321,
            26304,
            24,
            url=f'{LAI}/electricity/electricity.txt.gz',
            blob='df158a9fff65428ece107200432a72c992d5e4e9',
        ),
        'traffic': Published(
            'traffic.txt.gz',
            862,
            17544,
            24,
            url=f'{LAI}/traffic/traffic.txt.gz',
            blob='63ddb74bf7602568f36056a0b1a47aa407f0a6fe',
        ),
        'solar': Published(
            'solar_AL.txt.gz',
            137,
            52560,
            144,
            url=f'{LAI}/solar-energy/solar_AL.txt.gz',
            blob='08a1f235546b3708309ff4fb544a54bb82e4f5e7',
        ),
        'exchange': Published(
            'exchange_rate.txt.gz',
            8,
            7588,
            1,
            url=f'{LAI}/exchange_rate/exchange_rate.txt.gz',
            size=177142,
            md5='9dd5a9c8f8f324e234938400f232fa08',
            blob='d72d0d7a5d5d06ecd1cf4c79396180b2962be101',
        ),
        'weather': Published(
            'weather.csv', 21, 52696, 144, blob='2c57f67fbe402293aad49611862165c9b3ecdcc8', every='minute'
        ),
        'ili': Published(
            'national_illness.csv', 7, 966, 52, blob='ae0424af871366ecacc501399fcb730e9200458c', every='week'
        ),
        'pems03': Published('PEMS03.npz', 358, 26208, 288, _traffic_flow(26208)),
        'pems04': Published('PEMS04.npz', 307, 16992, 288, _traffic_flow(16992)),
        'pems07': Published('PEMS07.npz', 883, 28224, 288, _traffic_flow(28224)),
        'pems08': Published('PEMS08.npz', 170, 17856, 288, _traffic_flow(17856)),
    }
)
"""The published series by name."""


@dataclasses.dataclass(frozen=True)
class PublishedSeries(Series):
    """A published series, downloaded and checked, or put into the folder by hand.

    Attributes:
      name: one of `PUBLISHED`.
      data_dir: folder of the files.
      columns: names of the columns that are read, such as `('OT',)` for one variate; empty: all.
    """

    name: str
    data_dir: str = FOLDER
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `UserError` for a name that is none, and for a column that it is known not to have."""
        if self.name not in PUBLISHED:
            raise UserError(f'there is no published series {self.name!r}{nearest(self.name, PUBLISHED)}')
        names = self._published_names
        for column in self.columns:
            if names is not None and column not in names:
                raise UserError(f'{self.name} has no column {column!r}{nearest(column, names)}')

    @property
    def published(self) -> Published:
        """What is known of it."""
        return PUBLISHED[self.name]

    @property
    def split(self) -> Shares | Counts:  # type: ignore[override]
        """As the papers divide it."""
        return self.published.split

    @property
    def season(self) -> int:  # type: ignore[override]
        """Steps of a day, or of a year."""
        return self.published.season

    @property
    def variates(self) -> int:
        return len(self.columns) or self.published.variates

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the header, where the file has one."""
        path = self.path()
        return self.columns or (super().names if path.suffix == '.npz' else table(path).names)

    @property
    def told_names(self) -> tuple[str, ...] | None:
        """As published, without the file."""
        return self.columns or self._published_names

    @property
    def _published_names(self) -> tuple[str, ...] | None:
        published = self.published
        indices = None if published.file.endswith('.csv') else tuple(map(str, range(published.variates)))
        return published.names or indices

    @property
    def every(self) -> str | None:
        """As published, without reading the file."""
        return self.published.every

    def dates(self) -> Dates | None:
        """The dates of the file, if it has any."""
        return None if self.every is None else table_dates(self.path())

    def values(self) -> Values:
        path = self.path()
        if path.suffix == '.npz':
            found = check_values(str(path), read_array(path, 'data', 0), self.published.variates)
            found = found[:, [int(name) for name in self.columns]] if self.columns else found
        else:
            found = read_table(path, self.columns)
        values = check_values(str(path), found, self.variates)
        if len(values) != self.published.rows:
            raise UserError(f'{path} has {len(values)} rows; {self.name} has {self.published.rows}')
        return values

    def path(self) -> pathlib.Path:
        """The file, downloaded unless it is there. Raises `UserError` where it cannot be had, or is another one."""
        published, folder = self.published, pathlib.Path(self.data_dir).expanduser()
        path = folder / published.file
        if published.url is None or published.size is None:
            if not path.is_file():
                source = '' if published.url is None else f', from {published.url}'
                raise UserError(f'{self.name} has to be put by hand at {path}{source}: see docs/series.md')
        else:
            fetch(published.url, path, size=published.size, digest=published.md5, algorithm='md5')
        if published.blob is not None and blob_digest(path) != published.blob:
            raise UserError(f'{path} is not the published file of {self.name}: git calls it {blob_digest(path)}')
        return path

    def describe(self) -> dict[str, Any]:
        return {'source': 'published', 'name': self.name, 'columns': self.columns, 'content': digest(self.path())}


def blob_digest(path: pathlib.Path) -> str:
    """The name that git has for a file, SHA-1 over its length and content."""
    content = path.read_bytes()
    return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()
