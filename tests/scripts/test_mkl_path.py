"""What MKL says of itself, as `scripts/bench_step.py` reads it."""

import importlib.util
import pathlib
import stat

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'mkl_path.py'
LINE = 'MKL_VERBOSE oneMKL 2024.0 Product build 20231011 for Intel(R) 64 architecture {}, Lnx 2.80GHz lp64 gnu_thread'


@pytest.fixture(scope='module')
def mkl_path():
    made = importlib.util.spec_from_file_location('mkl_path', SCRIPT)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ('path', 'expected'),
    [
        ('Intel(R) Architecture processors', 'generic'),
        ('Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) enabled processors', 'AVX2'),
        ('Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) enabled processors', 'AVX-512'),
        (
            'Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support for INT8, BF16, FP16 (limited) '
            'instructions, and Intel(R) Advanced Matrix Extensions (Intel(R) AMX) with INT8 enabled processors',
            'AMX',
        ),
    ],
)
def test_a_path_is_read_by_its_name(path, expected, mkl_path):
    said = '\n'.join(['of something else', LINE.format(path), 'MKL_VERBOSE SGEMM(N,N,256,256,256) 1.2ms CNR:OFF'])
    assert mkl_path.read(said) == expected


def test_products_alone_name_no_path(mkl_path):
    assert mkl_path.read('MKL_VERBOSE SGEMM(N,N,256,256,256) 1.2ms CNR:OFF Dyn:1 FastMM:1') is None


def test_a_peer_is_asked_by_its_interpreter(mkl_path, tmp_path):
    peer = tmp_path / 'python'
    peer.write_text(f'#!/bin/sh\ntest "$MKL_VERBOSE" = 1 && echo "{LINE.format(mkl_path.GENERIC)}"\n')
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    assert mkl_path.ask(str(peer)) == 'generic'
    peer.write_text('#!/bin/sh\necho no module named torch >&2\nexit 1\n')
    with pytest.raises(RuntimeError, match='cannot multiply with torch: no module named torch'):
        mkl_path.ask(str(peer))
